"""Measure the planner: one plan, its places, all plans for possible next events, an explanation, and a look-up.

    python benchmarks/planner.py [--sizes small medium large] [--shapes ...] [--runs 5] [--plain] [--json FILE]

Every size runs in its own process, so that its peak memory is its own, on one thread. Compilation happens beforehand on
a small case. Curves of F(t,x) are also made beforehand, since they are made once per task, not per plan.

*cold*: no task has workers yet. *loss*: a plan is in force and a node of the largest task fails. *table*: the table of
that state; *places*: the plan after the loss placed on nodes, where a unit is a node. ``--plain`` times a compiled but
otherwise unchanged version of the paper's recursion for comparison. Of ``two-kinds``, with two kinds of workers, only
plans are measured; its table has the proven distance from the best plan, 0 if the search came to its end.

Times are medians with the smallest and the largest of the process's CPU time. The planner never waits, so a clock on a
free core would show the same; the actual ratio is stated below the table, with the load.

The shapes: `concave` saturates at about a task's fair share, so that all tasks have workers; `stairs` is the same in
steps, with bumps; `rising` and `wild` are random numbers, sorted and unsorted; `linear` is one straight line for all
tasks, so that all plans are equally good; `holes` is the same where only a random half of the sizes can run, in round
numbers. Its ties are excluded by no bound and shortened by no concavity: the worst case known.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from measure import Figures

from unicron_lightning.planner.fleet import Fleet, solve_fleet
from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.placement import Demand, NodeCapacity, Placement, place
from unicron_lightning.planner.reward import Curve, PlanTask
from unicron_lightning.planner.search.exact import Columns
from unicron_lightning.planner.solver import PlanTable, columns_of, explain, solve
from unicron_lightning.planner.state import ClusterState, TaskFinished, move_price
from unicron_lightning.terms import Terms

SIZES = {"small": (128, 6, 1), "medium": (2048, 64, 1), "two-kinds": (2048, 64, 1), "large": (12_500, 256, 8)}
"""Units, tasks, workers per unit; of ``two-kinds`` half of the units are of each kind."""

TARGETS = {
    "small": {"solve_s": 1e-3, "table_s": 10e-3, "look_up_s": 10e-6, "peak_mb": 2000},
    "medium": {"solve_s": 60e-3, "table_s": 1.0, "look_up_s": 10e-6, "peak_mb": 2000},
    "two-kinds": {"solve_s": 1.0, "peak_mb": 2000},
    "large": {"solve_s": 1.0, "table_s": 30.0, "look_up_s": 10e-6, "peak_mb": 2000},
}
SHAPES = ("concave", "stairs", "rising", "wild", "linear", "holes")
WORKER_SECONDS_PER_FAILURE = 1.5e8
"""Chosen value: one failure in 25 minutes on 100,000 accelerators."""


@dataclasses.dataclass(frozen=True)
class Given:
    """T(t,x) as a given table of numbers."""

    flops: np.ndarray
    unit: int

    def throughput(self, num_workers: int) -> float:
        return float(self.flops[num_workers // self.unit])

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        return None

    def uncertainty(self, num_workers: int) -> float:
        return 0.0


def shape(kind: str, num_units: int, fair: float, random: np.random.Generator) -> np.ndarray:
    """T(t,x) at 0 to ``num_units`` units."""
    x = np.arange(num_units + 1.0)
    scale = 2e14 * random.uniform(0.5, 2.0)
    bend = fair * random.uniform(0.5, 4.0)
    step = int(random.choice([1, 2, 4, 8, 16]))
    if kind == "concave":
        return scale * x / (1 + x / bend)
    if kind == "stairs":
        whole = x // step * step
        return scale * whole / (1 + whole / bend) * random.uniform(0.9, 1.0, len(x))
    if kind == "rising":
        return scale * num_units * np.sort(np.append(0.0, random.random(num_units)))
    if kind == "wild":
        return scale * num_units * np.append(0.0, random.random(num_units))
    if kind == "linear":
        return 2e14 * x
    return 2.0**47 * x * (random.random(len(x)) < 0.5)


def situation(kind: str, size: str) -> ClusterState:
    """A state without workers for any task."""
    num_units, num_tasks, unit = SIZES[size]
    random = np.random.default_rng(1)
    same = kind in ("linear", "holes")
    curves = []
    for number in range(num_tasks):
        task = PlanTask(
            name=f"task{number:03}",
            performance=Given(shape(kind, num_units + 1, num_units / num_tasks, random), unit),
            transition_seconds=float(random.choice([30.0, 60.0, 120.0])),
            terms=Terms(weight=1.0 if same else float(random.choice([0.5, 1.0, 2.0, 3.0]))),
        )
        curves.append(Curve.of(task, unit, (num_units + 1) * unit))
    return ClusterState(
        tasks=tuple(curves),
        num_workers=num_units * unit,
        unit=unit,
        running_seconds=1024.0 if kind == "holes" else lambda n: WORKER_SECONDS_PER_FAILURE / n,
    )


def two_kinds(kind: str) -> Fleet:
    """A fleet without workers for any task; the second kind is about twice as fast, by another factor for each task."""
    num_units, num_tasks, unit = SIZES["two-kinds"]
    random, each = np.random.default_rng(1), num_units // 2
    curves: tuple[list[Curve], list[Curve]] = ([], [])
    same = kind in ("linear", "holes")
    for number in range(num_tasks):
        weight = 1.0 if same else float(random.choice([0.5, 1.0, 2.0, 3.0]))
        seconds = float(random.choice([30.0, 60.0, 120.0]))
        for speed, own in zip((1.0, 2.0), curves, strict=True):
            flops = speed * shape(kind, each + 1, num_units / num_tasks, random)
            task = PlanTask(
                name=f"task{number:03}",
                performance=Given(flops, unit),
                transition_seconds=seconds,
                relayout_seconds=60.0,
                terms=Terms(weight=weight),
            )
            own.append(Curve.of(task, unit, each + 1))
    kinds = {
        name: ClusterState(tasks=tuple(own), num_workers=each, running_seconds=1.0)
        for name, own in zip(("a", "b"), curves, strict=True)
    }
    seconds_of = 1024.0 if kind == "holes" else lambda n: WORKER_SECONDS_PER_FAILURE / n
    return Fleet(kinds=kinds, running_seconds=seconds_of)


def measure_two_kinds(kind: str, runs: int) -> dict[str, Any]:
    """A plan of two kinds from nothing, and one after the loss of a worker."""
    cold = two_kinds(kind)
    first = solve_fleet(cold)
    running = cold.adopt(first)
    held = running.kinds["b"].allocation
    loss = running.kinds["b"].loss_of(max(held, key=held.__getitem__))
    assert loss is not None
    shocked = running.after(loss, "b")
    gaps = [plan.gap_flop / plan.value for plan in (first, solve_fleet(shocked))]
    return {
        "plans": f"gap {max(gaps):.1e}",
        "solve_s": times(lambda: solve_fleet(shocked), runs),
        "cold_s": times(lambda: solve_fleet(cold), runs),
    }


STRETCH: list[float] = []
"""Ratio of clock time to CPU time for each run of at least a millisecond."""


def times(work: Callable[[], object], runs: int, limit: float = 20.0) -> list[float]:
    """CPU seconds of each run; fewer runs if their sum exceeds ``limit``."""
    found: list[float] = []
    while len(found) < runs and sum(found) < limit:
        clock, start = time.perf_counter(), time.process_time()
        work()
        found.append(time.process_time() - start)
        if found[-1] > 1e-3:
            STRETCH.append((time.perf_counter() - clock) / found[-1])
    return found


@numba.njit
def plain(starts: np.ndarray, units: np.ndarray, keys: np.ndarray, num_units: int) -> int:
    """The paper's recursion over all options, values only."""
    best = np.zeros(num_units + 1, dtype=np.int64)
    for task in range(len(starts) - 1):
        new = np.full(num_units + 1, -(1 << 62))
        for n in range(starts[task], starts[task + 1]):
            for j in range(units[n], num_units + 1):
                new[j] = max(new[j], best[j - units[n]] + keys[n])
        best = new
    return best[num_units]


def measure(kind: str, size: str, runs: int, with_plain: bool) -> dict[str, Any]:
    """All figures of one shape and size, as lists of seconds."""
    cold = situation(kind, size)
    running = cold.adopt(solve(cold).allocation)
    largest = max(running.allocation, key=running.allocation.__getitem__)
    loss = running.loss_of(largest)
    assert loss is not None
    shocked = running.after(loss)
    table = PlanTable.of(running)
    plan = table.look_up(running, loss)
    assert plan == solve(shocked)
    event = TaskFinished(task=largest)
    looked_up = [_look_up(table, running, event) for _ in range(runs)]
    figures = {
        "plans": len(table.plans),
        "solve_s": times(lambda: solve(shocked), runs),
        "cold_s": times(lambda: solve(cold), runs),
        "place_s": times(placing(running, plan.allocation), runs),
        "table_s": times(lambda: PlanTable.of(running), runs),
        "explain_s": times(lambda: explain(plan), runs),
        "look_up_s": looked_up,
    }
    if with_plain:
        columns = Columns.join(columns_of(shocked, (), move_price(shocked)))
        arguments = (columns.starts, columns.units, columns.keys, shocked.num_workers // shocked.unit)
        figures["plain_s"] = times(lambda: plain(*arguments), runs, limit=1.0)
    return figures


def placing(running: ClusterState, after: Mapping[str, int]) -> Callable[[], Placement]:
    """The placement of a plan on the nodes that remain when one fails, where the tasks ran before."""
    nodes = [
        NodeCapacity(name=f"n{number:05}", num_accelerators=running.unit)
        for number in range(running.num_workers // running.unit)
    ]
    before = place(nodes, [Demand(task=t, num_workers=n) for t, n in running.allocation.items()], {}).accelerators
    failed = dataclasses.replace(nodes[0], state="failed")
    demands = [Demand(task=task, num_workers=number) for task, number in after.items()]
    return lambda: place([failed, *nodes[1:]], demands, before)


def _look_up(table: PlanTable, state: ClusterState, event: TaskFinished, count: int = 10_000) -> float:
    start = time.process_time()
    for _ in range(count):
        table.look_up(state, event)
    return (time.process_time() - start) / count


def measure_size(size: str, shapes: Sequence[str], runs: int, with_plain: bool) -> list[Figures]:
    """All shapes of a size, in this process."""
    start = time.perf_counter()
    for kind in ("concave", "linear"):
        measure(kind, "small", 1, True)
    compiled = time.perf_counter() - start
    results: list[Figures] = []
    for kind in shapes:
        found = measure_two_kinds(kind, runs) if size == "two-kinds" else measure(kind, size, runs, with_plain)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        stretch = statistics.median(STRETCH) if STRETCH else 1.0
        results.append(
            {"size": size, "shape": kind, "warm_up_s": compiled, "peak_mb": peak, **found, "stretch": stretch}
        )
    return results


def summary(seconds: Sequence[float] | None) -> str:
    """Median [smallest-largest], in a suitable unit."""
    if not seconds:
        return "-"
    middle = statistics.median(seconds)
    factor, unit = (1.0, "s") if middle >= 1 else (1e3, "ms") if middle >= 1e-4 else (1e6, "µs")
    low, high = min(seconds) * factor, max(seconds) * factor
    return f"{middle * factor:.3g} [{low:.3g}-{high:.3g}] {unit}"


def report(results: Sequence[Figures]) -> str:
    """The figures as a Markdown table, followed by missed targets."""
    columns = ("solve_s", "cold_s", "place_s", "table_s", "explain_s", "look_up_s", "plain_s")
    names = ("loss", "cold", "places", "table", "explanation", "look-up", "plain recursion")
    lines = [
        f"| units x tasks | shape | plans | {' | '.join(names)} | peak |",
        f"|---|---|---|{'---|' * len(names)}---|",
    ]
    missed = []
    for r in results:
        num_units, num_tasks, _ = SIZES[r["size"]]
        cells = " | ".join(summary(r.get(column)) for column in columns)
        lines.append(f"| {num_units} x {num_tasks} | {r['shape']} | {r['plans']} | {cells} | {r['peak_mb']:.0f} MB |")
        for name, most in TARGETS[r["size"]].items():
            worst = r[name] if name == "peak_mb" else statistics.median(r[name])
            if name == "solve_s":
                worst = max(worst, statistics.median(r["cold_s"]))
            if worst >= most:
                missed.append(f"- {num_units} x {num_tasks}, {r['shape']}: {name} {worst:.3g}, target below {most:g}")
    stretch = statistics.median(r["stretch"] for r in results)
    load = f"Clock time was {stretch:.1f} times CPU time (median); load average {os.getloadavg()[0]:.1f}."
    warm_up = f"Warm-up, compiling included where the cache was empty: {max(r['warm_up_s'] for r in results):.1f} s."
    return "\n".join([*lines, "", load, warm_up, "Missed targets:" if missed else "All targets are met.", *missed])


def main() -> None:
    """Measure each size in its own process and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="time the plain recursion as well")
    parser.add_argument("--json", metavar="FILE", help="write every run's figures")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure_size(options.sizes[0], options.shapes, options.runs, options.plain)))
        return
    results: list[Figures] = []
    for size in options.sizes:
        command = [sys.executable, __file__, "--inside", "--sizes", size, "--shapes", *options.shapes]
        command += ["--runs", str(options.runs), *(["--plain"] if options.plain else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        results += json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))


if __name__ == "__main__":
    main()
