"""The differences from ddp that docs/differences.md names: at most ten, each of which must occur."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from matrix.features import Case

WORLDS: Final = ("one", "two", "killed")
"""Worlds of the run under unicron: one worker, two, and two with one killed and replaced."""
_ROWS = ("logged", "table")
_PER_MICRO_BATCH = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward")


@dataclass(frozen=True, kw_only=True)
class Documented:
    """A difference.

    Attributes:
        name: short.
        row: start of the row of docs/differences.md.
        when: values of the cases in which it occurs.
        worlds: those in which it occurs.
        kinds: the kinds of record that differ.
        without: returns a record of these kinds without what differs.
    """

    name: str
    row: str
    when: Case
    worlds: tuple[str, ...] = WORLDS
    kinds: tuple[str, ...]
    without: Callable[[str, Any, Case], Any]

    def applies(self, kind: str, case: Case, world: str) -> bool:
        """Whether records of a kind may differ in a case and a world."""
        return kind in self.kinds and world in self.worlds and self.when.items() <= case.items()


def _calls(*names: str) -> Callable[[str, Any, Case], Any]:
    """Leave out calls of hooks with these parts in their names."""
    return lambda kind, calls, case: [call for call in calls if not any(name in call[0] for name in names)]


def _without_shares(kind: str, record: Any, case: Case) -> Any:
    """Leave out the hooks of evaluation batches; a sanity check, too, has its number of batches on each rank."""
    if kind == "batches":
        return {place: contents for place, contents in record.items() if "sanity" not in place}
    return _calls("on_validation_batch", "on_test_batch")(kind, record, case)


def _values(drops: Callable[[str, Case], bool]) -> Callable[[str, Any, Case], Any]:
    """Leave out values by name."""

    def without(kind: str, record: Any, case: Case) -> Any:
        if kind in _ROWS:
            kept = [(step, {name: v for name, v in row.items() if not drops(name, case)}) for step, row in record]
            return [(step, row) for step, row in kept if row.keys() - {"epoch", "step"}]
        if kind == "checkpoints":
            return {
                path: {**each, "state_dict": without("", each["state_dict"], case)} for path, each in record.items()
            }
        return {name: value for name, value in record.items() if not drops(name, case)}

    return without


def _names_only(kind: str, record: Any, case: Case) -> Any:
    """Leave out all values."""
    if kind in _ROWS:
        return [sorted(row) for _, row in record]
    return [] if kind == "batches" else sorted(record)


def _of_last_micro_batch(name: str, case: Case) -> bool:
    if name.startswith("lr-"):  # of a monitor, in `on_train_batch_start`
        return True
    stepped = "" if case["logging"] == "step" else "_step"
    return name in [f"train{suffix}{stepped}" for suffix in ("", "_total", "_low", "_high")]


def _of_step(name: str, case: Case) -> bool:
    return name.startswith(("train", "val")) and name not in ("val_loss", "validated")


DOCUMENTED: Final = (
    Documented(
        name="a rank's share of a validation",
        row="`on_validation_batch_start/end`",
        when={},
        worlds=("one", "killed"),
        kinds=("hooks", "batches"),
        without=_without_shares,
    ),
    Documented(
        name="batch hooks once per step",
        row="`on_train_batch_start/end`",
        when={"accumulation": "2"},
        kinds=("hooks",),
        without=_calls(*_PER_MICRO_BATCH),
    ),
    Documented(
        name="state is checked before the first step",
        row="`on_save_checkpoint`",
        when={},
        kinds=("hooks",),
        without=_calls("on_save_checkpoint"),
    ),
    Documented(
        name="step values of the whole step",
        row="a Lightning batch",
        when={"accumulation": "2"},
        kinds=("logged", "table", "metrics"),
        without=_values(_of_last_micro_batch),
    ),
    Documented(
        name="values without sync_dist are reduced",
        row="`self.log` in `training_step`",
        when={"logging": "local"},
        kinds=("logged", "table", "metrics"),
        without=_values(_of_step),
    ),
    Documented(
        name="no sample is repeated",
        row="the end of the data",
        when={"loader": "uneven"},
        kinds=("state", "logged", "table", "metrics", "batches"),
        without=_names_only,
    ),
    Documented(
        name="order of a sampler of the user's",
        row="training data with a sampler of its own",
        when={"loader": "own_sampler"},
        kinds=("state", "logged", "table", "metrics", "batches"),
        without=_names_only,
    ),
    Documented(
        name="BatchNorm's statistics",
        row="BatchNorm's running statistics",
        when={"model": "norms"},
        kinds=("state", "logged", "table", "metrics"),
        without=_values(lambda name, case: "running_" in name or (name.startswith("val") and name != "validated")),
    ),
    Documented(
        name="buffers of the first micro-batch",
        row="other buffers that forward changes",
        when={"model": "buffers", "accumulation": "2"},
        kinds=("state", "checkpoints"),
        without=_values(lambda name, case: name == "seen"),
    ),
    Documented(
        name="metric objects cover all ranks in each step",
        row="torchmetrics objects in `training_step`",
        when={"metrics": "steps"},
        kinds=("logged", "table", "metrics"),
        without=_values(lambda name, case: name == "train_error_step"),
    ),
)
