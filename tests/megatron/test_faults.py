"""SIGKILL of workers of a Megatron model at every point of a step: each recovery is exact, and the replica returns.

One run takes several faults, each when the previous one has been recovered from and the world is complete again; a
fifth agent's warm worker replaces the dead one. At the end of one of them the task is resized: whole replicas leave and
join.
"""

from __future__ import annotations

import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from programs.libraries import write_chunks
from system.cluster import Cluster
from system.healing import check, check_validation, healed
from system.megatron import MODEL, SCRIPT, ZERO1, wait_replicas

from unicron_lightning.demo.dataset import Windows

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(850)]


def die(point: str, replica: int, shard: int, **where: Any) -> dict[str, Any]:
    return {"point": point, "replica": replica, "shard": shard, **where}


SCHEDULES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "pipeline": (
        {"pp": 2, "toy": {"dropout": 0.1}, "validate": 2, "several": True, "witness": 1},
        [
            die("forward", 0, 0, micro_batch=1),  # the first worker of all
            die("compared", 1, 1),  # its partner waits for it at the gate
            # in the second global batch; its partner has the results of the third
            die("validate", 1, 0, micro_batch=3),
            die("gate", 1, 1),  # the last stage
            die("commit", 1, 0),
            die("committed", 0, 0, breaks=True),  # its partner is in the next call, and waits for this worker
        ],
    ),
    "combined": (
        {"pp": 2, "toy": {"dropout": 0.1}, "stream": True, "several": True},
        [
            # in the fourth step, all of it the first replica's: the other one opens its streams
            die("forward", 0, 0, from_step=3),
            die("forward", 1, 1, micro_batch=1),
            die("gate", 0, 1),
            die("commit", 1, 0),  # with it the workers agree on the ends that were found
        ],
    ),
    "tensor": (
        {
            "tp": 2,
            "toy": {"sequence_parallel": True, "bf16": True},
            "ddp": {"overlap_grad_reduce": True},
            "witness": 2,
        },
        [
            # when the usual time of a step is known; its partner waits for it in the layer
            die("forward", 0, 1, micro_batch=1, from_step=20, hangs=True),
            die("forward", 1, 1, micro_batch=1),
            die("reduce", 0, 0),
            die("commit", 1, 0),
        ],
    ),
    "scaled": (
        {
            "pp": 2,
            "toy": {"fp16": True},
            # the first steps overflow, and later every third one or so
            "optimizer": {"initial_loss_scale": 2.0**24, "loss_scale_window": 2, "hysteresis": 1, "clip_grad": 1.0},
        },
        [
            die("gate", 0, 1),  # others have finalized their gradients, or have not
            die("commit", 1, 0),
            die("committed", 0, 0),
            die("update", 1, 1),
            die("reduced", 0, 0),
            die("commit", 0, 1),
        ],
    ),
    "scaled shards": (
        {
            "pp": 2,
            "toy": {"fp16": True},
            "ddp": ZERO1["ddp"],
            "optimizer": {**ZERO1["optimizer"], "initial_loss_scale": 2.0**24, "loss_scale_window": 2, "hysteresis": 1},
        },
        [
            die("gate", 0, 1),
            die("updated", 1, 0),  # others have changed the loss scale, and must return to the earlier one
            die("kept", 0, 0),
            die("committed", 1, 1),
            die("updated", 0, 1),
        ],
    ),
    "zero1": (
        {"pp": 2, "stream": True, "validate": 4, **ZERO1},
        [
            die("reduce", 0, 1),
            # in the second global batch of streams, all of it the first replica's: the other one opens the stream
            die("validate", 0, 1, micro_batch=3),
            # Other workers have stepped their shards and must return to the previous version. From now on no replica's
            # workers are neighbours in the order of nodes.
            die("updated", 0, 1),
        ],
    ),
}
IN_CI = "pipeline", "zero1"
RESIZED = "zero1"
"""The run that is resized at its end."""
CHUNKED = "tensor"
"""The run that reads its samples from litData's chunks, where it is installed."""


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos) for name in SCHEDULES]
)
def test_kills_heal_bit_by_bit(name: str, tmp_path: Path, worlds: Any) -> None:
    different, schedule = SCHEDULES[name]
    model = {**MODEL, **different}
    if name == CHUNKED and find_spec("litdata"):
        text = Windows(0.0, 1.0, 16, 4096)  # that of toy.Text
        windows = (text[number][1] for number in range(len(text)))
        write_chunks(tmp_path / "chunks", ({"tokens": each[:-1], "labels": each[1:]} for each in windows), 1000)
        model["chunks"] = str(tmp_path / "chunks")
    settings = {**model, "steps": 6, "finish": True, "full": 4, "slow": 0.05}
    nodes = "2:4" if name == RESIZED else "3:4"
    with Cluster(tmp_path, script=SCRIPT, agents=5, nodes=nodes, schedule=schedule, settings=settings) as cluster:
        cluster.watch(lambda: healed(cluster, tmp_path, len(schedule)), "all faults, and their ends", 600, 200)
        if name == RESIZED:
            resize(cluster)
        (tmp_path / "finish").touch()
        cluster.wait_exit(150)
        names = [event["name"] for event in cluster.events()]
        hangs = [event for event in cluster.events("error_reported") if event["kind"] == "task_hang"]
        cluster.wait_end()
    assert "task_restarts" not in names
    assert len(hangs) == sum("hangs" in fault for fault in schedule)
    assert [fault["point"] for fault in sorted(cluster.notes("fault"), key=lambda note: note["number"])] == [
        fault["point"] for fault in schedule
    ]
    check(tmp_path, model, worlds)
    if "validate" in model:
        check_validation(tmp_path, model)


@pytest.mark.chaos
def test_shards_without_copies_are_lost_with_their_owner(tmp_path: Path, worlds: Any) -> None:
    model = {**MODEL, **ZERO1}
    lost = {"save_every": 2, "redundancy": {"copies": 0}}
    schedule = [die("reduce", 1, 0, from_step=5)]
    settings = {**model, "steps": 8, **lost}
    with Cluster(tmp_path, script=SCRIPT, agents=2, nodes="2:2", schedule=schedule, settings=settings) as cluster:
        cluster.wait_end(200)
    log = "".join(path.read_text() for path in tmp_path.glob("agent-*.log"))
    assert re.search(r"state_lost .*copies=0.* \d+ of 58432 elements of version 5 are lost.* steps lost: 1\n", log)
    check(tmp_path, model, worlds)


def resize(cluster: Cluster) -> None:
    """Resize to one replica, and back to two; dividing a replica is refused."""
    before = wait_replicas(cluster, after=time.time())
    with pytest.raises(AssertionError, match="a replica of the model takes 2 nodes"):
        cluster.order("resize", "task", "3")
    cluster.order("resize", "task", "2")
    left = wait_replicas(cluster, 1, after=time.time())
    assert {note["pid"] for note in left} < {note["pid"] for note in before}
    cluster.order("resize", "task", "all")
    assert {note["pid"] for note in left} < {note["pid"] for note in wait_replicas(cluster, after=time.time())}
