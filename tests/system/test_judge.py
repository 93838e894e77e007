"""The judge of the fault tests detects lost and repeated samples, and recomputed work of survivors."""

from __future__ import annotations

from typing import Any

import pytest
from system.judge import check_no_work_twice, check_samples

EXPECTED = [{"step": 0, "data_epoch": 0, "ids": [[0, 1], [2, 3]]}]


def step(pid: int, *ids: list[int], life: int = 1, at: float = 10.0, epoch: int = 1) -> dict[str, Any]:
    return {"what": "step", "pid": pid, "step": 0, "life": life, "epoch": epoch, "at": at, "ids": list(ids)}


def computed(pid: int, ids: list[int], life: int = 1, at: float = 1.0) -> dict[str, Any]:
    return {"what": "computed", "pid": pid, "step": 0, "life": life, "at": at, "ids": ids}


def test_all_used_once() -> None:
    check_samples([step(1, [0, 1]), step(2, [2, 3])], EXPECTED)


def test_a_dead_worker_s_part_that_was_reduced() -> None:
    check_samples([step(1, [0, 1]), computed(2, [2, 3])], EXPECTED)


def test_a_step_repeated_in_a_new_life() -> None:
    check_samples([step(1, [0, 1], [2, 3]), step(3, [0, 1], [2, 3], life=2)], EXPECTED)


def test_a_worker_that_died_with_the_result_of_a_step() -> None:
    again = step(2, [0, 1], [2, 3], epoch=2)
    check_samples([step(1, [0, 1]), again], EXPECTED)
    with pytest.raises(AssertionError, match="more than once"):
        check_samples([step(1, [0, 1]), again, {"what": "end", "pid": 1}], EXPECTED)
    with pytest.raises(AssertionError, match="more than once"):
        check_samples([step(1, [0, 1]), {**step(1, epoch=2), "step": 1}, again], EXPECTED)


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ([step(1, [0, 1])], "never used"),
        ([step(1, [0, 1], [2, 3]), step(2, [2, 3])], "more than once"),
        ([step(1, [0, 1], [2, 3], [4, 5])], "not of it"),
        ([step(3, [0, 1], life=2), computed(2, [2, 3], life=1)], "never used"),
    ],
)
def test_wrong_use_of_samples(notes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_samples(notes, EXPECTED)


def test_work_is_done_again_only_for_the_dead() -> None:
    repeated = [computed(1, [0, 1], at=1.0), computed(2, [0, 1], at=2.0)]
    check_no_work_twice([*repeated, step(2, [0, 1])], {})
    with pytest.raises(AssertionError, match="finished by live 1"):
        check_no_work_twice([*repeated, step(1, [0, 1])], {})


def test_a_worker_whose_node_was_left_out_counts_as_lost_from_then_on() -> None:
    notes = [computed(1, [0, 1], at=1.0), computed(2, [0, 1], at=2.0), step(1, [0, 1]), step(2, [0, 1])]
    check_no_work_twice(notes, {1: 1.5})
    with pytest.raises(AssertionError, match="finished by live 1"):
        check_no_work_twice(notes, {1: 2.5})
