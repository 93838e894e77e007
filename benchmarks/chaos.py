"""Inject seeded random faults into a real training until enough have struck, then verify the result.

Four agents with one worker each train the model of tests/system/train.py. Faults strike at random times, mostly in a
complete world, sometimes during a recovery: a worker is killed (or two at once, or a second one during the recovery
from the first, or the coordinator with it), an agent is killed and replaced, the coordinator is killed, or a worker is
stopped and thus sends no more heartbeats. At the end the run must have used every sample exactly once, recomputed none
of the survivors' finished micro-batches and left no process; its parameters must equal those of a failure-free run.

    python benchmarks/chaos.py --faults 200 --seed 1
    python benchmarks/chaos.py --faults 100 --seed 20 --memory 4 --all-die 0.3

With --memory the callback MemoryCheckpoint keeps the state in the agents' memory, and some strikes kill all workers at
once: the task must resume from there, with at most as many steps lost.

Each strike is printed as a line of JSON: the faults as sentences of docs/faults.md, the number of workers required
before it, and the delay before a killed agent is replaced. To repeat the printed strikes of a run:

    python benchmarks/chaos.py --replay strikes.jsonl
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system.cluster import SETTINGS, Cluster, Note
from system.judge import Reference, check_exact

from unicron_lightning.errors import UnicronError
from unicron_lightning.faults.fault import Fault, Faults, Kind, text
from unicron_lightning.local_cluster.processes import kill, lives, until

AGENTS = 4
SHAPE = {"nodes": AGENTS, "full": AGENTS, "pace": 0.02, "slow": 0.04}
WEIGHTS = {
    "worker": 8,
    "two workers": 3,
    "second in recovery": 3,
    "agent": 3,
    "coordinator": 2,
    "worker and coordinator": 2,
    "stop": 2,
}
ALL: Final = "all workers"
"""A further kind of strike, with states in the agents' memory."""
STALLED_SECONDS = 30.0
"""Time without a finished step that counts as a hang; with the others, it is multiplied by ``--patience``."""
DEAD_SECONDS: Final = 5.0
"""Time allowed for the exit of a killed process; agents are slow on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run.

    Attributes:
        faults: lowest number of faults.
        seed: decides kinds, victims and moments.
        memory: steps between states in the agents' memory; 0 for none.
        all_die: share of the strikes that kill all workers, with ``memory``.
        patience: factor of all limits of time.
        replay: lines of an earlier run, whose strikes are repeated.
    """

    faults: int
    seed: int
    memory: int
    all_die: float
    patience: float
    replay: Path | None


@dataclass(frozen=True, kw_only=True)
class Strike:
    """Faults that strike together, once the world is large enough.

    Attributes:
        kind: one of `WEIGHTS`; used by the table only.
        world: number of workers required before the strike, including those on the named nodes.
        faults: sentences; ``after=`` counts from the moment at which the world is large enough.
        back: seconds between the last fault and the replacement of a killed agent.
    """

    kind: str
    world: int
    faults: list[str]
    back: float = 0.0

    @property
    def nodes(self) -> set[str]:
        """Nodes whose workers or agents are struck."""
        return {fault.node for fault in Faults(self.faults) if fault.node is not None}


def draw(kind: str, nodes: Sequence[str], chance: random.Random) -> list[str]:
    """Sentences for a strike of a kind on the first of the nodes."""
    one, other, *_ = nodes
    start = chance.uniform(0.001, 0.3)

    def fault(kind: Kind, node: str | None = None, later: float = 0.0) -> Fault:
        return Fault(kind=kind, node=node, after=round(start + later, 3))

    match kind:
        case "worker":
            faults = [fault("kill", one)]
        case "two workers":
            faults = [fault("kill", one), fault("kill", other)]
        case "all workers":
            faults = [fault("kill", node) for node in nodes]
        case "second in recovery":
            faults = [fault("kill", one), fault("kill", other, chance.uniform(0.0, 0.06))]
        case "agent":
            faults = [fault("kill agent", one)]
        case "coordinator":
            faults = [fault("kill coordinator")]
        case "worker and coordinator":
            later = chance.choice([0.0, 0.02, 0.2])
            faults = [fault("kill coordinator"), fault("kill", one, later)]
        case _:
            faults = [fault("stop", one)]
    return [text(each) for each in faults]


class Chaos:
    """Strikes a cluster and measures its recoveries.

    Args:
        cluster: of `AGENTS` agents.
        plan: of the run.
    """

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self._patience = plan.patience
        all_die = plan.all_die if plan.memory else 0.0
        self.weights = {**WEIGHTS, ALL: sum(WEIGHTS.values()) * all_die / (1 - all_die)}
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)
        self.faults = 0

    def drawn(self, faults: int, seed: int) -> Iterator[Strike]:
        """Draw random strikes on present nodes until enough faults have struck.

        Args:
            faults: lowest number of faults.
            seed: decides kinds, victims and moments; the nodes present also depend on how fast earlier faults were
                recovered.
        """
        chance = random.Random(seed)
        while self.faults < faults:
            kind = chance.choices(list(self.weights), list(self.weights.values()))[0]
            least = AGENTS if chance.random() < 0.5 or kind == ALL else AGENTS - 1
            nodes = sorted(str(line["node"]) for line in self._wait(least))
            chance.shuffle(nodes)
            back = round(chance.uniform(0.0, 1.0), 3) if kind == "agent" else 0.0
            yield Strike(kind=kind, world=least, faults=draw(kind, nodes, chance), back=back)

    def strike(self, strike: Strike) -> None:
        """Strike once the world is large enough; return when steps are finished without the victims."""
        victims = {str(line["node"]): line for line in self._wait(strike.world, strike.nodes)}
        began = time.monotonic()
        struck = 0.0
        for fault in Faults(strike.faults):
            time.sleep(max(0.0, began + (fault.after or 0.0) - time.monotonic()))
            struck = struck or time.time()
            self._carry_out(fault, victims)
        self.counts[strike.kind] += 1
        self.faults += len(strike.faults)
        for fault in Faults(strike.faults):
            if fault.kind == "kill agent" and fault.node is not None:
                time.sleep(strike.back)
                self.cluster.replace(fault.node)
        if strike.nodes:
            self._measure(strike.kind, struck, [victims[node]["pid"] for node in strike.nodes])

    def _wait(self, least: int, nodes: Collection[str] = ()) -> list[Note]:
        """Wait for a world of at least ``least`` workers that includes the given nodes; return its workers' newest
        steps.
        """

        def there() -> list[Note]:
            world = self._alive()
            fits = len(world) >= least and set(nodes) <= {line["node"] for line in world}
            return world if fits else []

        return list(
            self.cluster.watch(
                there,
                f"a world of {least} with {sorted(nodes)}",
                120 * self._patience,
                STALLED_SECONDS * self._patience,
            )
        )

    def _alive(self) -> list[Note]:
        """Newest step of each worker of the newest world; empty unless all workers and their agents are alive."""
        world = self.cluster.world()
        return world if all(lives(line["pid"]) for line in world) and len(world) == _size(world) else []

    def _measure(self, kind: str, started: float, victims: list[int]) -> None:
        """Wait for the first finished step of a world without the victims.

        After a death of all it is one that was not finished before: deaths at the same step again and again end a task.
        """
        before = max(line["epoch"] for line in self.cluster.newest_steps() if line["at"] <= started)

        def healed() -> float:
            known = self.cluster.newest_steps()
            done = [line["step"] for line in known if line["pid"] in victims] if kind == ALL else []
            steps = [line for line in known if line["at"] > started and line["epoch"] > before]
            newest = max((line["epoch"] for line in steps), default=0)
            clean = [line for line in steps if line["epoch"] == newest and line["pid"] not in victims]
            return min((line["at"] for line in clean if line["step"] > max(done, default=-1)), default=0.0)

        at = self.cluster.watch(healed, f"recovery from {kind}", 60 * self._patience, STALLED_SECONDS * self._patience)
        self.recoveries[kind].append(1e3 * (at - started))

    def _carry_out(self, fault: Fault, victims: dict[str, Note]) -> None:
        """Order the fault from the coordinator as `unicron inject` does; send the signal directly if no coordinator
        answers.
        """
        coordinator = self.cluster.coordinator()
        try:
            self.cluster.inject(text(replace(fault, after=None)))
            ordered = True
        except UnicronError:  # the coordinator is down, or the victim's agent has not reconnected yet
            ordered = False
        if fault.kind == "kill coordinator":
            if coordinator is not None and ordered:
                until("the coordinator's end", lambda: not lives(coordinator), DEAD_SECONDS * self._patience)
            elif coordinator is not None:
                kill(coordinator, fault.signal)
        elif not ordered:
            assert fault.node is not None
            if fault.kind == "kill agent":
                kill(self.cluster.agents[fault.node].pid, fault.signal)
            else:
                kill(victims[fault.node]["pid"], fault.signal if fault.kind == "kill" else signal.SIGSTOP)


def _size(world: list[dict[str, int]]) -> int:
    return world[0]["world"] if world else -1


def table(chaos: Chaos) -> str:
    """Faults by kind with their recovery times: from the strike to the next step finished without the victims."""
    lines = [f"{'fault':<24}{'times':>6}{'median ms':>11}{'p99 ms':>9}{'max ms':>9}"]
    every = [value for values in chaos.recoveries.values() for value in values]
    rows = [(kind, chaos.counts[kind], chaos.recoveries[kind]) for kind in chaos.weights if chaos.counts[kind]]
    for kind, count, values in [*rows, ("all that change the world", len(every), every)]:
        figures = f"{'-':>11}{'-':>9}{'-':>9}"
        if values:
            ordered = sorted(values)
            p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
            figures = f"{statistics.median(ordered):>11.0f}{p99:>9.0f}{ordered[-1]:>9.0f}"
        lines.append(f"{kind:<24}{count:>6}{figures}")
    return "\n".join(lines)


def check_restarts(cluster: Cluster, every: int) -> str:
    """Check that a task restarts only if all workers die, and then from memory, unless the newest checkpoint is newer.

    Returns:
        A line about it.
    """
    restarts = cluster.events("task_restarts")
    restored = [event for event in cluster.events("worker.state_restored") if event["tier"] != "peer"]
    steps = cluster.notes("step")
    lost = []
    for event in restored:
        before = [line["step"] for line in steps if line["at"] < event["at"]]
        lost.append(1 + max(before) - event["step"])
    assert every or not restarts, "a worker always survived, so no task may restart from a checkpoint"
    tiers = [event["tier"] for event in restored]
    assert tiers == ["disk" if each["memory"] is None else "memory" for each in restarts], (restarts, restored)
    assert all(number <= every for number in lost), lost
    return f"{len(restarts)} restarts, {tiers.count('memory')} from memory; steps lost: {lost}"


def run(plan: Plan, folder: Path) -> None:
    """Run everything.

    Raises:
        AssertionError: a guarantee does not hold.
    """
    replayed, every, patience = plan.replay, plan.memory, plan.patience
    lines = [] if replayed is None else replayed.read_bytes().splitlines()
    repeated = [msgspec.json.decode(line, type=Strike) for line in lines if line.startswith(b"{")]
    if replayed is not None and not repeated:
        raise SystemExit(f"--replay {replayed}: expected lines of JSON that an earlier run has printed, found none")
    started = time.monotonic()
    (run_folder := folder / "run").mkdir()
    conf = "worker_timeout=3,allow_injection=true"
    settings = {**SHAPE, "memory": [every, 1] if every else None}
    with Cluster(run_folder, agents=AGENTS, nodes=f"1:{AGENTS}", conf=conf, settings=settings) as cluster:
        chaos = Chaos(cluster, plan)
        cluster.wait_world(AGENTS, seconds=90 * patience)
        for strike in repeated or chaos.drawn(plan.faults, plan.seed):
            print(msgspec.json.encode(asdict(strike)).decode(), flush=True)
            chaos.strike(strike)
            if sum(chaos.counts.values()) % 10 == 0:
                minutes = (time.monotonic() - started) / 60
                step = max(line["step"] for line in cluster.world())
                print(f"{minutes:5.1f} min  {chaos.faults} faults, step {step}", flush=True)
        cluster.wait_world(AGENTS, after=time.time(), seconds=90 * patience)
        cluster.finish(120 * patience)
        print(check_restarts(cluster, every))
    print(f"healed after {(time.monotonic() - started) / 60:.1f} min; now the run without failures", flush=True)
    epochs = cluster.notes("end")[0]["data_epoch"]
    reference = Reference(folder / "reference", {**SETTINGS, **SHAPE}, epochs)
    worst = check_exact(run_folder, reference, workers=AGENTS)
    print(table(chaos))
    print(
        f"{chaos.faults} faults in {len(reference.steps(epochs))} steps, {replayed or f'seed {plan.seed}'}: "
        "all healed, no orphans, no hangs"
    )
    print("samples lost: 0, used twice: 0, micro-batches of survivors recomputed: 0")
    print(", ".join(f"{kind} differ by {value:.1e}" for kind, value in worst.items()) + " (float64)")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="lowest number of faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of kinds, victims and moments (default: %(default)s)")
    parser.add_argument("--memory", type=int, default=0, metavar="STEPS", help="between states in the agents' memory")
    parser.add_argument("--all-die", type=float, default=0.18, metavar="SHARE", help="of the strikes, with --memory")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all limits of time, for a busy machine")
    parser.add_argument("--replay", type=Path, help="printed lines of an earlier run, whose strikes are repeated")
    parser.add_argument("--keep", type=Path, help="folder for logs and notes (default: a temporary one)")
    arguments = parser.parse_args()
    keep = arguments.keep
    plan = Plan(**{name: value for name, value in vars(arguments).items() if name != "keep"})
    if not 0 <= plan.all_die < 1:
        raise SystemExit(f"--all-die {plan.all_die}: expected a share from 0 to below 1")
    if keep is not None:
        keep.mkdir(parents=True)
        run(plan, keep)
        return
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        run(plan, Path(folder))


if __name__ == "__main__":
    main()
