"""Classification of a task's time."""

from __future__ import annotations

import pytest

from unicron_lightning.callbacks.throughput import TimeAccount


def ten_steps(account: TimeAccount, now: float, world: int = 2) -> float:
    """Account for steps of 2 s with 0.5 s of other work before each but the first."""
    for number in range(10):
        now += 0.5 if number else 0.0
        account.step_begins(now, 1)
        now += 2.0
        account.step_ends(now, 1, world)
    return now


def test_the_start_is_lost_and_what_is_between_steps_is_other_work():
    account = TimeAccount(100.0)
    assert account.goodput(103.0) == 0.0
    now = ten_steps(account, 105.0)
    assert (account.lost, account.train, account.other, account.steps) == (5.0, 20.0, 4.5, 10)
    assert account.goodput(now) == pytest.approx(1 - 5 / 29.5)
    assert account.goodput(now + 10.0) == pytest.approx(1 - 5 / 39.5), "until the next word it is other work"


def test_of_a_step_through_a_failure_the_excess_over_a_usual_one_is_lost():
    account = TimeAccount(0.0)
    now = ten_steps(account, 0.0)
    account.step_begins(now, 1)
    account.step_ends(now + 7.0, 2, 1)  # one worker does the work of two: usually 4 s
    assert (account.lost, account.train) == (3.0, 24.0)


def test_a_change_between_two_steps_is_lost():
    account = TimeAccount(0.0)
    now = ten_steps(account, 0.0)
    account.step_begins(now + 1.5, 2)
    assert account.lost == 1.5


def test_another_worker_goes_on_with_the_account():
    account, other = TimeAccount(0.0), TimeAccount(1000.0)
    ten_steps(account, 5.0)
    other.load_state(account.state(), 1007.0, away=60.0)
    other.step_begins(1008.0, 1)
    assert (other.lost, other.train, other.other, other.steps) == (66.0, 20.0, 4.5, 10)
