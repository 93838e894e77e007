"""Collectives on host memory: links, links with gloo for large tensors, and gloo alone, in the same processes.

    python benchmarks/host_collectives.py --worlds 2 4 8

Prints for each world the time to connect, and the least time of each collective, in ms, over several rounds that
alternate between the three.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import Communicator
from unicron_lightning.worker.communication.gloo import CpuCommunicator, GlooCommunicator
from unicron_lightning.worker.communication.links.communicator import LinkCommunicator
from unicron_lightning.worker.communication.links.hub import Hub

SECONDS = timedelta(seconds=60)
HOST = "127.0.0.1"
SUMS = {"1 kB": 256, "100 kB": 25_600, "1 MB": 262_144, "25 MB": 6_553_600}


def epoch_of(world: int, number: int, ports: Sequence[int]) -> wire.Epoch:
    """An epoch of ``world`` workers on this machine."""
    members = [
        wire.Member(worker=f"w{r}", agent=f"a{r}", node="n", host=HOST, local_rank=r, port=ports[r])
        for r in range(world)
    ]
    return wire.Epoch(
        number=number,
        kind="fail",
        members=members,
        store=wire.Address(host="", port=0),
        hold=False,
        incident=None,
        published_at=0.0,
        key="0" * 32,
    )


def builders(rank: int, world: int, port: int, hubs: list[Hub]) -> dict[str, Callable[[], Any]]:
    """The communicators to compare, by name."""

    store = dist.TCPStore(HOST, port, is_master=False)
    for place, hub in enumerate(hubs):
        store.set(f"{place}/{rank}", str(hub.port))
    ports = [[int(store.get(f"{place}/{each}")) for each in range(world)] for place in range(len(hubs))]
    first, second = epoch_of(world, 1, ports[0]), epoch_of(world, 2, ports[0])
    both = epoch_of(world, 1, ports[1])
    return {
        "links": lambda: LinkCommunicator(hubs[0], first, rank, SECONDS),
        "links again": lambda: LinkCommunicator(hubs[0], second, rank, SECONDS),
        "links, gloo for large": lambda: CpuCommunicator(hubs[1], both, rank, HOST, SECONDS),
        "gloo": lambda: GlooCommunicator(dist.PrefixStore("gloo", store), rank, world, HOST),
    }


def least(act: Callable[[], Any], rounds: int) -> float:
    """The least time of an action, in ms."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def measured(communicator: Communicator, rounds: int) -> dict[str, float]:
    """The least time of each collective, in ms."""
    ballot = torch.zeros(20, dtype=torch.float64)
    found = {"commit": least(lambda: communicator.wait(communicator.all_reduce(ballot)), 10 * rounds)}
    for name, length in SUMS.items():
        tensor = torch.zeros(length)
        found[f"sum of {name}"] = least(
            lambda tensor=tensor: communicator.wait(communicator.all_reduce(tensor)), rounds
        )
    return found


def worker(rank: int, world: int, port: int, rounds: int, results: SimpleQueue[dict[str, dict[str, float]]]) -> None:
    """One rank: connect and measure; rank 0 reports."""
    torch.set_num_threads(1)
    hubs = [Hub(HOST), Hub(HOST)]
    table: dict[str, dict[str, float]] = {}
    open_ones: dict[str, Any] = {}
    for name, build in builders(rank, world, port, hubs).items():
        started = time.perf_counter()
        open_ones[name] = build()
        table[name] = {"connect": 1e3 * (time.perf_counter() - started)}
    del open_ones["links"]  # superseded by its second epoch
    for _ in range(3):
        for name, communicator in open_ones.items():
            for what, milliseconds in measured(communicator, rounds).items():
                table[name][what] = min(milliseconds, table[name].get(what, milliseconds))
    if rank == 0:
        results.put(table)
    time.sleep(0.5)
    os._exit(0)  # gloo's groups are still connected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8], help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each collective in a turn")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for world in options.worlds:
        server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        results = context.SimpleQueue()
        arguments = [(rank, world, server.port, options.rounds, results) for rank in range(world)]
        processes = [context.Process(target=worker, args=each) for each in arguments]
        for process in processes:
            process.start()
        table = results.get()
        for process in processes:
            process.join(30)
        show(world, table)


def show(world: int, table: dict[str, dict[str, float]]) -> None:
    """Print a world's table."""
    print(f"{world} processes, load {os.getloadavg()[0]:.1f}, least of the rounds in ms")
    for what in table["gloo"]:
        row = "   ".join(f"{name} {values[what]:.2f}" for name, values in table.items() if what in values)
        print(f"  {what}: {row}", flush=True)


if __name__ == "__main__":
    main()
