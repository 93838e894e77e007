"""Measure how a task of many agents recovers from failures that come together.

    python benchmarks/storms.py [--agents 1000] [--storms scattered rack flap restart] [--json FILE]

The coordinator and the clients are those of `agents`; all agents belong to one task. The storms, each once all agents
are members again:

* scattered: a tenth of the agents is killed, one after the other within a second;
* rack: 32 neighbouring agents are killed at once;
* flap: all connections break at once, and every agent returns;
* restart: the coordinator is killed and started again one second later.

A killed agent is replaced by another one two seconds later. Measured is the time from the first fault until all
remaining agents may train again (they have the newest epoch and its go; with ``flap`` and ``restart`` training is not
interrupted, and the time is that until all agents are connected), and until the task has all agents again. Counted are
epochs, agents whose workers were restarted although they lived, and the coordinator's CPU time.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from agents import Bench, wait
from measure import Figures

RACK = 32
DOWN_SECONDS = 1.0


def scattered(bench: Bench, chance: random.Random) -> int:
    """Kill a tenth of the agents within a second."""
    places = bench.clients.places[bench.clients.tasks[0]]
    struck = chance.sample(places, len(places) // 10)
    began = time.monotonic()
    for number, place in enumerate(struck):
        bench.clients.strike("kill", [place])
        time.sleep(max(0.0, began + (number + 1) / len(struck) - time.monotonic()))
    return len(struck)


def rack(bench: Bench, chance: random.Random) -> int:
    """Kill neighbouring agents at once."""
    places = bench.clients.places[bench.clients.tasks[0]]
    first = chance.randrange(len(places) - RACK)
    bench.clients.strike("kill", places[first : first + RACK])
    return RACK


def flap(bench: Bench, _: random.Random) -> int:
    """Break all connections."""
    bench.clients.strike("flap", bench.clients.places[bench.clients.tasks[0]])
    return 0


def restart(bench: Bench, _: random.Random) -> int:
    """Kill the coordinator, and start it again."""
    bench.kill_coordinator()
    time.sleep(DOWN_SECONDS)
    bench.start_coordinator()
    return 0


STORMS = {"scattered": scattered, "rack": rack, "flap": flap, "restart": restart}


def measure(bench: Bench, name: str) -> Figures:
    """Cause one storm, and wait until all is well again."""
    clients = bench.clients
    task = clients.tasks[0]
    clients.read()
    epochs, restarted = clients.newest(task), restarts(clients)
    began, cpu = time.monotonic(), cpu_seconds(bench)
    lost = STORMS[name](bench, random.Random(name))
    if name == "restart":
        cpu = 0.0
    trains = wait(clients, f"the survivors of {name}", lambda: survivors(clients, task, began, lost), 120)
    whole = bench.await_whole(120)
    connected = wait(clients, "all agents are connected", lambda: all_connected(clients, began), 120)
    time.sleep(2.0)
    clients.read()
    return {
        "storm": name,
        "agents": clients.size,
        "lost": lost,
        "trains_s": round((connected if not lost else trains) - began, 2),
        "whole_s": round(max(connected, whole) - began, 2),
        "epochs": clients.newest(task) - epochs,
        "restarted": restarts(clients) - restarted,
        "cpu_s": round(cpu_seconds(bench) - cpu, 2),
    }


def survivors(clients: Any, task: str, began: float, lost: int) -> float | None:
    """Time at which the agents that were not killed could train again; None if they cannot yet."""
    if not lost:
        return time.monotonic()
    parts = list(clients.settled[task].values())
    newest = max(part["epoch"] for part in parts)
    there = [part for part in parts if part["epoch"] == newest]
    last = max(part["last"] for part in there)
    well = last > began and sum(part["count"] for part in there) >= clients.size - lost
    return float(last) if well else None


def all_connected(clients: Any, began: float) -> float | None:
    """Time at which the last agent was registered; None if some are not."""
    links = list(clients.links.values())
    newest = [link["last"] for link in links]
    if min(newest) <= began or sum(link["open"] for link in links) < clients.size * len(clients.tasks):
        return None
    return max(newest)


def restarts(clients: Any) -> int:
    """Workers that the coordinator had stopped."""
    return sum(notes.get("restarted", 0) for notes in clients.notes.values())


def cpu_seconds(bench: Bench) -> float:
    """CPU time of the coordinator's process."""
    times = psutil.Process(bench.coordinator.pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process outlives this one
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--storms", nargs="+", choices=list(STORMS), default=list(STORMS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    results = []
    with Bench(options.agents, 1, options.clients) as bench:
        print(f"started in {bench.start_agents():.1f} s", file=sys.stderr)
        for name in options.storms:
            results.append(measure(bench, name))
            print(json.dumps(results[-1]), file=sys.stderr)
    print("| storm | agents lost | survivors train after s | all are members after s | epochs | restarted | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for r in results:
        cells = (r["storm"], r["lost"], r["trains_s"], r["whole_s"], r["epochs"], r["restarted"], r["cpu_s"])
        print("| " + " | ".join(map(str, cells)) + " |")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
