"""What the transfer of a state costs in a join: seconds, and memory of the donor, of another member, of the joiner.

    python benchmarks/join_state.py --megabytes 10 100 1000

Three processes on this machine. Beside the time of `Join` stands that of one broadcast of as many bytes in the same
communicator, which is what the connections give. Memory is the peak beyond what the process had before.
"""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from unicron_lightning.worker.communication.communicator import gather_bytes, gather_rows
from unicron_lightning.worker.communication.gloo import GlooCommunicator
from unicron_lightning.worker.operations import Join
from unicron_lightning.worker.rows import ReportSum

HOST = "127.0.0.1"
ROLES = ("donor", "member", "joiner")
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
        has_state=rank != ROLES.index("joiner"),
        position=0,
        step=0,
        communicator=communicator,
        world=SimpleNamespace(rank=rank, epoch=1, hold=False, kind="join"),
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
    communicator = GlooCommunicator(store, rank, len(ROLES), HOST)
    for megabytes in sizes:
        rows = gather_rows(communicator, measured(rank, communicator, megabytes)).tolist()
        if rank == 0:
            memory = ", ".join(f"{role} +{row[2]:.0f}" for role, row in zip(ROLES, rows, strict=True))
            join, plain = (max(row[place] for row in rows) for place in (0, 1))
            print(f"{megabytes} MB: {join:.2f} s (one broadcast: {plain:.2f} s); MB: {memory}", flush=True)
    gather_bytes(communicator, b"end")
    communicator.close()


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
