"""The change of TP, PP and EP, or of the number of shards, of a running task: a cold transition, by an operator's
order, or because a job names a layout for the number of slots that the plan has given it, or leaves the layout to the
plan. CP stays.

1. The order is recorded, if the model and the workers allow the layout.
2. An epoch of kind ``relayout`` with the same members is published: they finish the step, switch, write a checkpoint,
   report it, and wait (`wire.CheckpointSaved.parting`).
3. All slots are taken back, and the task's next life begins in the new layout, from that checkpoint. Workers receive
   the layout with their `wire.Welcome`. Nothing is recomputed.

A death before the checkpoint is repaired first, then the order is carried out. If no member survives, the order is void
and the layout stays. A layout in which no step was ever finished is abandoned when no member is left, or when the
severity workflow has seen it fail twice: the task resumes in the previous layout, from the same checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import structs

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.state import Agent, Task, has_multiple


def completed(task: Task, layout: wire.Layout, *, names_experts: bool = False) -> wire.Layout:
    """Return a layout with what it does not name as the task has it: T of lanes; CP; EP, which jobs and plans never
    name.

    Args:
        task: whose layout is to change.
        layout: as named.
        names_experts: whether EP is named.
    """
    spread = task.layouts.spread
    if spread is None or layout.sharded != spread.layout.sharded:
        return layout
    if layout.sharded:
        return structs.replace(layout, slices=spread.layout.slices)
    expert = layout.expert if names_experts else spread.layout.expert
    return structs.replace(layout, expert=expert, context=spread.layout.context)


def refusal(task: Task, layout: wire.Layout) -> str | None:
    """Return why a task cannot have this layout now, for the operator; None if it can."""
    layouts, spread = task.layouts, task.layouts.spread
    if layouts.ordered is not None:
        return f"{layout}: the task is on its way to {layouts.ordered} already"
    if spread is None or task.epoch is None or task.finishing:
        doing = "ends" if task.finishing else "has not begun to train, or is of a strategy without layouts"
        return f"{layout}: the task {task.id!r} {doing}"
    if layouts.untried:
        return f"{layout}: the task has only just begun with {spread.layout}; wait for its first step"
    if layout == spread.layout:
        return f"{layout}: that is what the task has"
    if layout.sharded != spread.layout.sharded:
        return f"{layout}: the task has {spread.layout}; expected {'shards' if spread.layout.sharded else 'tp and pp'}"
    if layout.slices != spread.layout.slices:
        return f"{layout}: the task has {spread.layout}; the tensor-parallel size of lanes cannot be changed"
    if layout.context != spread.layout.context:
        return f"{layout}: the task has {spread.layout}; the context-parallel size cannot be changed"
    if layout.expert > 1 and not spread.expert_divides:
        return f"{layout}: the task's model has no experts; expected ep=1"
    return _misfit(spread, layout) or _lack(task, layout)


def follow_plan(task: Task, turn: Turn) -> None:
    """Order the layout that the job names for the task's slots, or that the plan has chosen for them.

    The caller has seen a step with these slots; they must be all that the plan gives.
    """
    job = turn.lasting.jobs.get(task.id)
    slots = len(task.slots)
    if job is None or turn.lasting.allocation.get(task.id, slots) != slots:
        return
    wanted = turn.lasting.layouts.get(task.id) if job.auto_layouts else job.layout(slots)
    wanted = None if wanted is None else completed(task, wanted)
    if wanted is not None and wanted not in task.layouts.failed and refusal(task, wanted) is None:
        order(task, turn, wanted, by="plan")


def order(task: Task, turn: Turn, layout: wire.Layout, by: str = "operator") -> None:
    """Record an order that `refusal` has accepted."""
    task.layouts.ordered = layout
    turn.emit_apart(task, "layout_ordered", **layout.plain(), before=_before(task), by=by)
    turn.to_review[task.id] = task


def record_spread(task: Task, turn: Turn, spread: wire.Spread | None) -> None:
    """Record a worker's report of how the model is spread."""
    layouts = task.layouts
    if spread is None or spread == layouts.spread:
        return
    layouts.spread = spread
    layouts.transformer = spread.transformer or layouts.transformer
    if spread.ordered and layouts.in_force is None:  # the coordinator has lost its store
        layouts.in_force = spread.layout
    turn.save(task)


def due(task: Task) -> bool:
    """Whether the members of the newest, settled epoch have to write the checkpoint now.

    While they are too few for a replica, or are held, they do not: waiting workers may join first.
    """
    ordered, epoch = task.layouts.ordered, task.epoch
    return ordered is not None and epoch is not None and not epoch.hold and len(epoch.members) >= ordered.workers


def put_in_force(task: Task, turn: Turn) -> None:
    """Put the ordered layout in force: all members wait to be restarted.

    Without an order, which was lost with the coordinator's store, the layout stays.
    """
    layouts = task.layouts
    if layouts.ordered is None:
        return
    layouts.before, layouts.in_force = layouts.in_force, layouts.ordered
    layouts.ordered, layouts.untried = None, True
    step = task.checkpoint.step if task.checkpoint else None
    turn.emit_apart(task, "layout_changes", **layouts.in_force.plain(), before=_before(task), step=step)


def abandon(task: Task, turn: Turn, reason: str = "no member was left before a step was finished in it") -> None:
    """Drop an order, or a layout without a finished step, because no worker with the task's state is left."""
    layouts = task.layouts
    if layouts.ordered is not None:
        given_up, layouts.ordered = layouts.ordered, None
        reason = "no member was left before its checkpoint was written"
    elif layouts.untried and layouts.in_force is not None:
        given_up = layouts.in_force
        layouts.failed = [*layouts.failed, given_up]
        layouts.in_force, layouts.before, layouts.untried = layouts.before, None, False
    else:
        return
    turn.emit(task, "layout_abandoned", **given_up.plain(), reason=reason)


def stepped(task: Task, turn: Turn) -> None:
    """Record a finished step: the layout works."""
    if task.layouts.untried:
        task.layouts.untried, task.layouts.before = False, None
        turn.save(task)


def nodes_of(agent: Agent, workers: int) -> int:
    """Return the number of nodes like an agent's that one replica, or several together, occupy."""
    own = agent.local_world or 1
    return math.lcm(workers, own) // own


def _misfit(spread: wire.Spread, layout: wire.Layout) -> str | None:
    """Return why the model cannot be spread in this layout; None if it can."""
    if spread.workers % layout.workers:
        return (
            f"{layout}: a replica of {layout.workers} workers; expected a divisor of the {spread.workers} declared "
            "(devices x num_nodes)"
        )
    if layout.columns % layout.context or layout.columns % layout.expert:
        return f"{layout}: expected a multiple or a divisor of cp={layout.context} for ep"
    replicas = spread.workers // layout.workers
    if spread.micro_batches % (replicas * layout.lanes) and not layout.sharded:  # rows of shards may differ in number
        lanes = "" if layout.lanes == 1 else f" of {layout.lanes} data-parallel lanes"
        return (
            f"{layout}: {replicas} replicas{lanes}; expected a divisor of a step's {spread.micro_batches} micro-batches"
        )
    parts = (
        ("tp", layout.tensor, spread.tensor_divides),
        ("pp", layout.pipeline, spread.pipeline_divides),
        ("ep", layout.expert, spread.expert_divides),
    )
    for name, parallel, sizes in parts:
        for of, size in sizes.items():
            if size % parallel:
                return f"{name}={parallel}: expected a divisor of the model's {of}={size}"
    return None


def _lack(task: Task, layout: wire.Layout) -> str | None:
    """Return why the workers do not suffice for the layout; None if they do."""
    there = len(task.live_members())
    if there < layout.workers:
        return f"{layout}: a replica takes {layout.workers} workers, the task has {there} now"
    step = nodes_of(task.agents[task.slots[0]], layout.workers) if task.slots else 1
    if not has_multiple(step, max(task.min_nodes, 1), task.max_nodes):
        return (
            f"{layout}: a replica takes {step} nodes; expected a multiple of that from {task.min_nodes} to "
            f"{task.max_nodes} (its --nnodes)"
        )
    return None


def _before(task: Task) -> dict[str, Any] | None:
    """Return the layout of the present workers as plain JSON."""
    spread = task.layouts.spread
    return None if spread is None else spread.layout.plain()
