"""Iterable data sets: every sample is used once an epoch, through deaths and joins."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.torchrun import Cluster
from programs import stream_worker
from programs.launching import PROGRAMS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("workers", "states"), [("0", ""), pytest.param("2", "", marks=pytest.mark.chaos), ("1", "1")])
def test_every_sample_is_used_once_an_epoch_through_deaths(
    workers: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_WORKERS", workers)
    monkeypatch.setenv("STREAM_STATES", states)
    with Cluster(tmp_path, str(PROGRAMS / "stream_worker.py"), f"1:{stream_worker.DEVICES}") as cluster:
        for _ in range(stream_worker.DEVICES):
            cluster.add_node()
        killed = {cluster.kill_first(step) for step in (4, 17)}  # in the first and in the second epoch
        assert cluster.finish() == [0] * stream_worker.DEVICES
        results, steps = cluster.notes("result"), cluster.notes("step")
        loaded = {(line["epoch"], line["read"] * max(1, int(workers))) for line in cluster.notes("loaded")}
    opened = {read for _, read in loaded if read != stream_worker.BATCH}  # that one is the check at the start
    assert bool(opened) == bool(states) and all(read % (8 * stream_worker.BATCH) == 0 for read in opened)
    assert results and all(set(line["counts"]) == {float(stream_worker.EPOCHS)} for line in results)
    assert {line["step"] for line in steps if line["last"]} == {13, 26}, "Lightning knows the end of an epoch"
    assert len({line["pid"] for line in steps}) > stream_worker.DEVICES, "a worker has joined"
    assert len(killed) == 2
