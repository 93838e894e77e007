"""Measure the simulator's time and memory: one policy on one trace, at several sizes.

    python benchmarks/simulator_speed.py [--policy unicron] [--only SIZE ...] [--cell N]

Each size runs in its own process: 128 workers with six tasks for 56 days; 16,384 with one for Llama 3's 54 days, half
of the faults with repairs; the preset ``experiment=llama3``, 16,384 workers and 1,024 spare ones; 100,000 workers with
256 tasks for 30 days. Every node is a place of its own, unless ``--cell`` is given. CPU and wall seconds cover the
simulation alone; imports and numba's compiled code are loaded before. Memory is the process's peak, imports included.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unicron_lightning.planner.performance.model import SublinearModel
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.settings import POLICIES, simulate
from unicron_lightning.simulate.trace import SimCluster, SimTask, Trace, TraceFault
from unicron_lightning.terms import Terms

sys.path.append(str(Path(__file__).parent / "experiments"))
from experiment_cases import composed

DAY = 86400.0
NODE_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class Size:
    """A cluster, its tasks and its duration. Faults are as frequent as Llama 3's: 419 in 54 days on 16,384."""

    nodes: int
    tasks: int
    days: float
    often: float = 1.0
    cell: int = 1
    preset: tuple[str, ...] = ()
    """Settings as on the command line, which replace all other fields but ``cell``."""

    @property
    def faults(self) -> int:
        """Number of faults."""
        return round(self.often * 419 * (self.days / 54) * (self.nodes * NODE_WORKERS / 16384))


SIZES = {
    "128x6": Size(nodes=16, tasks=6, days=56, often=20.0),
    "16384x1": Size(nodes=2048, tasks=1, days=54),
    "llama3": Size(nodes=2176, tasks=1, days=54, preset=("experiment=llama3",)),
    "100000x256": Size(nodes=12_500, tasks=256, days=30),
}
COSTS = Costs(
    system="any",
    detection={"default": 2.0},
    change={
        "continue": 2.0,
        "join": 2.0,
        "leave": 1.0,
        "start": 60.0,
        "restart": 1380.0,
        "reattempt": 1.0,
        "migrate": 60.0,
    },
    memory_checkpoint_interval=60.0,
)


def tasks_of(size: Size) -> list[SimTask]:
    """Tasks with equal shares: at least half and at most twice a share each."""
    share = size.nodes // size.tasks // size.cell * size.cell * NODE_WORKERS
    return [
        SimTask(
            name=f"task{number:03d}",
            performance=SublinearModel(rate=4e14, exponent=0.97),
            flops_per_step=4e14 * share * 5.0,
            terms=Terms(
                weight=1.0 + number % 3,
                min_workers=max(NODE_WORKERS, share // 2),
                max_workers=2 * share if size.tasks > 1 else None,
            ),
        )
        for number in range(size.tasks)
    ]


def trace_of(size: Size) -> Trace:
    """A random trace in which half of the faults need a repair of up to two days."""
    chance = random.Random(1)
    faults = []
    for _ in range(size.faults):
        at, node = chance.uniform(0, size.days * DAY), chance.randrange(size.nodes)
        if chance.random() < 0.5:
            faults.append(TraceFault(at=at, kind="ecc_error", node=node, repair=chance.uniform(0.1, 2.0) * DAY))
        else:
            faults.append(TraceFault(at=at, kind="exited_abnormally", node=node, worker=0))
    return Trace.of("speed", size.days * DAY, faults)


def warm_up(policy: str) -> None:
    """Import and load everything."""
    size = Size(nodes=4, tasks=2, days=1, often=500)
    simulate(policy, SimCluster(num_nodes=4, workers_per_node=8), tasks_of(size), trace_of(size), COSTS)


def measure(policy: str, size: Size) -> dict[str, Any]:
    """Measure in this process."""
    warm_up(policy)
    if size.preset:
        settings = replace(composed((*size.preset, f"cluster.cell={size.cell}")), policy=policy)
        _, _, trace = settings.scene()
        run = settings.run
    else:
        cluster = SimCluster(num_nodes=size.nodes, workers_per_node=NODE_WORKERS, cell=size.cell)
        tasks, trace = tasks_of(size), trace_of(size)
        run = partial(simulate, policy, cluster, tasks, trace, COSTS)
    cpu, wall = time.process_time(), time.perf_counter()
    result = run()
    return {
        "faults": len(trace.faults),
        "cell": size.cell,
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "of_ideal": round(result.of_ideal, 5),
    }


def main() -> None:
    """Measure each size in its own process and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default="unicron")
    parser.add_argument("--only", nargs="*", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--cell", type=int, help="nodes that are allocated together (default: the size's own)")
    parser.add_argument("--here", action="store_true", help="measure in this process, not a new one")
    arguments = parser.parse_args()
    for name in arguments.only:
        size = SIZES[name]
        if arguments.cell is not None:
            size = replace(size, cell=arguments.cell)
        if arguments.here:
            print(json.dumps(measure(arguments.policy, size)))
            continue
        command = [sys.executable, __file__, "--here", "--only", name, "--policy", arguments.policy]
        command += ["--cell", str(size.cell)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"{name} {arguments.policy}: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
