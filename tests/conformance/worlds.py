"""Runs scenarios in worlds of several processes: ``ddp`` under torchrun alone, ``unicron`` on as many nodes.

The processes are forked by one in which everything is imported (`worlds.prepared`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from worlds.torchruns import ENVIRONMENT, prepared, stub_of

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import Processes, free_port

MOST_SECONDS: Final = 60.0
"""Most time without progress, after which a world counts as hung."""
Records = dict[str, list[dict[str, Any] | None]]
"""By scenario: the record of each rank; None if the process has written none."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What worlds have in common.

    Attributes:
        size: of each world.
        strategy: ``ddp`` or ``unicron``.
        out: folder of the records and logs.
        socket: of the prepared process.
        coordinator: of the tasks; None for ``ddp``.
    """

    size: int
    strategy: str
    out: Path
    socket: Path
    coordinator: LocalCluster | None

    def start(self, number: int) -> Processes:
        """Start a world's agents, which start its processes."""
        given: Mapping[str, str] = {} if self.coordinator is None else self.coordinator.processes.environment
        started = Processes(self.out / f"world{number}", {**given, **ENVIRONMENT})
        stub = stub_of(self.socket)
        script = ["--max-restarts", "0", "--no-python", *stub, "conformance.world", str(self.out), str(number)]
        if self.coordinator is None:
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "world"]
            shape = ["--nnodes", "1:1", "--nproc-per-node", str(self.size)]
            started.start("agent", [*stub, "agent", *where, *shape, *script])
            return started
        where = ["--rdzv-backend", "unicron", "--rdzv-endpoint", self.coordinator.endpoint, "--rdzv-id", f"w{number}"]
        shape = ["--nnodes", f"{self.size}:{self.size}", "--nproc-per-node", "1"]
        for rank in range(self.size):
            conf = f"node=w{number}-node{rank},state_dir={self.coordinator.state_dir}"
            started.start(f"agent{rank}", [*stub, "agent", *where, "--rdzv-conf", conf, *shape, *script])
        return started


@contextmanager
def _site(size: int, strategy: str, out: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        coordinator = None
        if strategy != "ddp":
            coordinator = LocalCluster(nodes=[], coordinator=[], folder=out / "coordinator", stop_seconds=0.0)
            stack.enter_context(coordinator)
        yield Site(
            size=size,
            strategy=strategy,
            out=out,
            socket=stack.enter_context(prepared(out, "conformance.world")),
            coordinator=coordinator,
        )


def run_worlds(strategy: str, names: Sequence[str], out: Path, size: int = 2) -> Records:
    """Run scenarios in worlds; where a world has ended before the last scenario, the next one continues.

    Args:
        strategy: ``ddp`` or ``unicron``.
        names: of scenarios.
        out: folder of the records and logs.
        size: number of processes of each world.
    """
    out.mkdir(parents=True)
    with _site(size, strategy, out) as site:
        return _run(names, site)


def _run(names: Sequence[str], site: Site) -> Records:
    left = {f"{number:04}": name for number, name in enumerate(names)}
    records: Records = {}
    number, out, started = 0, site.out, [site.start(0)]
    try:
        while left:
            (out / f"plan-{number}.part").write_text(json.dumps({"strategy": site.strategy, "names": left}))
            (out / f"plan-{number}.part").rename(out / f"plan-{number}.json")
            if site.coordinator is not None:  # the next world starts while this one works
                started.append(site.start(number + 1))
            world = started.pop(0)
            _wait(world, site, number)
            world.stop(0.0)
            for each in [each for each in left if (out / f"{each}.files").exists()] or [next(iter(left))]:
                records[left.pop(each)] = [_read(out / f"{each}.{rank}.json") for rank in range(site.size)]
            number += 1
            if left and not started:
                started.append(site.start(number))
    finally:
        for each in started:
            each.stop(0.0)
    return records


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _wait(world: Processes, site: Site, number: int) -> None:
    """Wait for the end of a world, or for its last progress."""
    seen, since = -1, time.monotonic()
    while not all((site.out / f"over-{number}.{rank}").exists() for rank in range(site.size)):
        if all(each.poll() is not None for each in world.started.values()):
            return
        count = len(os.listdir(site.out))
        if count != seen:
            seen, since = count, time.monotonic()
        if time.monotonic() - since > MOST_SECONDS:
            return
        time.sleep(0.05)
