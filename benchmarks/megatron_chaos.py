"""Seeded random faults on a Megatron model that trains for real; at the end its parameters are those of a plain loop.

The model of tests/megatron/train.py in TP x PP x DP workers, each with an agent of its own, and one agent more whose
warm worker takes a lost one's place. SIGKILL of a worker, of two of one replica, of two of different replicas, or of
another one while a failure is healed; at random moments, in a whole world. Never are all holders of a shard killed
together: no way leads on from that without a checkpoint.

    python benchmarks/megatron_chaos.py --faults 50 --seed 1 --tp 1 --pp 2
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.cluster import Cluster, Note, kill, until
from faults.megatron import MODEL, SCRIPT, ZERO1, differences, finals

KINDS = {"worker": 6, "two of a replica": 2, "two of different replicas": 2, "second in recovery": 2}
STALLED_SECONDS = 120.0
BIT_BY_BIT = 2
"""Replicas with which the sums are those of the failure-free run; with more there is rounding."""
MOST_DIFFERENCE = 1e-5


def strike(cluster: Cluster, workers: int, replicas: int, random_: random.Random) -> tuple[str, int, float]:
    """One kind of fault in a whole world; returns it, the number of deaths, and the seconds to the next step."""

    def whole() -> list[Note] | None:
        world = cluster.world()
        return world if len(world) == workers and all(note["replicas"] == replicas for note in world) else None

    world = cluster.watch(whole, "a whole world", 600, STALLED_SECONDS)
    time.sleep(random_.uniform(0.0, 0.3))
    kind = random_.choices(list(KINDS), list(KINDS.values()))[0]
    first = random_.choice(world)
    others = {
        "worker": [],
        "two of a replica": [n for n in world if n["replica"] == first["replica"] and n is not first],
        "two of different replicas": [n for n in world if _survives(first, n)],
        # Of two replicas the one that goes on is soon the only one with the newest state.
        "second in recovery": [
            n for n in world if n is not first and (replicas > 2 or n["replica"] == first["replica"])
        ],
    }[kind]
    victims = [first, *(random_.sample(others, 1) if others else [])]
    started = time.time()
    for number, victim in enumerate(victims):
        if number and kind == "second in recovery":
            time.sleep(random_.uniform(0.0, 0.15))
        kill(victim["pid"])
    dead = {victim["pid"] for victim in victims}

    def stepped() -> list[Note]:
        return [
            n for n in cluster.newest_steps() if n["at"] > started and n["pid"] not in dead and n["world"] < workers
        ]

    after = cluster.watch(stepped, "the next step", 300, STALLED_SECONDS)
    return kind, len(victims), min(note["at"] for note in after) - started


def _survives(first: Note, second: Note) -> bool:
    """Whether, without these two of different replicas, every shard is still there."""
    return second["replica"] != first["replica"] and second["shard"] != first["shard"]


def plain(folder: Path, model: dict[str, Any], step: int) -> Path:
    """A plain Megatron loop of as many steps; returns where its parameters are."""
    world = model["tp"] * model["pp"] * model["dp"]
    folder.mkdir()
    request = {"scenario": "reference:run", "world": world, "folder": str(folder)}
    request["arguments"] = {"settings": model, "steps": [step]}
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("forks.py"))],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["exits"] == [0] * world, done
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    for name, size in (("tp", 1), ("pp", 2), ("dp", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--zero1", action="store_true", help="with the distributed optimizer, and without clipping")
    arguments = parser.parse_args()
    model = {**MODEL, "tp": arguments.tp, "pp": arguments.pp, "dp": arguments.dp, "toy": {"dropout": 0.1}}
    if arguments.zero1:
        model |= ZERO1
    shards = model["tp"] * model["pp"]
    workers = shards * model["dp"]
    random_ = random.Random(arguments.seed)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="megatron-chaos-") as name:
        folder = Path(name)
        settings = {**model, "steps": 6, "finish": True, "full": workers, "slow": 0.05}
        nodes = f"{shards}:{workers}"
        with Cluster(folder, script=SCRIPT, agents=workers + 1, nodes=nodes, settings=settings) as cluster:
            faults = 0
            while faults < arguments.faults:
                kind, deaths, seconds = strike(cluster, workers, model["dp"], random_)
                faults += deaths
                times[kind].append(seconds)
                print(f"{faults} faults: {kind}, next step after {1e3 * seconds:.0f} ms", flush=True)
            (folder / "finish").touch()
            until("the agents' end", lambda: all(agent.poll() is not None for agent in cluster.agents.values()), 600)
            cluster.wait_end()
        step, paths = finals(folder)
        found = differences(paths, plain(folder / "plain", model, step))
    worst = max(found.values())
    print(f"{faults} faults in {step} steps; largest difference of a parameter from the plain loop: {worst:.1e}")
    for kind, seconds_ in times.items():
        if seconds_:
            print(
                f"{kind}: {len(seconds_)} times, to the next step {1e3 * statistics.median(seconds_):.0f} ms (median)"
            )
    assert len(found) == workers
    assert worst <= (0.0 if model["dp"] == BIT_BY_BIT else MOST_DIFFERENCE)


if __name__ == "__main__":
    main()
