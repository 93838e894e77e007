"""The boundaries at which states are staged in the agents' memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unicron_lightning.checkpoints.agent_memory import StateMemory
from unicron_lightning.worker.control.activity import Activity


def staged(steps: list[int], every: int, previous: int | None = None) -> list[int]:
    """Pass the boundaries of a run; return the steps of the versions."""
    found: list[int] = []
    engine: Any = SimpleNamespace(step=0, control=SimpleNamespace(monitor=None), activity=Activity())
    division: Any = SimpleNamespace(stage=lambda staging, state, partners: found.append(engine.step))
    host: Any = SimpleNamespace(session=SimpleNamespace(engine=engine), division=division)
    memory = StateMemory(host)
    memory._staging = SimpleNamespace()  # type: ignore[assignment] # parts are the division's
    memory.use(every, 1)
    memory.previous = previous
    for engine.step in steps:
        memory.boundary(dict)
    return found


@pytest.mark.parametrize(("start", "every"), [(0, 3), (7, 3), (6, 3), (0, 1)])
def test_each_multiple_is_staged(start: int, every: int) -> None:
    """Also the first boundary of a new life, whose founders have no boundary before."""
    steps = list(range(start, start + 12))
    assert staged(steps, every) == [step for step in steps if step and step % every == 0]


def test_several_steps_between_two_boundaries_pass_no_multiple() -> None:
    """Of a GAN with two optimizers, at most ``every`` and one batch's steps are between two versions."""
    steps = list(range(0, 31, 2))
    assert staged(steps, 5) == [6, 10, 16, 20, 26, 30]
    assert staged(steps, 1) == steps[1:]


def test_a_joiner_stages_with_the_others() -> None:
    """It gets the others' boundary before, and so agrees on versions that are no multiples."""
    for joins in range(2, 30, 2):
        rest = list(range(joins, 31, 2))
        whole = [step for step in staged(list(range(0, 31, 2)), 5) if step >= joins]
        assert staged(rest, 5, previous=joins - 2) == whole
