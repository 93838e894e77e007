"""Members of an epoch meet in the store under unpredictable names."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from coordinator.driver import World, running, settle

from unicron_lightning import wire
from unicron_lightning.worker.communication.backends import DataPlane
from unicron_lightning.worker.communication.gloo import wait_buried


def epoch_of(number: int, key: str, port: int) -> wire.Epoch:
    members = [wire.Member(worker=name, agent=name, node=name, host="127.0.0.1", local_rank=0) for name in ("a", "b")]
    store = wire.Address(host="127.0.0.1", port=port)
    return wire.Epoch(
        number=number, kind="fail", members=members, store=store, hold=False, incident=None, published_at=0.0, key=key
    )


def test_keys_written_beforehand_by_a_stranger_do_not_matter() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    for number in range(10):
        for name in ("links/port/0", "links/port/1", "gloo/0", "gloo/rank_0", "gloo/0/1"):
            for prefix in (f"unicron/task/{number}/", f"unicron/task/{number}//"):
                stranger.set(prefix + name, b"nonsense")
    epoch = epoch_of(2, "5f" * 16, server.port)
    sums: list[Any] = [None, None]

    def run(rank: int) -> None:
        plane = DataPlane("task", "127.0.0.1", torch.device("cpu"))
        communicator = plane(epoch, rank, 2)
        tensor = torch.full((3,), float(rank + 1))
        communicator.wait(communicator.all_reduce(tensor))
        sums[rank] = tensor.tolist()
        done.wait(20)
        communicator.close()
        plane.close()

    done = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [[3.0] * 3] * 2
    assert wait_buried(10)


def keys(**limits: Any) -> list[str]:
    """Keys of the epochs of a task that loses two workers, one after the other."""
    world = World(**limits)
    agents = running(world, 3)
    for agent in agents[:2]:
        agent.die(code=1)
        settle(world)
    return [epoch.key for epoch in world.oracles["t"].epochs.values()]


def test_keys_differ_by_epoch_and_by_coordinator() -> None:
    first, second = keys(secret=b"one"), keys(secret=b"two")
    assert len(first) == 3 and len({*first, *second}) == len(first) + len(second)
    assert all(len(key) == 32 for key in first)
    assert keys(secret=b"one") == first, "the machine decides nothing by chance"
