"""SIGKILL of workers at every point of the step, of validation and of a checkpoint: each recovery is exact.

One run takes several faults, each armed when the previous one has been recovered from and the world is complete again,
because most of a test's time is the import of torch and Lightning in new workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

FULL = 3


def groups(*faults: str | list[str]) -> list[dict[str, Any]]:
    """Faults in sequence, each in a complete world; those in a list strike together."""
    return [{"world": FULL, "faults": fault if isinstance(fault, list) else [fault]} for fault in faults]


SCHEDULES = {
    "micro_batches": groups(
        "kill rank=0 micro_batch=0",
        "kill rank=1 micro_batch=0",
        "kill rank=0 point=training_step micro_batch=0",
        "kill rank=2 point=training_step micro_batch=1",  # before any reduction
        "kill rank=0 micro_batch=1",
    ),
    "reduction": groups(
        "kill rank=1 bucket=0",
        ["hang rank=0 bucket=1 for=20ms", "kill rank=0 bucket=1"],
        ["hang rank=2 bucket=2 for=5ms", "kill rank=2 bucket=2"],
        "kill rank=0 phase=reduced",
        "kill rank=1 phase=reduced",
    ),
    "commit": groups(
        "kill rank=0 phase=commit",
        "kill rank=1 phase=commit",
        "kill rank=2 phase=committed",
        "kill rank=0 point=optimizer_step",
        "kill rank=1 point=optimizer_stepped",
    ),
    "validation_and_checkpoint": groups(
        "kill rank=1 point=validation_step",
        "kill rank=0 phase=evaluated",
        "kill rank=0 point=checkpoint_write",
        "kill rank=0 point=validation_step",
    ),
    "several": groups(
        ["kill rank=0 micro_batch=0", "kill rank=2 micro_batch=0"],
        ["kill rank=2 micro_batch=0", "kill rank=1 phase=exchange"],
        ["kill rank=1 micro_batch=0", "kill rank=0 phase=connect"],
        ["kill rank=1 micro_batch=0", "kill rank=-1 joiner=yes phase=join"],
        ["kill rank=1 micro_batch=0", "kill rank=0 phase=join"],
    ),
}


# "several" kills at micro-batches too; chaos: to keep `make test` short
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.chaos) if name == "micro_batches" else name for name in SCHEDULES]
)
def test_kills_heal(name: str, tmp_path: Path, reference: Reference) -> None:
    schedule = SCHEDULES[name]
    # With the best checkpoints only, none may be written after the first epochs, and a fault would have no place.
    with Cluster(tmp_path, schedule=schedule, settings={"keep": -1}) as cluster:
        cluster.finish(360)
        check_schedule(cluster, schedule)
        print(name, check_exact(tmp_path, reference, workers=FULL))


def check_schedule(cluster: Cluster, schedule: list[dict[str, Any]]) -> None:
    """Each fault struck, the coordinator logged each, and steps were finished after it."""
    faults = cluster.notes("fault")
    planned = sum(len(group["faults"]) for group in schedule)
    assert len(faults) == planned
    kills = sum(fault["kind"] == "kill" for fault in faults)
    died = cluster.events("worker_died")
    assert len(died) >= kills > 0, died
    steps = cluster.notes("step")
    for fault in faults:
        later = [line for line in steps if line["at"] > fault["at"] and line["pid"] != fault["pid"]]
        assert later, f"no step after {fault}"
        first = min(later, key=lambda line: float(line["at"]))
        print(f"{fault['fault']}: next step after {1e3 * (first['at'] - fault['at']):.0f} ms")
