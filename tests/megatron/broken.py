"""Scenario: a peer dies after a part of its message has arrived."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from worker.nccl_stand_in import StandInLibrary

from unicron_lightning.replica.channels import (
    AcceleratedGroup,
    AcceleratedGroups,
    Channels,
    PeerGroup,
    ProcessGroup,
    ReduceScatter,
)
from unicron_lightning.replica.fabric import ReplicaFabric
from unicron_lightning.replica.layout import Grid, Shape
from unicron_lightning.worker.communication.gloo import wait_buried
from unicron_lightning.worker.communication.lazy_groups import LazyGroups

if TYPE_CHECKING:
    from pathlib import Path

ELEMENTS = 100_000_000
CUT_AFTER = 0.3
SECONDS = 20


def killed_while_sending(rank: int, world: int, folder: Path, operation: str, cuts: bool) -> Any:
    """Rank 0 sends, rank 1 kills it in the middle, and may cut the group."""
    group = PeerGroup(dist.FileStore(str(folder / "store"), world), rank, world, "127.0.0.1")
    process_group = ProcessGroup(group, rank, world)
    tensor = torch.full((ELEMENTS,), 1.0 - rank)
    if rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
        start(process_group, operation, tensor, rank).wait()
        time.sleep(SECONDS)
        return None
    sender = int(await_file(folder / "pid"))
    threading.Thread(target=kill_amid, args=(sender, tensor)).start()
    if cuts:
        threading.Timer(CUT_AFTER, group.cut).start()
    began = time.monotonic()
    try:
        start(process_group, operation, tensor, rank).wait()
    except dist.DistNetworkError as error:
        reason = str(error)
    except RuntimeError as error:
        reason = f"gloo: {error}"
    else:
        reason = "completed"
    seconds, arrived = time.monotonic() - began, float(tensor.mean())
    time.sleep(CUT_AFTER)
    result = {"seconds": seconds, "reason": reason, "arrived": arrived, "later": float(tensor.mean())}
    del process_group
    began = time.monotonic()
    group.close()
    return {**result, "closing": time.monotonic() - began, "buried": not wait_buried(0.0)}


def start(group: ProcessGroup, operation: str, tensor: torch.Tensor, rank: int) -> Any:
    """The sender's or the receiver's part.

    A reduce-scatter waits for collectives in the same way; the place of received data in its own copy is unknown.
    """
    if operation == "reduce-scatter":
        return ReduceScatter([start(group, "broadcast", tensor, rank)], ())
    if operation == "broadcast":
        return group.broadcast([tensor], dist.BroadcastOptions())
    return group.recv([tensor], 0, 0) if rank else group.send([tensor], 1, 0)


def kill_amid(pid: int, tensor: torch.Tensor) -> None:
    """Kill the sender as soon as the first element has arrived."""
    while tensor[0] == 0:
        time.sleep(0)
    os.kill(pid, signal.SIGKILL)


def await_file(path: Path) -> str:
    """Wait for a file and return its text."""
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


def connected_as_needed(rank: int, world: int, folder: Path, all_pairs: bool) -> Any:
    """Connections of a group at first, and after collectives; then rank 1 waits for members that send nothing, and
    cuts.
    """
    store = dist.FileStore(str(folder / "store"), world)
    group = PeerGroup(store, rank, world, "127.0.0.1", all_pairs=all_pairs)
    process_group = ProcessGroup(group, rank, world)
    first = len(group._connections)
    tensor = torch.ones(ELEMENTS // 1000)
    process_group.allreduce([tensor]).wait()
    process_group._allgather_base(torch.empty(world), torch.ones(1)).wait()
    for root in range(world):
        options = dist.BroadcastOptions()
        options.rootRank = root
        process_group.broadcast([tensor], options).wait()
    second = len(group._connections)
    found = {"connections": [first, second], "sum": float(tensor[0]), "disconnected": group.disconnected()}
    if rank == 1:
        threading.Timer(CUT_AFTER, group.cut).start()
        began = time.monotonic()
        gathering = dist.GatherOptions()
        gathering.rootRank = rank
        try:
            process_group.gather([[torch.empty(1) for _ in range(world)]], [torch.ones(1)], gathering).wait()
        except RuntimeError:
            found["released"] = time.monotonic() - began
        (folder / "released").write_text("1")
    await_file(folder / "released")
    group.close()
    return found


def scattered(rank: int, world: int, folder: Path) -> Any:
    """Results of one and two simultaneous reduce-scatters, and the works that the group holds afterwards."""
    group = PeerGroup(dist.FileStore(str(folder / "store"), world), rank, world, "127.0.0.1")
    process_group = ProcessGroup(group, rank, world)
    outputs = [torch.zeros(2), torch.zeros(1, 1)]
    inputs = [torch.arange(4.0) + rank, torch.tensor([[5.0], [7.0]])]
    options = dist.ReduceScatterOptions()
    process_group.reduce_scatter_tensor_coalesced(outputs, inputs, options).wait()
    process_group._reduce_scatter_base(again := torch.zeros(2), inputs[0], options).wait()
    held = sum(not work.is_completed() for work in group._works)
    group.close()
    return [[output.flatten().tolist() for output in (*outputs, again)], inputs[0].tolist(), held]


def let_go_by_a_partner(rank: int, world: int, folder: Path) -> Any:
    """Rank 0 cuts its replica's connections when all the others ask; each of them has a group that it can abort."""
    shape = Shape(tensor=1, pipeline=world, replicas=1)
    grid = Grid(shape=shape, replicas=1, place=0, shard=rank)
    channels = Channels(grid, dist.FileStore(str(folder / "store"), world), "127.0.0.1", None)
    fabric, aborted = ReplicaFabric(shape), threading.Event()
    fabric.channels, fabric._inner, channels.adopted = channels, channels.inner, True
    if rank == 0:
        for partner in range(1, world):
            await_file(folder / f"now{partner}")
        fabric.cut()
        fabric.close()
        return None
    channels.inner_accelerated = LazyGroups([SimpleNamespace(abort=aborted.set)])
    fabric.watch()
    early = aborted.wait(1.0)
    (folder / f"now{rank}").write_text("1")
    found = {"early": early, "aborted": aborted.wait(SECONDS), "intact": fabric.intact}
    fabric.close()
    return {**found, "threads": [thread.name for thread in threading.enumerate() if thread.name == "unicron-partners"]}


def left_groups(rank: int, world: int, folder: Path) -> Any:
    """Seconds to leave a world with slow groups in NCCL's place, whether its end was waited for, and their threads."""
    from unicron_lightning.megatron import world as worlds

    group = SimpleNamespace(threads=set(), ended=False)

    def abort() -> None:
        group.threads.add(threading.current_thread().name)
        time.sleep(3.0)
        group.ended = True

    shape = Shape(tensor=1, pipeline=1, replicas=1)
    channels = Channels(Grid(shape=shape, replicas=1, place=0, shard=0), dist.HashStore(), "127.0.0.1", None)
    cpu = torch.device("cpu")
    library = StandInLibrary(lambda *place: None)
    worlds._groups = AcceleratedGroups(synchronize=lambda device: None, library=lambda device: library)
    worlds.enter_world(channels, shape, cpu, lambda: None)
    slow = [
        AcceleratedGroup(holder=each, backend=SimpleNamespace(abort=abort), size=1, inside=True)
        for each in list(dist.distributed_c10d._world.pg_map)
    ]
    worlds._groups.connect(channels, slow, cpu, lambda: None)
    del slow
    began = time.monotonic()
    worlds.leave_world()
    left, early = time.monotonic() - began, group.ended
    worlds.enter_world(channels, shape, cpu, lambda: None)
    found = [left, early, group.ended, sorted(group.threads), dist.get_world_size()]
    worlds.leave_world()
    return found
