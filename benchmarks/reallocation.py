"""What it takes to move nodes between tasks: two tasks share six nodes; a node dies, returns, and tasks are resized.

    python benchmarks/reallocation.py [--runs 5]

A micro-batch sleeps for 40 ms in the place of an accelerator's work. Per run: the node of one task's worker is killed
with all that runs there, and started again; then the other task is resized to one node less and back. All times are by
one machine's clock: those of steps from the workers' diaries, those of decisions from the coordinator's event log.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from measure import Figures

from unicron_lightning.demo.nodes import Line, Nodes

LIMITS = {"heavy": (2.0, 2), "light": (1.0, 1)}
"""Weight, and fewest nodes."""
TRAIN = ["-m", "unicron_lightning.demo.train", "--nodes", "4", "--accumulate", "3", "--steps-per-epoch", "4000"]
AROUND = 4.0
"""Seconds around a change in which the longest time without a step is looked for."""


def wait_worlds(nodes: Nodes, **worlds: int) -> None:
    """Until each task trains with so many workers."""
    since = time.time()
    for task, size in worlds.items():
        nodes.until(partial(_trains, nodes, task, size, since), f"{task} with {size} workers", 300.0)


def _trains(nodes: Nodes, task: str, size: int, since: float) -> bool:
    return nodes.world(task, since) == size


def _over(nodes: Nodes, task: str) -> bool:
    return nodes.state_of(task) == "succeeded"


def usual_step(nodes: Nodes, task: str, before: float) -> float:
    """Median time between the task's steps in the seconds before a moment."""
    ends = [line["at"] for line in nodes.steps(task) if before - AROUND < line["at"] <= before]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def stand(nodes: Nodes, task: str, start: float) -> float:
    """Longest time without a step of the task from a moment on."""
    ends = [line["at"] for line in nodes.steps(task) if start < line["at"] <= start + AROUND]
    inside = [start, *ends, start + AROUND]
    return max(later - earlier for earlier, later in itertools.pairwise(inside))


def lose_a_node(nodes: Nodes) -> Figures:
    """A node of the heavy task dies and returns."""
    time.sleep(AROUND)
    victim = nodes.nodes_of("heavy")[-1]
    at = nodes.kill_node(victim)
    time.sleep(AROUND + 1)
    usual = {task: usual_step(nodes, task, at) for task in LIMITS}
    lost = [
        event["at"] for event in nodes.events() if event["name"] in ("agent_lost", "node_lost") and event["at"] > at
    ]
    (plan, *_) = [event for event in nodes.events() if event["name"] == "plan_made" and event["at"] > at]
    stands = {task: stand(nodes, task, at) for task in LIMITS}
    wait_worlds(nodes, heavy=4, light=1)
    whole = time.time() - at
    nodes.start_node(victim)
    wait_worlds(nodes, heavy=4, light=2)
    return {
        "noticed_ms": 1e3 * (lost[-1] - at),
        "planned_ms": 1e3 * (plan["at"] - lost[-1]),
        "found_ms": plan["fields"]["milliseconds"],
        "foreseen": plan["fields"]["foreseen"],
        **{f"{task}_stands_beyond_its_step_ms": 1e3 * (stands[task] - usual[task]) for task in LIMITS},
        "all_in_place_s": whole,
    }


def resize(nodes: Nodes) -> Figures:
    """The heavy task gives a node up by order, and gets it back."""
    time.sleep(AROUND)
    before = len(again(nodes.diaries["heavy"]))
    at = time.time()
    nodes.order("resize", "heavy", "3")
    time.sleep(AROUND + 1)
    shrunk = stand(nodes, "heavy", at) - usual_step(nodes, "heavy", at)
    wait_worlds(nodes, heavy=3)
    nodes.order("resize", "heavy", "all")
    wait_worlds(nodes, heavy=4, light=2)
    return {"shrink_costs_ms": 1e3 * shrunk, "computed_again": len(again(nodes.diaries["heavy"])) - before}


def again(diary: Sequence[Line]) -> list[tuple[object, ...]]:
    """Micro-batches that were computed more than once."""
    seen: set[tuple[object, ...]] = set()
    found = []
    for line in diary:
        if line["event"] == "micro_batch":
            key = (line["step"], tuple(line["samples"]))
            if key in seen:
                found.append(key)
            seen.add(key)
    return found


def series(runs: int, folder: Path) -> list[Figures]:
    """Several runs on one cluster."""
    results: list[Figures] = []
    with Nodes(folder, 6) as nodes:
        for task, (weight, fewest) in LIMITS.items():
            command = [*TRAIN, "--epochs", "50", "--pace", "0.04", "--until-told"]
            nodes.submit(task, command, weight=weight, min_nodes=fewest, max_nodes=4)
        wait_worlds(nodes, heavy=4, light=2)
        for _ in range(runs):
            results.append({**lose_a_node(nodes), **resize(nodes)})
            print(json.dumps({name: round(value, 3) for name, value in results[-1].items()}), flush=True)
        for task in LIMITS:
            nodes.stop(task)
        for task in LIMITS:
            nodes.until(partial(_over, nodes, task), f"the end of {task}")
    return results


def main() -> None:
    """Run the series and print medians with the smallest and the largest value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reallocation-") as folder:
        results = series(arguments.runs, Path(folder))
    for name in results[0]:
        values = sorted(float(result[name]) for result in results)
        print(f"{name}: {statistics.median(values):.2f} [{values[0]:.2f}-{values[-1]:.2f}]")


if __name__ == "__main__":
    main()
