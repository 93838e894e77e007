"""Seeded random faults on a task that trains for real, until so many have struck; then everything is accounted for.

Four agents with one worker each train the model of tests/faults/train.py. Faults strike at random times, mostly in a
whole world, sometimes in one that is still healing: a worker is killed (or two at once, or a second one during the
recovery from the first, or the coordinator with it), an agent is killed and replaced, the coordinator is killed, a
worker is stopped and so falls silent. At the end the run must have used every sample exactly once, recomputed nothing
that a survivor had finished, left no process, and its parameters must be those of a run without failures.

    python benchmarks/chaos.py --faults 200 --seed 1
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.cluster import SETTINGS, Cluster, kill, lives
from faults.judge import Reference, check_exact

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
COUNTS = {"two workers": 2, "second in recovery": 2, "worker and coordinator": 2}
"""Faults that a kind stands for, where it is not one."""
STALLED_SECONDS = 30.0
"""No finished step for so long is a hang."""


class Chaos:
    """Strikes a cluster and measures how it heals.

    Args:
        cluster: of `AGENTS` agents.
        seed: decides kinds, victims and moments.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)
        self.faults = 0

    def strike(self) -> None:
        """One kind of fault, once the world is large enough; returns when steps are finished without the victims."""
        kind = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        least = AGENTS if self.random.random() < 0.5 else AGENTS - 1
        self.cluster.watch(lambda: len(self._alive()) >= least, f"a world of {least}", 120, STALLED_SECONDS)
        time.sleep(self.random.uniform(0.0, 0.3))
        # A join may have settled meanwhile, whose world has not finished a step yet.
        world = self.cluster.watch(self._alive, "a whole world", 60, STALLED_SECONDS)
        self.random.shuffle(world)
        started = time.time()
        victims = world[:2] if kind in ("two workers", "second in recovery") else world[:1]
        struck = getattr(self, "_" + kind.replace(" ", "_"))(victims)
        self.counts[kind] += 1
        self.faults += COUNTS.get(kind, 1)
        if struck:
            self._measure(kind, started, [line["pid"] for line in victims])

    def _alive(self) -> list[dict[str, int]]:
        """The newest world's workers, each with its newest step, if all of them live and have their agents."""
        world = self.cluster.world()
        return world if all(lives(line["pid"]) for line in world) and len(world) == _size(world) else []

    def _measure(self, kind: str, started: float, victims: list[int]) -> None:
        """Waits for the first finished step of a world without the victims."""
        before = max(line["epoch"] for line in self.cluster.newest_steps() if line["at"] <= started)

        def healed() -> float:
            steps = [line for line in self.cluster.newest_steps() if line["at"] > started and line["epoch"] > before]
            newest = max((line["epoch"] for line in steps), default=0)
            clean = [line["at"] for line in steps if line["epoch"] == newest and line["pid"] not in victims]
            return min(clean, default=0.0)

        at = self.cluster.watch(healed, f"recovery from {kind}", 60, STALLED_SECONDS)
        self.recoveries[kind].append(1e3 * (at - started))

    # ---- kinds: each returns whether the world changes

    def _worker(self, victims: list[dict[str, int]]) -> bool:
        return kill(victims[0]["pid"])

    def _two_workers(self, victims: list[dict[str, int]]) -> bool:
        struck = [kill(line["pid"]) for line in victims]
        return any(struck)

    def _second_in_recovery(self, victims: list[dict[str, int]]) -> bool:
        first = kill(victims[0]["pid"])
        time.sleep(self.random.uniform(0.0, 0.06))
        return kill(victims[1]["pid"]) or first

    def _agent(self, victims: list[dict[str, int]]) -> bool:
        node = str(victims[0]["node"])
        self.cluster.agents[node].kill()
        time.sleep(self.random.uniform(0.0, 1.0))
        self.cluster.replace(node)
        return True

    def _coordinator(self, victims: list[dict[str, int]]) -> bool:
        pid = self.cluster.coordinator()
        if pid is not None:
            kill(pid)
        return False

    def _worker_and_coordinator(self, victims: list[dict[str, int]]) -> bool:
        self._coordinator(victims)
        time.sleep(self.random.choice([0.0, 0.02, 0.2]))
        return kill(victims[0]["pid"])

    def _stop(self, victims: list[dict[str, int]]) -> bool:
        return kill(victims[0]["pid"], signal.SIGSTOP)


def _size(world: list[dict[str, int]]) -> int:
    return world[0]["world"] if world else -1


def table(chaos: Chaos) -> str:
    """Faults by kind with their recovery times: from the strike to the next step finished without the victims."""
    lines = [f"{'fault':<24}{'times':>6}{'median ms':>11}{'p99 ms':>9}{'max ms':>9}"]
    every = [value for values in chaos.recoveries.values() for value in values]
    rows = [(kind, chaos.counts[kind], chaos.recoveries[kind]) for kind in WEIGHTS if chaos.counts[kind]]
    for kind, count, values in [*rows, ("all that change the world", len(every), every)]:
        figures = f"{'-':>11}{'-':>9}{'-':>9}"
        if values:
            ordered = sorted(values)
            p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
            figures = f"{statistics.median(ordered):>11.0f}{p99:>9.0f}{ordered[-1]:>9.0f}"
        lines.append(f"{kind:<24}{count:>6}{figures}")
    return "\n".join(lines)


def run(faults: int, seed: int, folder: Path) -> None:
    """The whole run; raises AssertionError for whatever does not hold."""
    started = time.monotonic()
    (run_folder := folder / "run").mkdir()
    with Cluster(run_folder, agents=AGENTS, nodes=f"1:{AGENTS}", conf="worker_timeout=3", settings=SHAPE) as cluster:
        chaos = Chaos(cluster, seed)
        cluster.wait_world(AGENTS, seconds=90)
        while chaos.faults < faults:
            chaos.strike()
            if sum(chaos.counts.values()) % 10 == 0:
                minutes = (time.monotonic() - started) / 60
                step = max(line["step"] for line in cluster.world())
                print(f"{minutes:5.1f} min  {chaos.faults} faults, step {step}", flush=True)
        cluster.wait_world(AGENTS, after=time.time(), seconds=90)
        cluster.finish(120)
        restarts = len(cluster.events("task_restarts"))
        assert restarts == 0, "somebody always survived, so nothing may go back to a checkpoint"
    print(f"healed after {(time.monotonic() - started) / 60:.1f} min; now the run without failures", flush=True)
    epochs = cluster.notes("end")[0]["data_epoch"]
    reference = Reference(folder / "reference", {**SETTINGS, **SHAPE}, epochs)
    worst = check_exact(run_folder, reference, workers=AGENTS)
    print(table(chaos))
    print(
        f"{chaos.faults} faults in {len(reference.steps(epochs))} steps, seed {seed}: all healed, no orphans, no hangs"
    )
    print("samples lost: 0, used twice: 0, micro-batches of survivors recomputed: 0")
    print(", ".join(f"{kind} differ by {value:.1e}" for kind, value in worst.items()) + " (float64)")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="until so many have struck (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, victims and moments (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for logs and notes (default: a temporary one)")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True)
        run(arguments.faults, arguments.seed, arguments.keep)
        return
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        run(arguments.faults, arguments.seed, Path(folder))


if __name__ == "__main__":
    main()
