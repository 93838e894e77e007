"""`ThroughputMonitor` in a real training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from unicron_lightning.callbacks import ThroughputMonitor
from unicron_lightning.errors import ConfigError


def test_rates_and_goodput_are_logged(train: Callable[..., Any], rows: Callable[[], Any]):
    monitor = ThroughputMonitor(window_size=3, available_flops=1e12)
    train([monitor])
    logged = {row["step"]: row for row in rows() if "train/goodput" in row}
    assert sorted(logged) == [1, 3, 5, 7, 9], "every second step"
    assert "train/steps_per_sec" not in logged[1], "there are no three steps yet"
    last = {name.removeprefix("train/"): value for name, value in logged[9].items()}
    assert last["micro_batches_per_sec"] == pytest.approx(4 * last["steps_per_sec"])
    assert last["samples_per_sec"] == pytest.approx(8 * last["steps_per_sec"])
    assert last["tflops_per_sec"] == pytest.approx(0.003 * last["steps_per_sec"])
    assert last["mfu"] == pytest.approx(last["tflops_per_sec"])
    assert last["train_seconds"] > 0 and last["other_seconds"] > 0, "there was a validation"
    total = last["train_seconds"] + last["lost_seconds"] + last["other_seconds"]
    assert last["goodput"] == pytest.approx(1 - last["lost_seconds"] / total)


def test_a_checkpoint_takes_the_account_along(train: Callable[..., Any]):
    first = ThroughputMonitor()
    trainer = train([first], max_epochs=1, logger=False)
    second = ThroughputMonitor()
    train([second], max_epochs=1, logger=False)
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["train"] == first.state_dict()["train"] > 0
    assert second.state_dict()["steps"] == trainer.global_step


@pytest.mark.parametrize("size", [1, 0])
def test_a_window_of_one_step_is_none(size: int):
    with pytest.raises(ConfigError, match=rf"window_size={size}: expected 2 steps"):
        ThroughputMonitor(window_size=size)


def test_another_strategy_is_refused(train: Callable[..., Any]):
    with pytest.raises(ConfigError, match=r'ThroughputMonitor needs Trainer\(strategy="unicron"\), found SingleDevice'):
        train([ThroughputMonitor()], strategy="auto")
