"""Compare the simulator with the real system: accumulated WAF, predicted and measured, for the same faults.

    python benchmarks/simulator.py [--runs 1] [--json simulator.json]

Two tasks share five nodes on this machine; a micro-batch sleeps in place of an accelerator's work. A first run measures
the simulator's inputs: the durations of steps, starts, detection and changes. In another run nodes and workers are
killed according to the trace, and the simulator replays the trace with the measured inputs. Nothing is fitted to the
predicted run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unicron_lightning.demo.cluster import SharedNodes
from unicron_lightning.demo.sharing import Work, longest_stand
from unicron_lightning.planner.performance.model import MeasuredPoint, MeasuredTable
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.settings import simulate
from unicron_lightning.simulate.trace import SimCluster, SimTask, Trace, TraceFault
from unicron_lightning.terms import Terms

NUM_NODES = 5
WEIGHTS = {"heavy": 2.0, "light": 1.0}
WHOLE = {"heavy": 3, "light": 2}
"""Workers when all nodes are present, which is also each task's maximum."""
FEWER = {"heavy": 2, "light": 1}
"""Workers of the tasks in the smaller worlds whose steps are measured."""
TRAIN = ["-m", "unicron_lightning.demo.train", "--nodes", "3", "--accumulate", "4", "--batch-size", "1"]
PACE = "0.4"
"""Seconds of sleep per micro-batch: long compared with its computation, since five workers share this machine."""
STEADY = 25.0
"""Seconds over which a step time is measured."""
PATIENCE = 300.0
SECONDS = 300.0
"""Duration of the trace."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault of the trace on a task's node; `index` counts the nodes that the task has at the beginning."""

    at: float
    task: str
    index: int
    repair: float = 0.0
    """Seconds until the node returns; 0 if only the worker is killed."""


TRACE = (
    Strike(at=15.0, task="heavy", index=0, repair=75.0),
    Strike(at=150.0, task="light", index=1),
    Strike(at=190.0, task="heavy", index=1),
    Strike(at=230.0, task="light", index=0, repair=30.0),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Durations measured by the first run, in seconds."""

    steps: dict[str, dict[int, float]]
    worker_noticed: float
    node_noticed: float
    goes_on: float
    joins: float
    leaves: float
    start: float
    launch: float


def begin(nodes: SharedNodes) -> None:
    """Submit the tasks and wait until they run on all nodes."""
    for task, weight in WEIGHTS.items():
        command = [*TRAIN, "--steps-per-epoch", "4000", "--epochs", "50", "--pace", PACE, "--until-told"]
        nodes.start_job(task, command, weight=weight, min_nodes=1, max_nodes=WHOLE[task])
    nodes.wait_worlds(WHOLE, PATIENCE)


def end(nodes: SharedNodes) -> None:
    """Stop the tasks and wait for their success."""
    for task in WEIGHTS:
        nodes.stop(task)
    for task in WEIGHTS:
        nodes.wait_state("succeeded", task=task)


def kill_worker(nodes: SharedNodes, task: str, node: str) -> float:
    """Send SIGKILL to the task's newest worker on a node; return the time."""
    starts = [line for line in nodes.diary(task) if line["event"] == "start" and line["node"] == node]
    at = time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(starts[-1]["pid"], signal.SIGKILL)
    return at


def beyond(nodes: SharedNodes, task: str, at: float, usual: float) -> float:
    """Longest time without a step after a change, less the usual step time."""
    ends = [line["at"] for line in nodes.steps(task)]
    return max(0.0, longest_stand(Work(ends=ends, worth=1.0), at, at + 2.0 + 2.0 * usual) - usual)


def first(nodes: SharedNodes, name: str, after: float, **fields: Any) -> float:
    """Wait for an event of that name and return its time."""
    found: list[float] = []

    def there() -> bool:
        found[:] = [
            event["at"]
            for event in nodes.events()
            if event["name"] == name
            and event["at"] > after
            and all(event["fields"].get(key) == value or event.get(key) == value for key, value in fields.items())
        ]
        return bool(found)

    nodes.until(f"{name} {fields}", there, PATIENCE)
    return found[0]


def step_times(nodes: SharedNodes, worlds: dict[str, int]) -> dict[str, float]:
    """Step time of each task at the given sizes, over `STEADY` seconds."""
    while True:
        nodes.wait_worlds(worlds, PATIENCE)
        time.sleep(STEADY)
        until = time.time()
        steps = {task: [s for s in nodes.steps(task) if until - STEADY < s["at"] <= until] for task in worlds}
        # A resize may be followed by a move, as the plan chooses the places.
        if all(step["world"] == size for task, size in worlds.items() for step in steps[task]):
            return {task: (found[-1]["at"] - found[0]["at"]) / (len(found) - 1) for task, found in steps.items()}


def planned_changes(nodes: SharedNodes) -> tuple[dict[str, dict[int, float]], float, float]:
    """Step times by task and size, and mean time without a step when workers leave and when they join by order."""
    whole = step_times(nodes, WHOLE)
    left, joined = {}, {}
    for task, size in FEWER.items():
        left[task] = time.time()
        nodes.fetch(f"/v1/tasks/{task}/resize", method="POST", nodes=str(size))
    fewer = step_times(nodes, FEWER)
    for task in FEWER:
        at = time.time()
        nodes.fetch(f"/v1/tasks/{task}/resize", method="POST", nodes="all")
        joined[task] = first(nodes, "epoch_published", at, kind="join", task=task)
    nodes.wait_worlds(WHOLE, PATIENCE)
    time.sleep(STEADY)
    leaves = [beyond(nodes, task, at, fewer[task]) for task, at in left.items()]
    joins = [beyond(nodes, task, at, fewer[task]) for task, at in joined.items()]
    steps = {task: {WHOLE[task]: whole[task], FEWER[task]: fewer[task]} for task in WEIGHTS}
    return steps, statistics.mean(leaves), statistics.mean(joins)


def calibrate(nodes: SharedNodes) -> Measured:
    """Measure the simulator's inputs on a cluster where both tasks run."""
    steps, leaves, joins = planned_changes(nodes)
    victim = nodes.nodes_of("heavy")[-1]
    at = kill_worker(nodes, "heavy", victim)
    died = first(nodes, "worker_died", at, task="heavy")
    granted = first(nodes, "slot_granted", died, task="heavy")
    ready = first(nodes, "worker_ready_to_join", granted, task="heavy")
    nodes.wait_worlds(WHOLE, PATIENCE)
    noticed = max(0.0, died - at)
    goes_on = max(0.0, beyond(nodes, "heavy", at, steps["heavy"][FEWER["heavy"]]) - noticed)
    victim = nodes.nodes_of("light")[-1]
    at = nodes.kill_node(victim)
    lost = first(nodes, "worker_died", at, task="light")  # logged whether the agent reported it or died with its worker
    time.sleep(5.0)
    at_start = nodes.start_node(victim)
    registered = first(nodes, "agent_registered", at_start, node=victim)
    nodes.wait_worlds(WHOLE, PATIENCE)
    return Measured(
        steps=steps,
        worker_noticed=noticed,
        node_noticed=lost - at,
        goes_on=goes_on,
        joins=joins,
        leaves=leaves,
        start=ready - granted,
        launch=registered - at_start,
    )


def replay(nodes: SharedNodes) -> tuple[dict[str, float], float]:
    """Inject the faults of the trace.

    Returns:
        The steps of each task during the trace, and the largest delay of a fault in seconds.
    """
    time.sleep(5.0)
    had = {task: nodes.nodes_of(task) for task in WEIGHTS}
    start = time.time()
    todo: list[tuple[float, Callable[[], object]]] = []
    for strike in TRACE:
        node = had[strike.task][strike.index]
        if strike.repair:
            todo.append((strike.at, lambda node=node: nodes.kill_node(node)))
            todo.append((strike.at + strike.repair, lambda node=node: nodes.start_node(node)))
        else:
            todo.append((strike.at, lambda task=strike.task, node=node: kill_worker(nodes, task, node)))
    late = 0.0
    for at, act in sorted(todo, key=lambda item: item[0]):
        time.sleep(max(0.0, start + at - time.time()))
        act()
        late = max(late, time.time() - start - at)
    time.sleep(max(0.0, start + SECONDS + 1.0 - time.time()))
    steps = {task: _steps_until(nodes, task, start + SECONDS) - _steps_until(nodes, task, start) for task in WEIGHTS}
    return steps, late


def _steps_until(nodes: SharedNodes, task: str, moment: float) -> float:
    """Number of finished steps, including the fraction of the step in progress."""
    lines = nodes.steps(task)
    done = [line for line in lines if line["at"] <= moment]
    later = [line for line in lines if line["at"] > moment]
    part = (moment - done[-1]["at"]) / (later[0]["at"] - done[-1]["at"]) if done and later else 0.0
    return len(done) + min(1.0, part)


def predict(measured: Measured) -> dict[str, float]:
    """Steps of each task as simulated."""
    tasks = []
    for name, weight in WEIGHTS.items():
        points = tuple(
            MeasuredPoint(num_workers=size, flops_per_second=1.0 / seconds)
            for size, seconds in sorted(_all_sizes(name, measured).items())
        )
        speed = MeasuredTable(points=points)
        terms = Terms(weight=weight, max_workers=WHOLE[name])
        tasks.append(SimTask(name=name, performance=speed, flops_per_step=1.0, terms=terms))
    result = simulate("unicron", SimCluster(num_nodes=NUM_NODES, workers_per_node=1), tasks, trace(), costs(measured))
    return {name: each.flops for name, each in result.tasks.items()}


def _all_sizes(task: str, measured: Measured) -> dict[int, float]:
    """Step times at all sizes.

    A size that was not measured is scaled from the smallest measured one by its rounds of micro-batches.
    """
    known = measured.steps[task]
    least = min(known)
    return {size: known.get(size, known[least] * least / size) for size in range(1, WHOLE[task] + 1)}


def trace() -> Trace:
    """The trace for the simulator, in which the first task has the first nodes."""
    before = {"heavy": 0, "light": WHOLE["heavy"]}
    faults = [
        TraceFault(
            at=strike.at,
            kind="lost_connection" if strike.repair else "exited_abnormally",
            node=before[strike.task] + strike.index,
            worker=None if strike.repair else 0,
            repair=strike.repair,
        )
        for strike in TRACE
    ]
    return Trace.of("compressed", SECONDS, faults)


def costs(measured: Measured) -> Costs:
    """The measured durations as the simulator's costs."""
    return Costs(
        system="unicron",
        detection={"default": measured.worker_noticed, "lost_connection": measured.node_noticed},
        change={
            "continue": measured.goes_on,
            "join": measured.joins,
            "leave": measured.leaves,
            "start": measured.start,
            "reattempt": measured.goes_on,
        },
        extra={"launch": measured.launch},
    )


def series(folder: Path) -> dict[str, Any]:
    """Run one calibration and one prediction, each with its own cluster."""
    with SharedNodes(folder / "calibration", NUM_NODES) as nodes:
        begin(nodes)
        measured = calibrate(nodes)
        end(nodes)
    print(json.dumps(asdict(measured)), flush=True)
    expected = predict(measured)
    with SharedNodes(folder / "replay", NUM_NODES) as nodes:
        begin(nodes)
        found, late = replay(nodes)
        end(nodes)
    waf = {name: sum(WEIGHTS[task] * steps[task] for task in WEIGHTS) for name, steps in
           (("predicted", expected), ("measured", found))}  # fmt: skip
    ideal = SECONDS * sum(WEIGHTS[task] / measured.steps[task][WHOLE[task]] for task in WEIGHTS)
    return {
        "steps_predicted": expected,
        "steps_measured": found,
        "of_ideal_predicted": waf["predicted"] / ideal,
        "of_ideal_measured": waf["measured"] / ideal,
        "predicted_by_measured": waf["predicted"] / waf["measured"],
        "latest_fault_s": late,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run, print the results, and check that the prediction is within 10 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(prefix="simulator-") as folder:
            results.append(series(Path(folder)))
        print(json.dumps(results[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    errors = [abs(result["predicted_by_measured"] - 1.0) for result in results]
    verdict = "within" if max(errors) <= 0.1 else "NOT within"
    print(f"accumulated WAF, predicted / measured - 1: {max(errors):.1%} at worst: {verdict} 10 %")


if __name__ == "__main__":
    main()
