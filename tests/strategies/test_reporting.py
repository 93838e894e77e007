"""The strategy's report of the model's size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.reporting import report_exception, told_flops
from unicron_lightning.worker.agreement import ParametersDiffer
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.control.activity import Activity
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.reporting import StepReports


class Module:
    """A LightningModule with the attributes that are read."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_a_module_may_tell_the_flops_of_a_step():
    assert told_flops(Module()) is None
    assert told_flops(Module(flops_per_step=6 * 10**15)) == 6e15


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "6e15"])
def test_what_is_no_number_above_0_is_refused(wrong: Any):
    with pytest.raises(ConfigError, match=r"Module\.flops_per_step=.*: expected FLOPs"):
        told_flops(Module(flops_per_step=wrong))


class Control:
    """Records the reported values."""

    def __init__(self) -> None:
        self.kinds: list[tuple[str, int]] = []

    def progress(self, step: int, metrics: Any, samples: int) -> None: ...

    def event(self, name: str, **fields: Any) -> None: ...

    def report(self, kind: str, cause: str, *, step: int, ends: bool = False, **about: Any) -> None:
        self.kinds.append((kind, step))
        self.ends, self.first = ends, "first" in about["details"]


@pytest.mark.parametrize(("rank", "told"), [(0, [("nan_loss", 2), ("nan_loss", 5)]), (1, [])])
def test_a_loss_that_is_no_number_is_told_once_by_one_rank(rank: int, told: list[tuple[str, int]]):
    control, reports = Control(), StepReports()
    engine: Any = SimpleNamespace(
        activity=Activity(), control=control, step=0, world=World(epoch=1, kind="init", rank=rank, size=2, hold=False)
    )
    for loss in (1.0, float("nan"), float("nan"), 1.0, float("inf")):
        reports.finished(engine, SimpleNamespace(recomputed=[]), loss, 8)  # type: ignore[arg-type]
    assert control.kinds == told


def test_an_error_in_the_first_checkpoint_of_a_process_is_told_as_such():
    control, activity = Control(), Activity()
    engine: Any = SimpleNamespace(step=7, activity=activity)
    scope: dict[str, Any] = {}
    exec(compile("def save():\n    raise KeyError('x')", "trainer/connectors/checkpoint_connector.py", "exec"), scope)

    def failing() -> bool:
        with pytest.raises(KeyError) as raised, activity.during("checkpoint"):
            scope["save"]()
        report_exception(control, raised.value, engine)  # type: ignore[arg-type]
        return control.first

    assert failing() and failing()
    with activity.during("checkpoint"):
        pass
    assert not failing()


@pytest.mark.parametrize("phase", ["epoch_end", "validation", "hooks"])
def test_an_error_in_a_hook_is_first_if_the_process_has_not_passed_the_phase(phase: Any):
    """Hooks of the end of a data epoch, and predictions, have no frame of their own that shows the phase."""
    control, activity = Control(), Activity()
    engine: Any = SimpleNamespace(step=7, activity=activity)
    activity.enter(phase)
    report_exception(control, KeyError("x"), engine)  # type: ignore[arg-type]
    assert control.first is (phase != "hooks")
    activity.enter("boundary")
    activity.enter(phase)
    report_exception(control, KeyError("x"), engine)  # type: ignore[arg-type]
    assert not control.first


@pytest.mark.parametrize(("stops", "kind"), [(True, "parameters_differ"), (False, "other_software_error")])
def test_parameters_that_differ_end_the_task_only_with_stop(stops: bool, kind: str):
    control: Any = Control()
    engine: Any = SimpleNamespace(step=7, activity=Activity())
    report_exception(control, ParametersDiffer("they differ", stops=stops), engine)
    assert control.kinds == [(kind, 7)]
    assert control.ends is not stops, "a worker that is to be replaced is reported as ending"


@pytest.mark.parametrize(
    ("every", "choice", "words"),
    [(-1, "heal", "digest_every=-1: expected a number of steps"), (1, "halt", "on_divergence='halt': expected 'heal'")],
)
def test_what_divergence_does_not_know_is_refused(every: int, choice: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        Divergence(every, choice)
