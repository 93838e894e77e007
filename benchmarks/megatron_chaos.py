"""Inject seeded random faults into a real Megatron training; compare its parameters with those of a plain loop.

The model of tests/megatron/train.py runs on TP x max(CP, EP) x PP x DP workers, each with an agent of its own; one
further agent has a warm worker that replaces a lost one. At random moments in a complete world a worker is killed, or
two of one replica, or two of different replicas, or a second one during the recovery from the first. Each role in the
model is struck in turn: rank 0, a worker of the first and of the last stage, one of the first and of the last part of
a sequence, one that follows a tensor-parallel peer, and the owner of the last experts. All holders of a shard are
never killed together, since training could then continue only from a checkpoint. With experts or divided sequences
the model computes in float64, as sums have another order after a failure.

    python benchmarks/megatron_chaos.py --faults 50 --seed 1 --tp 1 --pp 2
    python benchmarks/megatron_chaos.py --faults 12 --tp 2 --pp 2          # eight workers
    python benchmarks/megatron_chaos.py --faults 30 --ep 2 --pp 1          # experts
    python benchmarks/megatron_chaos.py --faults 30 --pp 2 --vpp 2         # virtual pipeline stages
    python benchmarks/megatron_chaos.py --faults 30 --pp 1 --cp 2          # divided sequences
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system.cluster import Cluster, Note
from system.megatron import (
    EXPERTS,
    MODEL,
    SCRIPT,
    ZERO1,
    ZERO1_EXPERTS,
    differences,
    differing_replicas,
    finals,
    wait_replicas,
)
from worlds.client import worlds_of

from unicron_lightning.local_cluster.processes import kill

KINDS = {"worker": 6, "two of a replica": 2, "two of different replicas": 2, "second in recovery": 2}
STALLED_SECONDS = 120.0
BIT_BY_BIT = 2
"""Number of replicas with which sums equal those of the failure-free run exactly; more replicas cause rounding."""
MOST_DIFFERENCE = 1e-5
MOST_IN_DOUBLE = 1e-8
"""In float64; Megatron's losses are in float32, whose last bit a difference may change."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault: its kind, the victims' roles, the number of deaths, and the seconds to the next step."""

    kind: str
    roles: list[str]
    deaths: int
    seconds: float


def roles_of(worker: Note, model: dict[str, Any]) -> list[str]:
    """Roles of a worker in its replica and in the world, of those that not all workers share."""
    tensor, rest = worker["shard"] % model["tp"], worker["shard"] // model["tp"]
    columns = max(model["cp"], model["ep"])
    column, stage = rest % columns, rest // columns
    part = column % model["cp"]
    found = {
        "rank 0": worker["rank"] == 0,
        "first stage": model["pp"] > 1 and stage == 0,
        "last stage": model["pp"] > 1 and stage == model["pp"] - 1,
        "TP peer": tensor > 0,
        "last experts": model["ep"] > 1 and column % model["ep"] == model["ep"] - 1,
        "first part": model["cp"] > 1 and part == 0,
        "last part": model["cp"] > 1 and part == model["cp"] - 1,
    }
    return [role for role, has in found.items() if has]


def strike(cluster: Cluster, model: dict[str, Any], role: str | None, random_: random.Random) -> Strike:
    """Inject a random kind of fault into a complete world, on a worker of the given role, or of any."""
    replicas, shards = model["dp"], _workers_of_replica(model)
    workers = shards * replicas
    world = wait_replicas(cluster, replicas, workers=shards, seconds=600)
    time.sleep(random_.uniform(0.0, 0.3))
    kind = random_.choices(list(KINDS), list(KINDS.values()))[0]
    first = random_.choice([note for note in world if role is None or role in roles_of(note, model)])
    others = {
        "worker": [],
        "two of a replica": [n for n in world if n["replica"] == first["replica"] and n is not first],
        "two of different replicas": [n for n in world if _survives(first, n)],
        # With two replicas the survivor soon is the only one with the newest state, so the second victim is of the
        # first's.
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
    roles = [role for victim in victims for role in roles_of(victim, model)]
    return Strike(kind=kind, roles=roles, deaths=len(victims), seconds=min(note["at"] for note in after) - started)


def _workers_of_replica(model: dict[str, Any]) -> int:
    return int(model["tp"] * max(model["cp"], model["ep"]) * model["pp"])


def _survives(first: Note, second: Note) -> bool:
    """Whether every shard survives the loss of these two workers of different replicas."""
    return second["replica"] != first["replica"] and second["shard"] != first["shard"]


def plain(folder: Path, model: dict[str, Any], step: int) -> Path:
    """Run a plain Megatron loop of as many steps; return the folder of its parameters."""
    world = _workers_of_replica(model) * model["dp"]
    with worlds_of(SCRIPT.parent, "unicron_lightning.megatron.toy", seconds=100 + step) as worlds:
        worlds.run("reference:run", world, folder, settings=model, steps=[step])
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    for name, size in (("tp", 1), ("cp", 1), ("ep", 1), ("pp", 2), ("vpp", 1), ("dp", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--zero1", action="store_true", help="with the distributed optimizer, and without clipping")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("tp", "cp", "ep", "pp", "vpp", "dp")}
    model = {**MODEL, **sizes, "toy": {"dropout": 0.1}}
    if arguments.ep > 1:
        # Tensor-parallel workers exchange tokens of a lane, whose numbers gloo requires to be equal.
        dispatcher = "allgather" if arguments.tp > 1 else "alltoall"
        router = {**EXPERTS["toy"]["router"], "moe_token_dispatcher_type": dispatcher}
        toy = {**EXPERTS["toy"], "router": router, "sequence_parallel": arguments.tp > 1}
        model = {**EXPERTS, **sizes, "toy": toy}
    elif arguments.cp > 1:  # workers of a replica sum their gradients with those of other replicas
        model |= {"toy": {"dropout": 0.1, "double": True}, "optimizer": {"clip_grad": 0.0, "lr": 1e-3}}
    if arguments.zero1:
        model |= ZERO1_EXPERTS if arguments.ep > 1 else ZERO1
    shards = _workers_of_replica(model)
    workers = shards * model["dp"]
    with tempfile.TemporaryDirectory(prefix="megatron-chaos-") as name:
        folder = Path(name)
        settings = {**model, "steps": 6, "finish": True, "full": workers, "slow": 0.05}
        nodes = f"{shards}:{workers}"
        with Cluster(folder, script=SCRIPT, agents=workers + 1, nodes=nodes, settings=settings) as cluster:
            strikes = strike_all(cluster, model, arguments.faults, random.Random(arguments.seed))
            (folder / "finish").touch()
            cluster.wait_exit(600)
            lives = 1 + [event["name"] for event in cluster.events()].count("task_restarts")
            cluster.wait_end()
        step, paths = finals(folder)
        found = differences(paths, plain(folder / "plain", model, step))
        assert not differing_replicas(paths)
    report(strikes, step, max(found.values()))
    assert lives == 1, f"{lives} lives: no worker had some shard's state any more"
    assert len(found) == workers
    divides = max(model["ep"], model["cp"]) > 1
    most = MOST_IN_DOUBLE if divides else 0.0 if model["dp"] == BIT_BY_BIT else MOST_DIFFERENCE
    assert max(found.values()) <= most


def strike_all(cluster: Cluster, model: dict[str, Any], faults: int, random_: random.Random) -> list[Strike]:
    """Strike each role in turn until ``faults`` workers have died."""
    every = [{"shard": shard, "rank": shard} for shard in range(_workers_of_replica(model))]
    roles = [*sorted({role for worker in every for role in roles_of(worker, model)}), None]
    strikes: list[Strike] = []
    deaths = 0
    while deaths < faults:
        try:
            done = strike(cluster, model, roles[len(strikes) % len(roles)], random_)
        except AssertionError:
            tell_where(cluster)
            raise
        strikes.append(done)
        deaths += done.deaths
        about = f"{done.kind} ({', '.join(done.roles)})"
        print(f"{deaths} faults: {about}, next step after {1e3 * done.seconds:.0f} ms", flush=True)
    return strikes


def tell_where(cluster: Cluster) -> None:
    """Make every worker write its stacks into its agent's log, and print these logs."""
    workers = {note["pid"] for note in cluster.notes("start")}
    for process in cluster.processes.alive():
        if process.pid in workers:
            kill(process.pid, signal.SIGUSR1)
    time.sleep(3.0)
    for log in sorted(cluster.folder.glob("agent-*.log")):
        print(f"==== stacks of {log.name}\n{log.read_text()[-20000:]}", flush=True)


def report(strikes: list[Strike], step: int, worst: float) -> None:
    """Print the figures."""
    deaths = sum(done.deaths for done in strikes)
    print(f"{deaths} faults in {step} steps; largest difference of a parameter from the plain loop: {worst:.1e}")
    for kind in KINDS:
        seconds = [done.seconds for done in strikes if done.kind == kind]
        if seconds:
            middle, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
            print(f"{kind}: {len(seconds)} times, to the next step {middle:.0f} ms (median), {most:.0f} ms (longest)")
    counts = Counter(role for done in strikes for role in done.roles)
    print("struck: " + ", ".join(f"{role} {number} times" for role, number in sorted(counts.items())))


if __name__ == "__main__":
    main()
