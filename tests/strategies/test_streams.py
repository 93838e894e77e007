"""Iterable data sets: every sample is used once an epoch, and evaluated once a pass, through deaths and joins."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agent.torchrun import START_SECONDS, Cluster
from programs import stream_worker
from programs.launching import PROGRAMS
from programs.stream_worker import DEVICES, EVALUATED

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

STREAMS = {
    "count": float(EVALUATED),
    "squares": float(sum(number**2 for number in range(EVALUATED))),
    "total": float(sum(range(EVALUATED))),
}


def kill_evaluating(cluster: Cluster, rank: int, **fields: Any) -> int:
    """Kill a rank in its third batch of a pass, which has more; return its process number."""
    pid = int(cluster.wait_notes(3, "evaluated", START_SECONDS, rank=rank, **fields)[2]["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def check_kept(cluster: Cluster, killed: int, samples: int, **fields: Any) -> None:
    """Check that survivors have evaluated each sample once, that dead workers' finished batches apart."""
    found: Counter[int] = Counter()
    for note in cluster.notes("evaluated", **fields):
        if note["pid"] != killed:
            found.update(note["numbers"])
    lost = [note for note in cluster.notes("evaluated", **fields) if note["pid"] == killed]
    assert 3 <= len(lost) < 7, "killed within the pass"
    assert found == Counter(range(samples))


@pytest.mark.parametrize(("workers", "states"), [("0", ""), pytest.param("2", "", marks=pytest.mark.chaos), ("1", "1")])
def test_every_sample_is_used_once_an_epoch_through_deaths(
    workers: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_WORKERS", workers)
    monkeypatch.setenv("STREAM_STATES", states)
    with Cluster(tmp_path, str(PROGRAMS / "stream_worker.py"), f"1:{DEVICES}") as cluster:
        for _ in range(DEVICES):
            cluster.add_node()
        killed = [cluster.kill_first(4), kill_evaluating(cluster, 1, epoch=0), cluster.kill_first(17)]
        assert cluster.finish() == [0] * DEVICES
        results, steps = cluster.notes("result"), cluster.notes("step")
        loaded = {(line["epoch"], line["read"] * max(1, int(workers))) for line in cluster.notes("loaded")}
        validated = cluster.notes("validated")
        check_kept(cluster, killed[1], EVALUATED, epoch=0)
    opened = {read for _, read in loaded if read != stream_worker.BATCH}  # that one is the check at the start
    assert bool(opened) == bool(states) and all(read % (8 * stream_worker.BATCH) == 0 for read in opened)
    assert results and all(set(line["counts"]) == {float(stream_worker.EPOCHS)} for line in results)
    assert {line["step"] for line in steps if line["last"]} == {13, 26}, "Lightning knows the end of an epoch"
    assert len({line["pid"] for line in steps}) > DEVICES, "a worker has joined"
    assert all(line["values"] == STREAMS for line in validated)
    assert Counter(line["epoch"] for line in validated) == {0: DEVICES - 1, 1: DEVICES}
    assert len(set(killed)) == 3
