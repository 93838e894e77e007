"""Workers leave a running task at a step boundary: exactly, without losses, and safely if the leave is cancelled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker.simulation import Coordinator, Dismissed, Fault, run_threads
from worker.test_engine import REFERENCE, Program, check

STEPS = 3


class Asks:
    """Orders each leave at the n-th fault point of the worker whose `Engine.fault` this is."""

    def __init__(self, coordinator: Coordinator, leavers: dict[str, int]) -> None:
        self._coordinator, self._leavers, self._points = coordinator, leavers, 0

    def __call__(self, *point: Any) -> None:
        self._points += 1
        if due := [name for name, at in self._leavers.items() if at == self._points]:
            self._coordinator.leave(*due)


def run(
    leavers: dict[str, int], deaths: dict[str, int], world: int, seed: int, joiners: int = 0
) -> tuple[Coordinator, dict[str, Program], dict[str, Any]]:
    """Worker w0 is at its n-th fault point when the ``leavers`` are ordered to leave; it lives."""
    coordinator = Coordinator(seed)
    programs = {f"w{rank}": Program(coordinator.worker(f"w{rank}"), steps=STEPS) for rank in range(world)}
    for number in range(joiners):
        engine = coordinator.worker(f"j{number}", joiner=True)
        programs[f"j{number}"] = Program(engine, joiner=True, steps=STEPS)
    programs["w0"].engine.fault = Asks(coordinator, leavers)
    for name, at in deaths.items():
        programs[name].engine.fault = Fault(at)
    coordinator.start()
    return coordinator, programs, run_threads(coordinator, list(programs.items()))


@pytest.mark.parametrize("at", [1, 5, 8, 11, 14, 20])
@pytest.mark.parametrize("leavers", [["w1"], ["w2", "w1"]])
def test_no_micro_batch_is_computed_again_or_lost(at: int, leavers: list[str]) -> None:
    coordinator, programs, results = run(dict.fromkeys(leavers, at), {}, world=3, seed=at)
    check(coordinator, programs, {})
    assert Counter(place for program in programs.values() for place in program.ran) == Counter(REFERENCE.ran)
    assert coordinator.dismissed == set(leavers)
    for name in leavers:
        assert isinstance(results[name], Dismissed) and not programs[name].finished
    assert programs["w0"].engine.world.size == 3 - len(leavers)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    leavers=st.dictionaries(st.sampled_from(["w1", "w2", "w3"]), st.integers(1, 40), min_size=1, max_size=2),
    deaths=st.dictionaries(st.sampled_from(["w1", "w2", "w3", "j0"]), st.integers(1, 70), max_size=2),
    seed=st.integers(0, 1000),
)
def test_random_leaves_and_deaths(leavers: dict[str, int], deaths: dict[str, int], seed: int) -> None:
    """Leaving workers may die first, others may die while they leave, and a joiner may arrive meanwhile."""
    coordinator, programs, _ = run(leavers, deaths, world=4, seed=seed, joiners=1)
    check(coordinator, programs, {})
    assert programs["w0"].finished
