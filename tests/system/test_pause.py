"""A job that allows it is paused for another one, and loses nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from unicron_lightning.demo.cluster import SharedNodes

STEPS = 90
TRAIN = ["-m", "unicron_lightning.demo.train", "--nodes", "2", "--accumulate", "1", "--epochs", "1", "--pace", "0.1"]


@pytest.mark.timeout(240)
def test_a_job_is_paused_for_another_and_every_micro_batch_is_computed_once(tmp_path: Path) -> None:
    with SharedNodes(tmp_path, 2) as nodes:
        train = [*TRAIN, "--steps-per-epoch", str(STEPS)]
        nodes.start_job("low", train, max_nodes=2, may_pause=True, profile={1: 1e9, 2: 2e9})
        nodes.wait_worlds({"low": 2})
        urgent = [*TRAIN, "--steps-per-epoch", "10"]
        nodes.start_job("high", urgent, weight=100.0, min_nodes=2, max_nodes=2, profile={2: 2e9})
        nodes.wait_state("succeeded", task="high")
        nodes.wait_state("succeeded", task="low")
        (paused,) = nodes.events("task_paused")
        steps = [line["step"] for line in nodes.steps("low")]
        computed = Counter(
            sample for line in nodes.diary("low") if line["event"] == "micro_batch" for sample in line["samples"]
        )
        pids = {line["pid"] for line in nodes.diary("low")}
    assert (paused["task"], len(pids)) == ("low", 4), "two workers before the pause, two after it"
    assert 0 < paused["fields"]["step"] < STEPS
    assert (tmp_path / "low" / "checkpoints" / f"last-pause-step={paused['fields']['step']}.ckpt").exists()
    assert steps == list(range(1, STEPS + 1))
    assert set(computed.values()) == {1}, "nothing was computed again"
    assert len(computed) == STEPS * 2 * 4
    for name, number in (("low", STEPS), ("high", 10)):
        ends = [torch.load(path, weights_only=True) for path in (tmp_path / name).glob("final-*.pt")]
        assert [end["steps"] for end in ends] == [number, number]
