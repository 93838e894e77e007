"""Iterable data sets: every sample is used once an epoch, and evaluated once a pass, through deaths and joins."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agent.torchrun import START_SECONDS, Cluster
from programs import stream_worker, unequal_streams
from programs.launching import PROGRAMS, launch
from programs.stream_worker import DEVICES, EVALUATED, INDEXED

from unicron_lightning.local_cluster.processes import free_port

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


def values_of(samples: int) -> dict[str, float]:
    """Return the values that are logged for so many samples."""
    squares = sum(number**2 for number in range(samples))
    return {"count": float(samples), "squares": float(squares), "total": float(sum(range(samples)))}


STREAMS, BOTH = values_of(EVALUATED), values_of(EVALUATED + INDEXED)


def check_kept(cluster: Cluster, killed: int, samples: int, **fields: Any) -> None:
    """Check that the others have evaluated each sample once, and kept what they had evaluated before the death."""
    found: Counter[int] = Counter()
    for note in cluster.notes("evaluated", **fields):
        if note["pid"] != killed:
            found.update(note["numbers"])
    assert found == Counter(range(samples))


@pytest.mark.parametrize(
    ("workers", "states"),
    [pytest.param("0", "", marks=pytest.mark.chaos), pytest.param("2", "", marks=pytest.mark.chaos), ("1", "1")],
)
def test_every_sample_is_used_once_an_epoch_through_deaths(
    workers: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_WORKERS", workers)
    monkeypatch.setenv("STREAM_STATES", states)
    monkeypatch.setenv("STREAM_AT_ONCE", states)
    monkeypatch.setenv("STREAM_DEATHS", "validate-1")
    with Cluster(tmp_path, str(PROGRAMS / "stream_worker.py"), f"1:{DEVICES}") as cluster:
        for _ in range(DEVICES):
            cluster.add_node()
        killed = [
            cluster.kill_first(4),
            int(cluster.wait_notes(1, "dies", START_SECONDS)[0]["pid"]),
            cluster.kill_first(17),
        ]
        assert cluster.finish() == [0] * DEVICES
        results, steps = cluster.notes("result"), cluster.notes("step")
        loaded = {(line["epoch"], line["read"] * max(1, int(workers))) for line in cluster.notes("loaded")}
        validated = cluster.notes("validated")
        check_kept(cluster, killed[1], EVALUATED + (INDEXED if states else 0), epoch=0)
    opened = {read for _, read in loaded if read != stream_worker.BATCH}  # that one is the check at the start
    assert bool(opened) == bool(states) and all(read % (8 * stream_worker.BATCH) == 0 for read in opened)
    assert results and all(set(line["counts"]) == {float(stream_worker.EPOCHS)} for line in results)
    assert {line["step"] for line in steps if line["last"]} == {13, 26}, "Lightning knows the end of an epoch"
    assert len({line["pid"] for line in steps}) > DEVICES, "a worker has joined"
    assert all(line["values"] == (BOTH if states else STREAMS) for line in validated)
    assert Counter(line["epoch"] for line in validated) == {0: DEVICES - 1, 1: DEVICES}
    assert len(set(killed)) == 3


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("workers", "deaths", "at_once"),
    [
        ("0", "validate-1 test-0", ""),
        ("0", "predict-0 predict-2", ""),
        ("2", "test-1 predict-0", ""),
        ("2", "predict-1", ""),
        ("0", "validate-1 test-0", "1"),
        ("2", "validate-2 test-0", "1"),
    ],
)
def test_evaluations_without_a_fit_through_deaths(
    workers: str, deaths: str, at_once: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_WORKERS", workers)
    monkeypatch.setenv("STREAM_AT_ONCE", at_once)
    monkeypatch.setenv("STREAM_ALONE", "1")
    monkeypatch.setenv("STREAM_DEATHS", deaths)
    with Cluster(tmp_path, str(PROGRAMS / "stream_worker.py"), str(DEVICES)) as cluster:
        for _ in range(DEVICES):
            cluster.add_node()
        assert cluster.finish() == [0] * DEVICES
        results, evaluated = cluster.notes("result"), cluster.notes("evaluated")
    assert {path.name for path in tmp_path.glob("died-*")} == {f"died-{place}" for place in deaths.split()}
    founders = set(list(dict.fromkeys(note["pid"] for note in evaluated))[:DEVICES])
    survivors = {note["pid"] for note in results if note["stage"] == "predict"} & founders
    assert len(survivors) == DEVICES - len(deaths.split())
    for stage in ("validate", "test", "predict"):
        members = survivors | {note["pid"] for note in results if note["stage"] == stage and note["pid"] in founders}
        found = Counter(
            number
            for note in evaluated
            if note["stage"] == stage and note["pid"] in members
            for number in note["numbers"]
        )
        assert found == Counter(range(EVALUATED + INDEXED)), stage
    for note in results:
        if note["stage"] != "predict" and at_once:
            assert note["values"] == [BOTH]
        elif note["stage"] != "predict":
            streams, indexed = note["values"]
            assert streams == {f"{name}/dataloader_idx_0": value for name, value in STREAMS.items()}
            assert indexed["count/dataloader_idx_1"] == INDEXED
    predicted = [note["values"] for note in results if note["stage"] == "predict" and any(note["values"])]
    assert len(predicted) == len(survivors), "a replacement predicts nothing"
    for place, numbers in enumerate((range(EVALUATED), range(EVALUATED, EVALUATED + INDEXED))):
        assert sorted(n for parts in predicted for batch in parts[place] for n in batch) == list(numbers)


def test_each_worker_reads_its_own_stream_also_after_another_has_ended(tmp_path: Path) -> None:
    endpoint = [*("--rdzv-id", "unequal"), *("--rdzv-endpoint", f"127.0.0.1:{free_port()}")]
    agent = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "unicron", *endpoint]
    program = [str(PROGRAMS / "unequal_streams.py"), str(tmp_path / "read")]
    launch([*agent, *program], tmp_path, 120, UNICRON_STATE_DIR=str(tmp_path / "state"))
    read = [tuple(map(int, line.split())) for line in (tmp_path / "read").read_text().splitlines()]
    checks = 2 * unequal_streams.BATCH
    assert sorted(each for each in read if each[2] > checks) == [(0, 0, 8), (1, 1, 40)]
