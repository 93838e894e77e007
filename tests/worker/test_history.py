"""Random histories of a whole task: nothing that a survivor has finished is computed again, and each ends.

``python tests/worker/test_history.py FIRST COUNT [patient]``, with tests/ on PYTHONPATH, runs as many as wanted.
"""

from __future__ import annotations

import random
import sys

import pytest
from worker.history import History
from worker.history_worker import replaced

CHUNK = 40
"""Histories of a test: a second or two."""


def history(seed: int, *, patient: bool) -> History:
    """Run a history of which everything follows from the seed."""
    drawn = random.Random(seed)
    size = {"agents": drawn.choice([2, 3, 3, 4]), "steps": drawn.choice([2, 3, 4])}
    faults, minimum = drawn.choice([1, 2, 2, 3]), drawn.choice([1, 1, 2])
    with replaced():
        one = History(seed, **size, faults=faults, minimum=minimum, patient=patient)
        one.run()
    return one


def check(seed: int, *, patient: bool) -> History:
    one = history(seed, patient=patient)
    assert not one.violations, f"history({seed}, patient={patient}): {one.violations}"
    return one


@pytest.mark.parametrize("first", range(0, 4 * CHUNK, CHUNK))
@pytest.mark.parametrize("patient", [False, True])
def test_random_histories(first: int, patient: bool) -> None:
    computed = sum(len(check(seed, patient=patient).finished) for seed in range(first, first + CHUNK))
    assert computed > 10 * CHUNK


LOST_GO = (5172, 5501, 5542)
"""A connection or the coordinator was lost between a go and the next join: a member was declared dead after 300 s."""
LOST_STORE = (20190, 20311, 1259, 1615, 1958, 106476, 110498)
"""The coordinator was lost with its store. Joiners that had just received the state had finished micro-batches, or a
holder was taken for a newcomer.
"""
MIXED_FOUNDERS = (1917, 2087)
"""The store was lost before the first epoch of a life: some workers had been notified of their join."""
LOST_ERROR = (1089, 1181)
"""A communication error was forgotten when a member finished while a join was pending."""

FINISHED_BEFORE = (5000322, 5001252)
"""A new life began while some workers had finished already: the others waited for ever for nodes to form it."""


@pytest.mark.parametrize("seed", LOST_GO)
def test_a_go_that_is_lost_costs_no_survivor(seed: int) -> None:
    check(seed, patient=True)


@pytest.mark.parametrize("seed", [*LOST_STORE, *MIXED_FOUNDERS, *LOST_ERROR, *FINISHED_BEFORE])
def test_histories_that_went_wrong_before(seed: int) -> None:
    check(seed, patient=False)


def test_one_seed_is_one_history() -> None:
    first, second = (history(7, patient=False) for _ in range(2))
    assert [line[:2] for line in first.log] == [line[:2] for line in second.log]
    assert first.finished == second.finished


def main() -> None:
    first, count, patient = int(sys.argv[1]), int(sys.argv[2]), "patient" in sys.argv
    computed = 0
    for seed in range(first, first + count):
        computed += len(check(seed, patient=patient).finished)
    print(f"{count} histories, {computed} micro-batches, none of a survivor's computed again")


if __name__ == "__main__":
    main()
