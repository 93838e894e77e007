"""Measure what a write of the coordinator costs: SQLite in a folder, and etcd with three members on this machine.

    python benchmarks/store_commits.py --agents 100 --writes 300

A write has the state of one task with that number of agents, each with a worker, and two events, as a recovery
writes them. Printed are the bytes, and the time from the decision until what follows may be sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from coordinator.driver import started
from coordinator.fake_etcd import three_members

from unicron_lightning.coordinator import etcd, state
from unicron_lightning.coordinator.events import Emit
from unicron_lightning.coordinator.replicated import LeaderStore
from unicron_lightning.coordinator.storage import Database, Store


def task_of(agents: int) -> state.Task:
    """Return a task that trains with this number of agents."""
    world, _ = started(4)
    task = json.loads(state.encode(world.task()))
    for table in ("agents", "workers"):
        key, first = next(iter(task[table].items()))
        names = [f"node-{number}-{secrets.token_hex(4)}" for number in range(agents)]
        task[table] = {name: {**first, **{of: name for of, value in first.items() if value == key}} for name in names}
    return state.decode_task(json.dumps(task).encode())


async def measured(store: Database, task: state.Task, writes: int) -> list[float]:
    """Return the seconds of each write."""
    found = []
    for number in range(writes):
        events = [(time.time(), Emit(name="e", task=task.id, incident="i", fields={"number": number}))] * 2
        began = time.perf_counter()
        store.write(save=[task], forget=[], events=events)
        await store.durable()
        found.append(time.perf_counter() - began)
    return found


async def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--writes", type=int, default=300)
    options = parser.parse_args()
    task = task_of(options.agents)
    size = len(state.encode(task))
    print(f"{options.agents} agents: {size} bytes, {size / options.agents:.0f} an agent, "
          f"deflated {len(zlib.compress(state.encode(task), 1))}")  # fmt: skip
    with tempfile.TemporaryDirectory() as place, three_members(Path(place) / "etcd") as members:
        (folder := Path(place) / "sqlite").mkdir(mode=0o700)
        replicated = LeaderStore(etcd.Etcd(members.urls), "bench/", "here")
        await replicated.lead()
        for name, store in (("sqlite", Store(folder)), ("etcd", replicated)):
            times = sorted(await measured(store, task, options.writes))
            p99 = times[int(0.99 * (len(times) - 1))]
            print(f"{name}: median {1e3 * statistics.median(times):.1f} ms, p99 {1e3 * p99:.1f} ms, "
                  f"{len(times) / sum(times):.0f} writes a second")  # fmt: skip
            await store.release()


if __name__ == "__main__":
    asyncio.run(main())
