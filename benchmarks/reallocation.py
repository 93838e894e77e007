"""Measure moves of nodes between tasks: two tasks share six nodes; a node dies, returns, and tasks are resized.

    python benchmarks/reallocation.py [--runs 5]

A micro-batch sleeps for 40 ms in place of an accelerator's work. Per run the node of one task's worker is killed with
all its processes and started again; then the other task is resized to one node less and back. All times are by one
machine's clock: those of steps from the workers' diaries, those of decisions from the coordinator's event log.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from measure import Figures

from unicron_lightning.demo.cluster import SharedNodes, micro_batches
from unicron_lightning.demo.sharing import Work, longest_stand

LIMITS = {"heavy": (2.0, 2), "light": (1.0, 1)}
"""Weight and least nodes of each task."""
TRAIN = ["-m", "unicron_lightning.demo.train", "--nodes", "4", "--accumulate", "3", "--steps-per-epoch", "4000"]
WHOLE = {"heavy": 4, "light": 2}
"""Workers of each task when all six nodes are present."""
PATIENCE = 300.0
"""Longest time for a change in seconds, so generous that a busy machine only worsens the figures."""
AROUND = 4.0
"""Seconds around a change in which the longest time without a step is searched."""


def usual_step(nodes: SharedNodes, task: str, before: float) -> float:
    """Median time between the task's steps in the `AROUND` seconds before a moment."""
    ends = [line["at"] for line in nodes.steps(task) if before - AROUND < line["at"] <= before]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def stand(nodes: SharedNodes, task: str, start: float) -> float:
    """Longest time without a step of the task in the `AROUND` seconds after a moment."""
    ends = [line["at"] for line in nodes.steps(task)]
    return longest_stand(Work(ends=ends, worth=1.0), start, start + AROUND)


def lose_a_node(nodes: SharedNodes) -> Figures:
    """Let a node of the heavy task die and return."""
    time.sleep(AROUND)
    victim = nodes.nodes_of("heavy")[-1]
    at = nodes.kill_node(victim)
    time.sleep(AROUND + 1)
    usual = {task: usual_step(nodes, task, at) for task in LIMITS}
    since = [event for event in nodes.events() if event["at"] > at]
    lost = [event["at"] for event in since if event["name"] in ("agent_lost", "node_lost")]
    (plan, *_) = [event for event in since if event["name"] == "plan_made"]
    stands = {task: stand(nodes, task, at) for task in LIMITS}
    nodes.wait_worlds({"heavy": 4, "light": 1}, PATIENCE)
    whole = time.time() - at
    nodes.start_node(victim)
    nodes.wait_worlds(WHOLE, PATIENCE)
    return {
        "noticed_ms": 1e3 * (lost[-1] - at),
        "planned_ms": 1e3 * (plan["at"] - lost[-1]),
        "found_ms": plan["fields"]["milliseconds"],
        "foreseen": plan["fields"]["foreseen"],
        **{f"{task}_stands_beyond_its_step_ms": 1e3 * (stands[task] - usual[task]) for task in LIMITS},
        "all_in_place_s": whole,
    }


def resize(nodes: SharedNodes) -> Figures:
    """Take a node from the heavy task by order, and return it."""
    time.sleep(AROUND)
    before = num_again(nodes)
    at = time.time()
    nodes.fetch("/v1/tasks/heavy/resize", method="POST", nodes="3")
    time.sleep(AROUND + 1)
    shrunk = stand(nodes, "heavy", at) - usual_step(nodes, "heavy", at)
    nodes.wait_worlds({"heavy": 3}, PATIENCE)
    nodes.fetch("/v1/tasks/heavy/resize", method="POST", nodes="all")
    nodes.wait_worlds(WHOLE, PATIENCE)
    return {"shrink_costs_ms": 1e3 * shrunk, "computed_again": num_again(nodes) - before}


def num_again(nodes: SharedNodes) -> int:
    """Number of repeated computations of the heavy task's workers."""
    return sum(len(pids) - 1 for pids in micro_batches(nodes.diary("heavy")).values())


def series(runs: int, folder: Path) -> list[Figures]:
    """Measure several runs on one cluster."""
    results: list[Figures] = []
    with SharedNodes(folder, 6) as nodes:
        for task, (weight, fewest) in LIMITS.items():
            command = [*TRAIN, "--epochs", "50", "--pace", "0.04", "--until-told"]
            nodes.start_job(task, command, weight=weight, min_nodes=fewest, max_nodes=4)
        nodes.wait_worlds(WHOLE, PATIENCE)
        for _ in range(runs):
            results.append({**lose_a_node(nodes), **resize(nodes)})
            print(json.dumps({name: round(value, 3) for name, value in results[-1].items()}), flush=True)
        for task in LIMITS:
            nodes.stop(task)
        for task in LIMITS:
            nodes.wait_state("succeeded", task=task)
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
