"""Faults of agents, the coordinator and the whole task; silent workers; ends of a run; several workers per agent."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster, Note
from system.judge import Reference, check_exact

from unicron_lightning.local_cluster.processes import kill, lives, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


def group(*faults: str, world: int = 3, **when: Any) -> dict[str, Any]:
    """Faults that strike together, in a world of this size."""
    return {"world": world, "faults": list(faults), **when}


@pytest.mark.chaos
def test_kills_in_the_first_and_the_last_step(tmp_path: Path, reference: Reference) -> None:
    last = len(reference.steps(3)) - 1
    schedule = [
        group("kill rank=0 step=0 micro_batch=0", world=2, step=0),
        group(f"kill rank=1 step={last} micro_batch=0", f"kill rank=0 step={last} phase=committed", step=last),
    ]
    slow = {"epochs": 3, "slow": 0.2, "pace": 0.05}
    with Cluster(tmp_path, nodes="2:3", schedule=schedule, settings=slow) as cluster:
        cluster.wait_end()
        assert [line["step"] for line in cluster.notes("fault")] == [0, last, last]
        assert len(cluster.notes("end")) == 1
        check_exact(tmp_path, reference, workers=1)


LAST_STEP = {
    "commit": [
        "kill coordinator rank=0 step={last} phase=commit",
        "kill rank=0 step={last} phase=commit",
        "kill rank=0 point=checkpoint_write",
    ],
    "optimizer": ["kill rank=1 point=optimizer_stepped", "kill rank=0 phase=evaluated"],
    "end": ["kill rank=1 point=validation_step", "kill coordinator rank=0 point=fit_end", "kill rank=0 point=fit_end"],
}


@pytest.mark.parametrize(
    "name", [name if name == "optimizer" else pytest.param(name, marks=pytest.mark.chaos) for name in LAST_STEP]
)
def test_two_of_three_die_after_the_last_micro_batch(name: str, tmp_path: Path, reference: Reference) -> None:
    last = len(reference.steps(2)) - 1
    schedule = [group(*(words.format(last=last) for words in LAST_STEP[name]), step=last, ordered=True)]
    settings = {"epochs": 2, "pace": 0.05, "slow": 0.2, "keep": -1}
    with Cluster(tmp_path, schedule=schedule, settings=settings) as cluster:
        cluster.wait_end()
        assert len(cluster.notes("fault")) == len(LAST_STEP[name])
        check_exact(tmp_path, reference, workers=1)


def test_agents_die_with_their_workers_and_are_replaced(tmp_path: Path, reference: Reference) -> None:
    schedule = [
        group("kill agent rank=0 micro_batch=0"),
        group("kill agent rank=1 bucket=1"),
        group("kill agent rank=2 point=training_step", "kill rank=0 point=training_step"),
    ]
    with Cluster(tmp_path, schedule=schedule) as cluster:
        for number in range(len(schedule)):
            about = {"group": number, "kind": "kill agent"}
            dead = cluster.watch(lambda a=about: cluster.notes("fault", **a), f"fault {number}", 60)[0]
            _wait_step_without(cluster, dead)
            cluster.replace(dead["node"])
        cluster.finish()
        assert len(cluster.events("agent_lost")) == len(schedule)
        check_exact(tmp_path, reference, workers=3)


@pytest.mark.chaos
def test_coordinator_dies_while_nothing_else_happens(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path, schedule=[group("kill rank=1 micro_batch=0")]) as cluster:
        cluster.wait_world(3)
        cluster.watch(lambda: len(cluster.notes("fault")), "the worker's fault", 60)
        cluster.wait_world(3, after=time.time())
        pid, killed_at = cluster.coordinator(), time.time()
        assert pid is not None and kill(pid)
        until("another coordinator", lambda: cluster.coordinator() not in (None, pid))
        back_at = time.time()
        cluster.watch(lambda: any(line["at"] > back_at + 2 for line in cluster.notes("step")), "more steps", 60)
        gap = _longest_gap(cluster, killed_at)
        print(f"longest time between steps after the coordinator's death: {1e3 * gap:.0f} ms")
        alone = {line["step"] for line in cluster.notes("step") if killed_at < line["at"] < back_at}
        assert len(alone) > 3, f"steps without a coordinator in {back_at - killed_at:.2f} s"
        victim = cluster.world()[0]
        kill(victim["pid"])
        _wait_step_without(cluster, {**victim, "at": time.time()})
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


def test_a_stopped_coordinator_is_replaced(tmp_path: Path, reference: Reference) -> None:
    """It keeps its port and never wakes; the next coordinator replaces a worker that dies meanwhile."""
    with Cluster(tmp_path) as cluster:
        cluster.wait_world(3)
        pid = cluster.coordinator()
        assert pid is not None and kill(pid, signal.SIGSTOP)
        victim = cluster.world()[0]
        kill(victim["pid"])
        until("another coordinator", lambda: cluster.coordinator() not in (None, pid), 120)
        assert not lives(pid), "the old one could wake up"
        _wait_step_without(cluster, {**victim, "at": time.time()})
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


@pytest.mark.chaos
def test_coordinator_dies_and_its_database_is_garbage(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path) as cluster:
        before = {line["epoch"] for line in cluster.wait_world(3)}
        pid, killed_at = cluster.coordinator(), time.time()
        assert pid is not None
        for name in ("coordinator.sqlite", "coordinator.sqlite-wal"):
            (cluster.state_dir / name).write_bytes(b"no database " * 10_000)
        assert kill(pid)
        until("another coordinator", lambda: cluster.coordinator() not in (None, pid))
        cluster.watch(lambda: _started(cluster), "a coordinator with a new database", 120)
        assert cluster.events("store_set_aside")
        (aside,) = cluster.state_dir.glob("coordinator.sqlite.corrupt-*[0-9]")
        assert aside.read_bytes().startswith(b"no database")
        back_at = time.time()
        cluster.watch(lambda: any(line["at"] > back_at + 2 for line in cluster.notes("step")), "more steps", 60)
        print(f"longest time between steps: {1e3 * _longest_gap(cluster, killed_at):.0f} ms")
        assert {line["epoch"] for line in cluster.world()} == before, "the world is as it was"
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


def test_coordinator_dies_in_a_recovery(tmp_path: Path, reference: Reference) -> None:
    schedule = [
        group("kill coordinator rank=1 micro_batch=0", "kill rank=1 micro_batch=0"),
        group("kill rank=2 micro_batch=0", "kill coordinator rank=0 phase=exchange"),
        group("kill rank=0 micro_batch=0", "kill coordinator rank=0 phase=connect"),
        group(
            "kill rank=1 micro_batch=0",
            "kill coordinator rank=-1 joiner=yes phase=join",
            "kill rank=-1 joiner=yes phase=join",
        ),
    ]
    with Cluster(tmp_path, schedule=schedule) as cluster:
        cluster.finish()
        assert len(cluster.notes("fault")) == 9
        check_exact(tmp_path, reference, workers=3)


def test_stopped_workers_are_declared_silent_killed_and_rejoin(tmp_path: Path, reference: Reference) -> None:
    schedule = [group("stop rank=0 micro_batch=0")]  # in the first steps, when no step time is known
    with Cluster(tmp_path, schedule=schedule, conf="worker_timeout=4") as cluster:
        cluster.finish()
        (stopped,) = cluster.notes("fault")
        (silent,) = [event for event in cluster.events("worker_died") if event["cause"] == "silent"]
        print(f"stopped; declared silent after {silent['at'] - stopped['at']:.1f} s")
        assert 3.5 < silent["at"] - stopped["at"] < 15
        check_exact(tmp_path, reference, workers=3)


@pytest.mark.chaos
def test_down_to_one_survivor_and_back_up(tmp_path: Path, reference: Reference) -> None:
    schedule = [
        group("kill rank=0 micro_batch=0", "kill rank=1 phase=reduced"),
        group("kill rank=0 bucket=2", "kill rank=2 bucket=2"),
    ]
    with Cluster(tmp_path, schedule=schedule) as cluster:
        cluster.finish()
        assert {line["world"] for line in cluster.notes("step")} >= {1, 3}
        check_exact(tmp_path, reference, workers=3)


def test_a_task_that_nobody_survives_goes_on_from_its_last_checkpoint(tmp_path: Path, reference: Reference) -> None:
    schedule = [group(*(f"kill rank={rank} step=25 micro_batch=0" for rank in range(3)), step=25)]
    with Cluster(tmp_path, schedule=schedule, settings={"pace": 0.05, "epochs": 5, "keep": -1}) as cluster:
        cluster.wait_end(linger=True)
        assert len(cluster.notes("fault")) == 3
        (restart,) = cluster.events("task_restarts")
        assert restart["step"] == 20 and restart["path"].startswith(str(tmp_path / "checkpoints")), restart
        said = [(tmp_path / f"agent-n{place}.log").read_text() for place in range(3)]
        assert any("task_resumes_from_checkpoint" in text for text in said)
        second = cluster.notes("step", life=2)
        assert min(line["step"] for line in second) == 20
        check_exact(tmp_path, reference, workers=3)


@pytest.mark.chaos
def test_agents_with_two_workers(tmp_path: Path, reference_for: Callable[..., Reference]) -> None:
    shape = {"devices": 2, "nodes": 2, "full": 4}
    schedule = [
        group("kill rank=0 micro_batch=0", world=4),
        group("kill rank=3 bucket=0", world=4),
    ]
    reference = reference_for(20, **shape)
    with Cluster(tmp_path, agents=2, nodes="1:2", per_node=2, schedule=schedule, settings=shape) as cluster:
        cluster.finish()
        assert len(cluster.notes("fault")) == 2
        check_exact(tmp_path, reference, workers=4)


def test_training_is_held_below_the_minimum(tmp_path: Path, reference: Reference) -> None:
    schedule = [group("kill rank=0 micro_batch=0", "kill rank=1 micro_batch=0")]
    with Cluster(tmp_path, nodes="2:3", schedule=schedule) as cluster:
        cluster.finish()
        alone = {line["step"] for line in cluster.notes("step", world=1)}
        assert len(alone) <= 1, f"only the step in progress may be finished by one of two: {alone}"
        assert any(event["hold"] for event in cluster.events("epoch_published"))
        check_exact(tmp_path, reference, workers=3)


def _wait_step_without(cluster: Cluster, dead: Note) -> None:
    """Wait until a worker finishes a step in a world without the dead one."""

    def there() -> bool:
        return any(line["epoch"] > dead["epoch"] for line in cluster.notes("step") if line["at"] > dead["at"])

    cluster.watch(there, f"a step without {dead['node']}", 120)


def _started(cluster: Cluster) -> bool:
    """Whether a coordinator has recorded its start in a readable database."""
    with contextlib.suppress(sqlite3.Error):
        return bool(cluster.events("coordinator_started"))
    return False


def _longest_gap(cluster: Cluster, since: float) -> float:
    """Largest number of seconds between steps finished by any worker."""
    first: dict[int, float] = {}
    for line in cluster.notes("step"):
        first[line["step"]] = min(line["at"], first.get(line["step"], line["at"]))
    times = sorted(at for at in first.values() if at > since - 1)
    return max(b - a for a, b in itertools.pairwise(times))
