"""SIGKILL of workers at every place of the step, of validation and of a checkpoint: each must heal exactly.

One run takes several faults, each armed when the one before has healed and the world is whole again, because most of a
test's time is the import of torch and Lightning in new workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults.cluster import Cluster
from faults.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

FULL = 3


def kill(point: str, rank: int, **where: Any) -> dict[str, Any]:
    """A worker that kills itself at a point of the protocol or of the script."""
    return {"point": point, "rank": rank, **where}


def groups(*faults: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One after the other, each in a whole world; those in a list together."""
    return [{"world": FULL, "faults": fault if isinstance(fault, list) else [fault]} for fault in faults]


SCHEDULES = {
    "micro_batches": groups(
        kill("micro_batch", 0, place=0),
        kill("micro_batch", 1, place=0),
        kill("training_step", 0, place=0),
        kill("training_step", 2, place=1),  # before any reduction
        kill("micro_batch", 0, place=1),
    ),
    "reduction": groups(
        kill("launched", 1, place=0),
        kill("launched", 0, place=1, delay=0.02),
        kill("launched", 2, place=2, delay=0.005),
        kill("reduced", 0),
        kill("reduced", 1),
    ),
    "commit": groups(
        kill("commit", 0),
        kill("commit", 1),
        kill("committed", 2),
        kill("optimizer_step", 0),
        kill("optimizer_stepped", 1),
    ),
    "validation_and_checkpoint": groups(
        kill("validation_step", 1),
        kill("evaluated", 0),
        kill("checkpoint_write", 0),
        kill("validation_step", 0),
    ),
    "several": groups(
        [kill("micro_batch", 0, place=0), kill("micro_batch", 2, place=0)],
        [kill("micro_batch", 2, place=0), kill("exchange", 1)],
        [kill("micro_batch", 1, place=0), kill("connect", 0)],
        [kill("micro_batch", 1, place=0), kill("join", -1, joiner=True)],
        [kill("micro_batch", 1, place=0), kill("join", 0)],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_kills_heal(name: str, tmp_path: Path, reference: Reference) -> None:
    schedule = SCHEDULES[name]
    # A checkpoint per epoch: of the best only there may be none after the first epochs, and so nothing to die in.
    with Cluster(tmp_path, schedule=schedule, settings={"keep": -1}) as cluster:
        cluster.finish(200)
        check_schedule(cluster, schedule)
        print(name, check_exact(tmp_path, reference, workers=FULL))


def check_schedule(cluster: Cluster, schedule: list[dict[str, Any]]) -> None:
    """Each fault struck, the coordinator heard of each, and steps were finished after it."""
    faults = cluster.notes("fault")
    planned = sum(len(group["faults"]) for group in schedule)
    assert len(faults) == planned
    died = cluster.events("worker_died")
    assert len(died) >= planned, died
    steps = cluster.notes("step")
    for fault in faults:
        later = [line for line in steps if line["at"] > fault["at"] and line["pid"] != fault["pid"]]
        assert later, f"no step after {fault}"
        first = min(later, key=lambda line: float(line["at"]))
        print(f"{fault['point']} rank {fault['rank']}: next step after {1e3 * (first['at'] - fault['at']):.0f} ms")
