"""What the transfer of a state costs in a join: stall and memory of the members that have it, and of the joiner.

    python benchmarks/join_state.py --megabytes 10 100 1000

Three processes on this machine, of two nodes: two members, each of which sends a half, and a joiner. Beside the time
of `Join` stands that of one broadcast of as many bytes by gloo. Memory is the peak beyond what the process had before.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from host_collectives import epoch_of
from torch import multiprocessing

from unicron_lightning.worker.communication.communicator import gather_bytes, gather_rows
from unicron_lightning.worker.communication.gloo import CpuCommunicator
from unicron_lightning.worker.communication.links.hub import Hub
from unicron_lightning.worker.operations import Join
from unicron_lightning.worker.rows import ReportSum

HOST = "127.0.0.1"
ROLES = ("member", "member", "joiner")
PLACES = (("node 0", "node 0"), ("node 0", "node 0"), ("node 1", "node 1"))
"""Rack and node of each."""
TENSORS = 16
"""Into which a state is divided."""


def peak_megabytes() -> float:
    """The most memory since the last reset."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e6


def reset_peak() -> float:
    """Begin to count anew; return what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_megabytes()


def measured(rank: int, communicator: Any, megabytes: int) -> list[float]:
    """Join once; return seconds, those of a broadcast, and further megabytes."""
    elements = int(megabytes * 1e6) // 4
    state = {"checkpoint": {"state_dict": {str(n): torch.rand(elements // TENSORS) for n in range(TENSORS)}}}
    engine: Any = SimpleNamespace(
        has_state=ROLES[rank] != "joiner",
        position=0,
        step=0,
        communicator=communicator,
        world=SimpleNamespace(rank=rank, epoch=1, hold=False, kind="join", places=PLACES),
        activity=SimpleNamespace(enter=lambda phase: None),
        control=None,
        fault=lambda *point: None,
        tag=lambda name: name,
        report_again=lambda operation: None,
    )
    join = Join(lambda: state)
    join.plan(ReportSum(world=len(ROLES), donor=0), rank)
    gather_bytes(communicator, b"begin")
    before, began = reset_peak(), time.monotonic()
    join.attempt(engine)
    seconds, memory = time.monotonic() - began, peak_megabytes() - before
    del join
    buffer = torch.ones(elements)
    gather_bytes(communicator, b"begin")
    began = time.monotonic()
    communicator.wait(communicator.broadcast(buffer, 0))
    return [seconds, time.monotonic() - began, memory]


def run(rank: int, port: int, sizes: list[int]) -> None:
    """One process of the three."""
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, len(ROLES), rank == 0)
    hub = Hub(HOST)
    store.set(f"port/{rank}", str(hub.port))
    ports = [int(store.get(f"port/{each}")) for each in range(len(ROLES))]
    epoch = epoch_of(len(ROLES), 1, ports)
    communicator = CpuCommunicator(hub, epoch, rank, HOST, timedelta(seconds=30))
    measured(rank, communicator, 2)  # what a process does once only
    for megabytes in sizes:
        rows = gather_rows(communicator, measured(rank, communicator, megabytes)).tolist()
        if rank == 0:
            memory = ", ".join(f"{role} +{row[2]:.0f}" for role, row in zip(ROLES, rows, strict=True))
            times = ", ".join(f"{role} {row[0]:.2f}" for role, row in zip(ROLES, rows, strict=True))
            plain = max(row[1] for row in rows)
            print(f"{megabytes} MB: seconds: {times} (one broadcast: {plain:.2f}); MB: {memory}", flush=True)
    gather_bytes(communicator, b"end")
    os._exit(0)  # gloo's groups are still connected


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args()
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    multiprocessing.spawn(run, (port, options.megabytes), nprocs=len(ROLES))


if __name__ == "__main__":
    main()
