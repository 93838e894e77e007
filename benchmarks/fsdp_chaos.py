"""Kill workers of a real FSDP2 training at every kind of point and in every role; compare its parameters afterwards.

The model of tests/fsdp/train.py runs on S x R workers, each with an agent of its own; one further agent has a warm
worker that replaces a lost one. Faults strike in sequence, in seeded order: a death at each point of a step, of a
validation and of a checkpoint, on the first or the last shard; a worker that is stopped, waits for ever, or keeps the
interpreter's lock; and pairs, of which the second one strikes during the recovery from the first: the joiner, its
partner, the donor of their state, a spare or a worker of another replica. The last and the donor need three replicas,
as otherwise no worker has the state any more. With --relayout an operator orders another number of shards, and back, in
some cases with a death in a checkpoint meanwhile.

    python benchmarks/fsdp_chaos.py --faults 50 --seed 1                       # S=2, R=3
    python benchmarks/fsdp_chaos.py --faults 50 --seed 1 --relayout 3          # from S=2 to S=3, R=2, and back
    python benchmarks/fsdp_chaos.py --faults 20 --seed 1 --memory 3            # with deaths of all workers
    python benchmarks/fsdp_chaos.py --faults 10 --steps 200 --replicas 2 --float32
    python benchmarks/fsdp_chaos.py --faults 10 --steps 60 --replicas 2 --precision bf16-mixed
    python benchmarks/fsdp_chaos.py --faults 30 --kills --slices 2 --shards 1 --replicas 2   # tensor parallelism
    python benchmarks/fsdp_chaos.py --faults 30 --kills --muon --replicas 2

The parameters are compared with those of a run in one process and, with --float32, with those of the same workers
without failures; with --precision only with the latter, as one process without FSDP2 rounds elsewhere. They are
compared bit by bit between replicas.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fsdp.judge import SCRIPT, alone, between_replicas, differences, notes
from fsdp.strikes import CHECKPOINT, FOLDER, PASS, STEP
from system.cluster import Cluster

from unicron_lightning.local_cluster.processes import kill

TASK = {
    "slow": 0.3,
    "validate": 4,
    "save_every": 3,
    "dropout": 0.1,
    "samples": 65536,
    "reference": "unicron",
    "tied": False,
}
CONF = "worker_timeout=5"
"""Seconds without a heartbeat after which a stopped worker counts as dead."""
STALLED_SECONDS = 60.0
"""Time without a finished step that counts as a hang."""
LIMITS = {"float64": 1e-10, "float32": 1e-5}
"""Largest difference of a parameter: only the order of additions differs.

AdamW amplifies the rounding of gradients that are nearly zero, so in float32 the difference between two runs without
failures counts, too.
"""
SECOND = {
    "joiner": ("transfer", "join"),  # it connects before its script's hooks
    "partner": ("connect", "transfer", "join"),
    "spare": ("exchange", "gate", "commit"),
    "donor": ("transfer",),
    "worker": ("connect", "call", "reduction"),
}
"""Points at which a worker of each role dies after another one."""
UPDATE = ("update", "updated")
"""Points of a step whose update communicates."""
TRIGGERS = ("forward", "backward", "reduce-scatter")
"""Points of the first death."""
AMONG_SHARDS = ("all-gather", "reduce-scatter")
"""Points that a model in one shard does not have."""
FROZEN = ("stop", "hang", "lock")
"""Ways to fail without a death; see `strikes.WAYS`."""
SETTLED = 12
"""Steps of a world before a worker freezes: how long a step takes has to be known."""
OF_THREE = ("donor", "worker")
"""Roles that need three replicas."""

Fault = dict[str, Any]


@dataclass
class Drawing:
    """Draws faults for the layout that the workers have when they strike.

    Args:
        shards, workers: the first layout.
        slices: workers of each shard's lane.
        other: number of shards of the other layout, between which an operator's orders alternate; 0: no orders.
        folders: whether checkpoints are folders.
        memory: steps between states in the agents' memory; 0: none.
        kills: whether to draw deaths only.
        muon: whether updates need whole matrices.
        chance: of kinds, places and moments.
    """

    shards: int
    slices: int
    workers: int
    other: int
    folders: bool
    memory: int
    kills: bool
    muon: bool
    chance: random.Random

    @property
    def of_replica(self) -> int:
        """Workers of a replica."""
        return self.shards * self.slices

    def schedule(self, faults: int) -> list[Fault]:
        """Draw at least ``faults`` faults: all kinds in random order, again and again."""
        drawn: list[Fault] = []
        while len(drawn) < faults:
            kinds = list(self._kinds())
            self.chance.shuffle(kinds)
            for kind in kinds:
                if len(drawn) < faults:
                    drawn += self._group(*kind)
        return drawn

    def _kinds(self) -> Iterator[tuple[str, str]]:
        points = [each for each in STEP if self.shards > 1 or each not in AMONG_SHARDS]
        points += UPDATE if self.muon else ()
        for point in (*points, *PASS, *CHECKPOINT, *(FOLDER if self.folders else ())):
            yield "kill", point
        for point in () if self.kills else TRIGGERS:
            yield from ((way, point) for way in FROZEN)
        for role, points in SECOND.items():
            yield from ((role, point) for point in points)
        if self.other:
            yield from (("relayout", ""), ("relayout", "collect"))
        if self.memory:
            yield from [("all", "")] * 5

    def _group(self, kind: str, point: str) -> list[Fault]:
        """The faults of a kind, at random places."""
        if kind == "relayout":
            order = {"relayout": self.other, "dies": bool(point)}
            self.shards, self.other = self.other, self.shards
            return [order, {**self._at("collect"), "replica": 0}] if point else [order]
        if kind == "all":
            return [{"all": True}]
        if kind == "kill":
            place = {"checkpoint": {"replica": 0, "shard": 0}, "part": {"replica": 0}}.get(point, {})
            return [{**self._at(point), **place}]
        if kind in FROZEN:
            return [{**self._at(point), "way": kind, "settled": SETTLED}]
        if kind in OF_THREE and self.workers // self.of_replica < 3:
            return []
        triggers = TRIGGERS if self.shards > 1 else [each for each in TRIGGERS if each not in AMONG_SHARDS]
        return [self._at(self.chance.choice(triggers)), {"point": point, "role": kind}]

    def _at(self, point: str) -> Fault:
        chance = self.chance
        nth = chance.randrange(3) if point in ("all-gather", *TRIGGERS) else 0
        shard, replicas = chance.choice((0, self.of_replica - 1)), self.workers // self.of_replica
        return {"point": point, "replica": chance.randrange(replicas), "shard": shard, "nth": nth}


def train(folder: Path, settings: dict[str, Any], planned: list[Fault]) -> tuple[int, float]:
    """Run the training with faults; return its last step and its duration in seconds."""
    folder.mkdir()
    workers = settings["full"]
    agents = workers + bool(planned)
    nodes = f"{settings['shards'] * settings['slices']}:{workers}"
    started = time.monotonic()
    with Cluster(
        folder, script=SCRIPT, agents=agents, nodes=nodes, schedule=planned, settings=settings, conf=CONF
    ) as cluster:
        orders = deaths = 0
        for number, fault in enumerate(planned):
            mark = folder / f"struck-{number}"
            if "all" in fault:
                deaths += 1
                kill_all(cluster, mark)
            elif "point" not in fault:
                orders += 1
                relayout(cluster, fault, mark, orders)
            cluster.watch(mark.exists, f"fault {number}, {fault}", 200, STALLED_SECONDS)
            print(f"{time.monotonic() - started:6.1f} s  {number + 1:3d}  {_name(fault)}", flush=True)
        cluster.wait_end(200)
        restarts = len(cluster.events("task_restarts"))
        expected = f"{orders} orders and {deaths} deaths of all"
        assert restarts == orders + deaths, f"{restarts} restarts, {expected}; no worker had some shard's state"
        restored = [event for event in cluster.events("worker.state_restored") if event["tier"] == "memory"]
        assert len(restored) == deaths, f"{len(restored)} restorations from memory, {expected}"
        check_lost(folder, restored, settings["memory"])
    [step] = {note["step"] for note in notes(folder, "end")}
    return step, time.monotonic() - started


def check_lost(folder: Path, restored: list[dict[str, Any]], memory: list[int] | None) -> None:
    """Check how many finished steps each restoration from memory has lost."""
    steps = notes(folder, "step")
    lost = [max(note["step"] for note in steps if note["at"] < each["at"]) - each["step"] for each in restored]
    print(f"{len(lost)} restorations from memory; steps lost: {lost}")
    assert memory is None or all(0 <= number <= memory[0] for number in lost), lost


def kill_all(cluster: Cluster, mark: Path) -> None:
    """Kill all workers of a complete world, and mark the fault as struck."""
    world = cluster.wait_world(cluster.settings["full"], after=time.time())
    for line in world:
        kill(line["pid"])
    mark.with_suffix(".tmp").write_text(str(max(line["step"] for line in world)))
    mark.with_suffix(".tmp").rename(mark)


def relayout(cluster: Cluster, order: Fault, mark: Path, orders: int) -> None:
    """Order the other layout in a complete world, and mark the order as struck: at once if the next fault is a death
    meanwhile, or else when the layout has changed.
    """

    def changed() -> bool:
        return len(cluster.events("layout_changes")) == orders

    cluster.watch(lambda: len(cluster.events("layout_changes")) == orders - 1, "the order before", 200, STALLED_SECONDS)
    cluster.wait_world(cluster.settings["full"], after=time.time())
    cluster.order("relayout", "task", "--shards", str(order["relayout"]))
    if not order["dies"]:
        cluster.watch(changed, f"{order}", 200, STALLED_SECONDS)
    mark.with_suffix(".tmp").write_text("0")
    mark.with_suffix(".tmp").rename(mark)


def _name(fault: Fault) -> str:
    if "relayout" in fault:
        return f"relayout {'with' if fault['dies'] else 'without'} a death"
    if "all" in fault:
        return "all workers"
    if "role" in fault:
        return f"{fault['role']} in {fault['point']}"
    return f"{fault['way']} in {fault['point']}" if "way" in fault else str(fault["point"])


def recoveries(folder: Path) -> dict[str, list[float]]:
    """Milliseconds from each fault to the next step finished in a later epoch, by point or role."""
    steps, found = notes(folder, "step"), defaultdict(list)
    for fault in notes(folder, "fault"):
        after = [note["at"] for note in steps if note["at"] > fault["at"] and note["epoch"] > fault["epoch"]]
        found[_name(fault)].append(1e3 * (min(after) - fault["at"]) if after else float("nan"))
    return dict(found)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50, help="lowest number of deaths (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, places and moments (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="lowest number of steps (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=2, help="S (default: %(default)s)")
    parser.add_argument("--slices", type=int, default=1, help="T, tensor parallelism (default: %(default)s)")
    parser.add_argument("--muon", action="store_true", help="update the matrices by Muon, and freeze the rest")
    parser.add_argument("--kills", action="store_true", help="deaths only: no worker is stopped or hangs")
    parser.add_argument("--replicas", type=int, default=3, help="R (default: %(default)s)")
    parser.add_argument("--float32", action="store_true", help="train in float32, and compare with a failure-free run")
    parser.add_argument("--precision", choices=("bf16-mixed", "bf16-true"), help="of the trainer")
    parser.add_argument("--eps", type=float, default=1e-8, help="of AdamW (default: %(default)s)")
    parser.add_argument("--folders", action="store_true", help="write checkpoints as folders, a file for each shard")
    parser.add_argument("--relayout", type=int, default=0, metavar="S", help="another number of shards, by order")
    parser.add_argument("--memory", type=int, default=0, metavar="STEPS", help="between states in the agents' memory")
    parser.add_argument("--only", default="", help="part of the names of the faults to inject, such as 'lock in'")
    parser.add_argument("--compile", metavar="BACKEND", help="compile the blocks with torch.compile")
    parser.add_argument("--keep", type=Path, help="folder for logs and notes (default: a temporary one)")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True)
        run(arguments, arguments.keep)
        return
    with tempfile.TemporaryDirectory(prefix="fsdp-chaos-") as name:
        run(arguments, Path(name))


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Train, judge and print.

    Raises:
        AssertionError: a guarantee does not hold.
    """
    shards, replicas = arguments.shards, arguments.replicas
    chance, other = random.Random(arguments.seed), arguments.relayout
    slices, workers = arguments.slices, shards * arguments.slices * replicas
    options = (arguments.folders, arguments.memory, arguments.kills, arguments.muon)
    drawing = Drawing(shards, slices, workers, other, *options, chance)
    planned = [fault for fault in drawing.schedule(arguments.faults) if arguments.only in _name(fault)]
    for number, fault in enumerate(planned):  # spread over the steps
        fault["from_step"] = 2 + number * arguments.steps // (len(planned) + 1)
    low = arguments.float32 or arguments.precision
    dtype = "float32" if low else "float64"
    settings = {
        "shards": shards,
        "slices": slices,
        "muon": arguments.muon,
        "replicas": replicas,
        "full": workers,
        **TASK,
        "steps": arguments.steps,
        "dtype": dtype,
        "eps": arguments.eps,
        "compile": arguments.compile,
        "precision": arguments.precision,
        "memory": [arguments.memory, 1] if arguments.memory else None,
        "options": {"save_distributed_checkpoint": arguments.folders},
        "configures": arguments.precision is None,  # otherwise sharded with FSDP2's policy
    }
    step, seconds = train(folder / "run", settings, planned)
    assert len(list((folder / "run").glob("final-*.pt"))) == workers and not between_replicas(folder / "run"), "differ"
    kind = f"{', Muon' if arguments.muon else ''}, {arguments.precision or dtype}, seed {arguments.seed}"
    world = f"S={shards}, T={slices}, R={replicas}{kind}"
    print(f"{len(planned)} faults in {step} steps, {world}: {seconds:.0f} s")
    print("no hang, no orphan, no restart but by order or after a death of all; replicas are equal bit by bit")
    limit = LIMITS[dtype]
    if arguments.precision is None:
        reference = alone(folder / "alone", {**settings, "steps": step})
        worst = max(differences(folder / "run", reference).values())
        print(f"largest difference of a parameter from a run in one process: {worst:.1e}")
    if low:
        train(folder / "calm", {**settings, "steps": step}, [])
        worst = against(folder / "run", folder / "calm")
        print(f"from the run of {workers} workers without failures: {worst:.1e}")
    if arguments.float32:
        rounding = max(differences(folder / "calm", reference).values())
        limit = max(limit, 2 * rounding)
        print(f"that run differs from the one in one process by {rounding:.1e}")
    for name, values in sorted(recoveries(folder / "run").items()):
        print(f"{name:<24}{len(values):>4} times, to the next step {statistics.median(values):6.0f} ms (median)")
    assert worst <= limit, f"{worst:.1e} > {limit:.1e}"


def against(folder: Path, other: Path) -> float:
    """The largest difference between the parameters of two runs with the same workers."""
    import torch

    worst = 0.0
    for path in folder.glob("final-*.pt"):
        own, expected = (torch.load(each, weights_only=True) for each in (path, other / path.name))
        assert own["step"] == expected["step"]
        pairs = zip(own["parameters"], expected["parameters"], strict=True)
        worst = max([worst, *(float((a - b).abs().max()) for a, b in pairs if a.numel())])
    return worst


if __name__ == "__main__":
    main()
