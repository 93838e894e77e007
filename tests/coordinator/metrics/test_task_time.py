"""Time of a task by kind: each second is attributed once, and sums never fall."""

from __future__ import annotations

import random

import pytest

from unicron_lightning.coordinator.metrics import TaskTime


def of(time: TaskTime) -> dict[str, float]:
    return {kind: round(seconds, 6) for kind, seconds in time.seconds.items() if seconds}


def training() -> TaskTime:
    time = TaskTime(0.0)
    time.change("start_up", 1.0, usual=None)
    time.step(11.0, steps=1, repeated=0, usual=None, present=1.0, saved=False)
    time.change("training", 11.0, usual=None)
    return time


def step(time: TaskTime, at: float, steps: int, **changes: object) -> None:
    time.step(at, **{"steps": steps, "repeated": 0, "usual": 1.0, "present": 1.0, "saved": False, **changes})


def test_a_start_and_steps():
    time = training()
    step(time, 14.0, 3)
    assert of(time) == {"idle": 1, "start_up": 10, "productive": 3}
    assert time.goodput == pytest.approx(3 / 14)


def test_a_failure_between_two_steps():
    time = training()
    time.change("transition", 12.5, fault_at=12.0, usual=1.0)
    time.step(13.0, steps=1, repeated=0, usual=None, present=1.0, saved=False)
    assert of(time) == {"idle": 1, "start_up": 10, "productive": 1, "detection": 0.5, "transition": 0.5}


def test_a_hang_is_detection_from_three_usual_steps_on():
    time = training()
    time.change("transition", 42.0, fault_at=41.0, usual=2.0)
    assert of(time) == {"idle": 1, "start_up": 10, "productive": 6, "detection": 25}


def test_the_missing_part_of_a_sub_healthy_world():
    time = training()
    step(time, 19.0, 8, present=0.75)
    assert of(time) == {"idle": 1, "start_up": 10, "productive": 6, "sub_healthy": 2}


def test_steps_repeated_after_the_loss_of_all_workers():
    time = training()
    step(time, 15.0, 4, repeated=3)
    assert of(time) == {"idle": 1, "start_up": 10, "productive": 1, "recomputed": 3}


def test_a_checkpoint_and_a_validation_between_steps():
    time = training()
    step(time, 15.0, 3, saved=True)
    step(time, 25.0, 2)
    step(time, 28.6, 3)  # within the noise of step times
    assert of(time) == {"idle": 1, "start_up": 10, "productive": 8.6, "checkpoint": 1, "other": 8}


def test_random_histories_attribute_every_second_once():
    kinds = ("start_up", "transition", "sub_healthy", "idle", "unknown", "training")
    for seed in range(200):
        draw, now, time = random.Random(seed), 0.0, TaskTime(0.0)
        before = dict(time.seconds)
        for _ in range(40):
            now += draw.random()
            fault = draw.choice((None, now - draw.random()))
            if draw.random() < 0.5:
                step(time, now - draw.random() / 2, draw.randint(1, 3), usual=draw.choice((None, 0.2)),
                     present=draw.random(), saved=draw.random() < 0.2, repeated=draw.randint(0, 1))  # fmt: skip
            else:
                time.change(draw.choice(kinds), now, fault_at=fault, usual=draw.choice((None, 0.2)))
            assert all(time.seconds[kind] >= before[kind] - 1e-9 for kind in before)
            assert sum(time.seconds.values()) <= now + 1e-9
            before = dict(time.seconds)
        time.change("idle", now, usual=None)
        assert sum(time.seconds.values()) == pytest.approx(now)
