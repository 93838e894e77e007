"""Runs scenarios in two processes, many in each pair: ``ddp`` under torchrun alone, ``unicron`` on two nodes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from conformance.pair import WORLD

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import Processes, free_port

SCRIPT: Final = Path(__file__).with_name("pair.py")
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(SCRIPT.parents[1])}
"""Lightning's messages have the elements of sets, in the order of their hashes."""
MOST_SECONDS: Final = 60.0
"""Most time without progress, after which a pair counts as hung."""
Records = dict[str, list[dict[str, Any] | None]]
"""By scenario: the record of each rank; None if the process has written none."""


class Pair(Protocol):
    """Two processes that have been started, by one or two torchruns."""

    processes: Processes

    def close(self) -> None:
        """Stop them."""


class Alone:
    """A pair under torchrun alone."""

    def __init__(self, out: Path, number: int) -> None:
        self.processes = Processes(out / f"pair{number}", ENVIRONMENT)
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "pair"]
        shape = ["--nnodes", "1:1", "--nproc-per-node", str(WORLD), "--max-restarts", "0"]
        command = [sys.executable, "-m", "torch.distributed.run", *shape, *where, SCRIPT, out, str(number)]
        self.processes.start("agent", command)

    def close(self) -> None:
        self.processes.stop(0.0)


@contextmanager
def _coordinated(out: Path) -> Iterator[LocalCluster]:
    with LocalCluster([SCRIPT], nodes=[], coordinator=[], folder=out / "coordinator", stop_seconds=0.0) as cluster:
        yield cluster


def _start(strategy: str, out: Path, number: int, beside: LocalCluster | None) -> Pair:
    if strategy == "ddp":
        return Alone(out, number)
    return LocalCluster(
        [SCRIPT, out, str(number)],
        nodes=[f"pair{number}-node{rank}" for rank in range(WORLD)],
        nnodes=f"{WORLD}:{WORLD}",
        task=f"pair{number}",
        max_restarts=0,
        environment=ENVIRONMENT,
        folder=out / f"pair{number}",
        beside=beside,
        stop_seconds=0.0,
    ).start()


def run_pairs(strategy: str, names: Sequence[str], out: Path) -> Records:
    """Run scenarios in pairs of processes; where a pair has ended before the last one, the next pair continues.

    Args:
        strategy: ``ddp`` or ``unicron``.
        names: of scenarios.
        out: folder of the records and logs.
    """
    out.mkdir(parents=True)
    if strategy == "ddp":
        return _run_pairs(strategy, names, out, None)
    with _coordinated(out) as beside:
        return _run_pairs(strategy, names, out, beside)


def _run_pairs(strategy: str, names: Sequence[str], out: Path, beside: LocalCluster | None) -> Records:
    left = {f"{number:04}": name for number, name in enumerate(names)}
    records: Records = {}
    number, started = 0, [_start(strategy, out, 0, beside)]
    try:
        while left:
            (out / f"plan-{number}.part").write_text(json.dumps({"strategy": strategy, "names": left}))
            (out / f"plan-{number}.part").rename(out / f"plan-{number}.json")
            if beside is not None:  # imports take seconds: the next pair makes them while this one works
                started.append(_start(strategy, out, number + 1, beside))
            pair = started.pop(0)
            _wait(pair, out, number)
            pair.close()
            for each in [each for each in left if (out / f"{each}.files").exists()] or [next(iter(left))]:
                records[left.pop(each)] = [_read(out / f"{each}.{rank}.json") for rank in range(WORLD)]
            number += 1
            if left and not started:
                started.append(_start(strategy, out, number, beside))
    finally:
        for each in started:
            each.close()
    return records


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _wait(pair: Pair, out: Path, number: int) -> None:
    """Wait for the end of a pair, or for its last progress."""
    seen, since = -1, time.monotonic()
    while not all((out / f"over-{number}.{rank}").exists() for rank in range(WORLD)):
        if all(each.poll() is not None for each in pair.processes.started.values()):
            return
        count = len(os.listdir(out))
        if count != seen:
            seen, since = count, time.monotonic()
        if time.monotonic() - since > MOST_SECONDS:
            return
        time.sleep(0.05)
