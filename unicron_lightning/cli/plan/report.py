"""A plan for people (tables of rich, a picture of the curves) and for programs (JSON), and the plan after an event.

``--what-if`` resolves the user's event with respect to the plan in force.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from unicron_lightning.cli.plan.command import EVENTS
from unicron_lightning.cli.plan.situation import Situation
from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.fleet import FleetPlan, solve_fleet
from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.placement import NodeCapacity, Placement
from unicron_lightning.planner.solver import TaskPlan
from unicron_lightning.planner.state import Event, NodesJoined, TaskFinished, TaskLaunched, WorkersLost

_COLUMNS = (
    "task",
    "weight",
    "kind",
    "now",
    "lost",
    "plan",
    "TFLOP/s",
    "WAF",
    "layout",
    "last brings",
    "next brings",
    "nodes",
)
_FIRST_HIDDEN = ("next brings", "last brings", "weight", "TFLOP/s", "layout", "lost")
"""Columns that are left out on a narrow terminal, in this order."""
_NODES_WIDTH = 14
"""Least width of the column of nodes, which wraps."""
_PETA = 1e15
_MOST_MOVES = 20


def as_json(plan: FleetPlan, placement: Placement) -> dict[str, Any]:
    """A plan's details. Units are in the names; WAF is in weighted FLOP/s, rewards in weighted FLOP."""
    fleet = plan.fleet
    weights = {name: curve.task.terms.weight for name, curve in plan.curves.items()}
    return {
        "num_workers": fleet.num_workers,
        "num_spare_workers": plan.num_spare_workers,
        "running_seconds": fleet.duration_seconds,
        "waf_flops_per_second": plan.waf,
        "reward_flop": plan.value,
        "gap_flop": plan.gap_flop,
        "num_moved_workers": plan.num_moved_workers,
        "paused": list(plan.paused),
        "infeasible": list(plan.infeasible),
        "quotas": {
            quota.name: {
                "num_workers": plan.num_workers_of(quota),
                "guaranteed": quota.guaranteed,
                "most": quota.most,
            }
            for quota in fleet.quotas
        },
        "tasks": {part.name: _task_json(part, weights[part.name], placement) for part in plan.tasks},
        "moves": [
            {"task": move.task, "source": move.source, "target": move.target, "num_accelerators": move.num_accelerators}
            for move in placement.moves
        ],
        "num_moved_accelerators": placement.num_moved,
    }


def _task_json(part: TaskPlan, weight: float, placement: Placement) -> dict[str, Any]:
    layout = part.configuration
    return {
        "num_workers": part.num_workers,
        "kind": part.kind or None,
        "kind_before": part.kind_before or None,
        "num_workers_before": part.num_workers_before,
        "num_workers_lost": part.num_workers_lost,
        "changed": part.changed,
        "relayout": part.relayout,
        "weight": weight,
        "flops_per_second": part.waf / weight,
        "waf_flops_per_second": part.waf,
        "reward_flop": part.reward,
        "gain_of_last_flop": part.gain_of_last,
        "gain_of_next_flop": part.gain_of_next,
        "configuration": None
        if layout is None
        else {
            "tensor_parallel": layout.tensor_parallel,
            "pipeline_parallel": layout.pipeline_parallel,
            "data_parallel": layout.data_parallel,
            "context_parallel": layout.context_parallel,
            "expert_parallel": layout.expert_parallel,
            "micro_batch_size": layout.micro_batch_size,
        },
        "nodes": placement.of_task(part.name),
        "num_spanning_accelerators": placement.num_spanning[part.name],
        "num_island_spanning_accelerators": placement.num_spanning_islands.get(part.name, 0),
    }


def show(
    console: Console,
    title: str,
    plan: FleetPlan,
    placement: Placement,
    *,
    assumed: bool,
    unsaid: Set[str] = frozenset(),
) -> None:
    """Print a plan.

    Args:
        console: for the output.
        title: of the table.
        plan: the plan.
        placement: of its workers.
        assumed: whether the present placement is assumed.
        unsaid: tasks of which the file does not state whether they may be paused.
    """
    hidden: list[str] = []
    idle = [] if len(plan.plans) > 1 else ["kind"]
    while len(hidden) < len(_FIRST_HIDDEN):
        without_nodes = _table("", plan, placement, [*hidden, *idle, "nodes"])
        unlimited = console.options.update(width=10_000)
        if Measurement.get(console, unlimited, without_nodes).maximum + _NODES_WIDTH <= console.width:
            break
        hidden.append(_FIRST_HIDDEN[len(hidden)])
    console.print(_table(title, plan, placement, [*hidden, *idle]))
    if hidden:
        said = f"not shown, for want of width: {', '.join(hidden)} (--json has all)"
        console.print(said, highlight=False, markup=False)
    for line in _summary(plan, placement, assumed=assumed, unsaid=unsaid):
        console.print(line, highlight=False, markup=False)


def _table(title: str, plan: FleetPlan, placement: Placement, hidden: Sequence[str]) -> Table:
    table = Table(title=escape(title), title_justify="left")
    kept = [index for index, name in enumerate(_COLUMNS) if name not in hidden]
    for index in kept:
        name = _COLUMNS[index]
        left = name in ("task", "kind", "layout", "nodes")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "nodes")
    for part in plan.tasks:
        weight = plan.curves[part.name].task.terms.weight
        row = _row(part, weight, plan.fleet.duration_seconds, placement)
        table.add_row(*(row[index] for index in kept))
    return table


def _row(part: TaskPlan, weight: float, running_seconds: float, placement: Placement) -> list[str]:
    moved = part.kind != part.kind_before
    same = part.num_workers == part.num_workers_before and not part.num_workers_lost and not moved
    mark = "" if same else " *"
    return [
        escape(part.name),
        f"{weight:g}",
        escape(f"{part.kind_before} -> {part.kind}" if moved else part.kind if part.num_workers else ""),
        str(part.num_workers_before),
        str(part.num_workers_lost or ""),
        f"{part.num_workers}{mark}",
        f"{part.waf / weight / 1e12:,.1f}",
        f"{part.waf / 1e12:,.1f}",
        _layout(part.configuration),
        _rate(part.gain_of_last, running_seconds),
        _rate(part.gain_of_next, running_seconds),
        escape(_nodes(placement.of_task(part.name))),
    ]


def _layout(layout: ParallelConfiguration | None) -> str:
    if layout is None:
        return ""
    degrees = {"TP": layout.tensor_parallel, "PP": layout.pipeline_parallel, "DP": layout.data_parallel}
    rare = {"CP": layout.context_parallel, "EP": layout.expert_parallel}
    degrees |= {name: degree for name, degree in rare.items() if degree > 1}
    return " ".join(f"{name}{degree}" for name, degree in degrees.items()) + f" b{layout.micro_batch_size}"


def _rate(gain: float | None, running_seconds: float) -> str:
    return "" if gain is None else f"{gain / running_seconds / 1e12:+,.1f}"


def _nodes(on_nodes: dict[str, int]) -> str:
    """Few nodes by name, many by number."""
    if len(on_nodes) > 4:
        return f"{len(on_nodes)} nodes"
    return " ".join(f"{node}:{num}" for node, num in on_nodes.items())


def _summary(plan: FleetPlan, placement: Placement, *, assumed: bool, unsaid: Set[str]) -> Iterator[str]:
    fleet = plan.fleet
    hours = fleet.duration_seconds / 3600
    yield (
        f"WAF {plan.waf / _PETA:,.3f} PFLOP/s, reward {plan.value:.4g} FLOP in {_hours(hours)} until the next failure; "
        f"{fleet.num_workers} workers, {plan.num_spare_workers} spare"
    )
    if plan.gap_flop:
        gap = plan.gap_flop / abs(plan.value or 1.0)
        yield f"the search stopped at its limit: the best plan's reward is greater by at most {gap:.1e} of this one"
    for quota in fleet.quotas:
        limit = "" if quota.most is None else f", at most {quota.most}"
        yield f"quota {quota.name}: {plan.num_workers_of(quota)} workers (guaranteed {quota.guaranteed}{limit})"
    if plan.infeasible:
        yield f"not enough workers for: {', '.join(plan.infeasible)} (they may not be paused, and are)"
    if paused := [name for name in plan.paused if name not in plan.infeasible]:
        yield from _why_paused(plan, paused)
        if quiet := [name for name in paused if name in unsaid]:
            yield (
                f"may_pause is not stated for {', '.join(quiet)}, so that the plan may pause them; "
                "`may_pause: false`, or `fair: min` for all that do not state it, keeps the minimum"
            )
    yield f"accelerators to start: {placement.num_moved}" + (
        "; the present places are assumed, as the file contains only numbers of workers" if assumed else ""
    )
    # For accelerators that are new to a task, the table's last column is sufficient.
    leaving = [move for move in placement.moves if move.source is not None]
    for move in leaving[:_MOST_MOVES]:
        yield f"  {move.task}: {move.num_accelerators} {move.source} -> {move.target or 'released'}"
    if len(leaving) > _MOST_MOVES:
        yield f"  and {len(leaving) - _MOST_MOVES} more (--json has all)"
    for what, numbers in (("a node", placement.num_spanning), ("an island", placement.num_spanning_islands)):
        if spanning := [f"{task} {num}" for task, num in numbers.items() if num]:
            yield f"accelerators of replicas, or groups, that do not share {what}: {', '.join(spanning)}"


def _why_paused(plan: FleetPlan, paused: Sequence[str]) -> Iterator[str]:
    """Compare each paused task with the best plan in which it has its least workers, in WAF until the next failure."""
    now = {part.name: part.reward for part in plan.tasks}
    seconds = plan.fleet.duration_seconds
    for name in paused:
        other = plan.explain(name)
        if other is None:
            yield f"paused: {name}: no plan has room for its minimum of workers"
            continue
        earned = next(part.reward for part in other.tasks if part.name == name) - now[name]
        # Rounding may place an equally good plan minimally above the best.
        lost = earned + max(0.0, plan.value - other.value)
        workers, rate = other.allocation[name], earned / seconds / 1e12
        yield (
            f"paused: {name}: {workers} workers would bring {rate:,.1f} TFLOP/s of WAF, "
            f"and cost the other tasks {lost / seconds / 1e12:,.1f}"
        )


def _hours(hours: float) -> str:
    if not math.isfinite(hours):
        return "unknown time"
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:,.1f} min"


def draw(path: Path, title: str, plan: FleetPlan) -> None:
    """Write a picture of the curves F(t,x) of all tasks with the chosen points, in the format of the file's name.

    Args:
        path: of the file.
        title: of the picture.
        plan: with curves and points.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--picture {path}: matplotlib is not installed; install it by: pip install 'unicron-lightning[picture]'"
        ) from error
    # Figure without pyplot: no display, no global state.
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for part in plan.tasks:
        name, num_workers, curve = part.name, part.num_workers, plan.curves[part.name]
        terms = curve.task.terms
        step = terms.granularity if terms.granularity > 1 else curve.unit
        shown = curve.workers <= plan.plans[part.kind].state.num_workers
        # A gap in the line marks sizes that the task cannot have.
        sizes, waf = _with_gaps(curve.workers[shown], curve.waf[shown] / 1e15, max(step, curve.unit))
        (line,) = axes.plot(
            sizes, waf, ".-", linewidth=1.2, markersize=3, label=f"{name} (w {terms.weight:g}): {num_workers}"
        )
        axes.plot(
            [num_workers], [curve.waf_at(num_workers) / 1e15], "o", color=line.get_color(), markersize=8, clip_on=False
        )
        before = part.num_workers_before if part.kind == part.kind_before else 0
        if before and before != num_workers:
            axes.plot(
                [before], [curve.waf_at(before) / 1e15], "o", color=line.get_color(), markersize=8, fillstyle="none"
            )
    axes.set_xlabel("workers x")
    axes.set_ylabel("F(t,x), weighted PFLOP/s")
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.set_title(f"{title}: WAF {plan.waf / 1e15:.2f} PFLOP/s on {plan.fleet.num_workers} workers", loc="left")
    axes.legend(title="task (weight): workers\n● planned   ○ now", loc="upper left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from error


def _with_gaps(
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]], waf: np.ndarray[tuple[int], np.dtype[np.float64]], step: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """The points with a NaN, which breaks the line, between sizes further apart than a step."""
    breaks = np.flatnonzero(np.diff(sizes) > step) + 1
    return np.insert(sizes.astype(np.float64), breaks, np.nan), np.insert(waf, breaks, np.nan)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The consequence of an event.

    Attributes:
        words: readable description of the event.
        situation: after the event, with the losses.
        plan: the new plan.
    """

    words: str
    situation: Situation
    plan: FleetPlan


def what_if(situation: Situation, plan: FleetPlan, placement: Placement, event: str, argument: str | None) -> _Outcome:
    """Plan for an event that happens once ``plan`` is in force.

    Raises:
        ConfigError: the event is unknown or impossible.
    """
    in_force = dataclasses.replace(
        situation, fleet=situation.fleet.adopt(plan), running=placement.accelerators, assumed=False
    )
    if event == "node-loss":
        return _node_loss(in_force, placement, argument)
    if event == "join":
        return _join(in_force, argument)
    if event not in EVENTS:
        raise ConfigError(f"--what-if {event}: expected one of {', '.join(EVENTS)}")
    tasks = {"finish": in_force.fleet.tasks, "launch": in_force.fleet.queued}[event]
    if argument not in tasks:
        raise ConfigError(
            f"--what-if {event} {argument or ''}: expected one of the tasks {', '.join(tasks) or '(none)'}"
        )
    if event == "finish":
        return _after(in_force, TaskFinished(task=argument), f"{argument} finishes")
    return _after(in_force, TaskLaunched(task=argument), f"{argument} is launched")


def _node_loss(situation: Situation, placement: Placement, argument: str | None) -> _Outcome:
    ready = {node.name: node for node in situation.nodes if node.state == "ready"}
    name = argument
    if argument not in ready:
        on_nodes = placement.of_task(argument or "")
        name = min(on_nodes, key=lambda node: (-on_nodes[node], node), default=None)
    if name is None:
        running = ", ".join(sorted(situation.fleet.homes))
        raise ConfigError(
            f"--what-if node-loss {argument or ''}: expected a ready node, or a task that has workers ({running})"
        )
    lost = placement.accelerators.get(name, {})
    node = ready[name]
    if node.num_accelerators == 0:
        raise ConfigError(f"--what-if node-loss {name}: the node has no accelerators")
    event = WorkersLost(num_workers=node.num_accelerators, by_task=tuple(lost.items()))
    nodes = _replaced(situation.nodes, dataclasses.replace(node, state="failed"))
    held = ", ".join(f"{num} of {task}" for task, num in sorted(lost.items())) or "idle"
    return _after(dataclasses.replace(situation, nodes=nodes), event, f"{name} fails ({held})", node.kind)


def _join(situation: Situation, argument: str | None) -> _Outcome:
    kinds = situation.fleet.kinds
    most = next(iter(kinds.values())).node_workers
    if argument in (kinds if len(kinds) > 1 else (None,)):
        names = {node.name for node in situation.nodes}
        name = next(f"new{index}" for index in range(len(names) + 1) if f"new{index}" not in names)
        node = NodeCapacity(name=name, num_accelerators=most, kind=argument or next(iter(kinds)))
    else:
        away = {n.name: n for n in situation.nodes if n.state != "ready"}
        if argument not in away:
            new = f"a kind for a new one ({', '.join(kinds)})" if len(kinds) > 1 else "no name for a new one"
            raise ConfigError(
                f"--what-if join {argument or ''}: expected a node that is not ready ({', '.join(away) or 'none is'}), "
                f"or {new}"
            )
        node = dataclasses.replace(away[argument], state="ready")
    if not 0 < node.num_accelerators <= most:
        raise ConfigError(f"--what-if join {node.name}: {node.num_accelerators} accelerators, expected 1 to {most}")
    nodes = _replaced(situation.nodes, node)
    event = NodesJoined(num_workers=node.num_accelerators)
    return _after(dataclasses.replace(situation, nodes=nodes), event, f"{node.name} joins", node.kind)


def _replaced(nodes: tuple[NodeCapacity, ...], node: NodeCapacity) -> tuple[NodeCapacity, ...]:
    return (*(each for each in nodes if each.name != node.name), node)


def _after(situation: Situation, event: Event, words: str, kind: str = "") -> _Outcome:
    after = dataclasses.replace(situation, fleet=situation.fleet.after(event, kind))
    return _Outcome(words=words, situation=after, plan=solve_fleet(after.fleet))
