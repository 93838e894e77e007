"""States in the agents' memory: which version is complete, and from which ones a new life may begin.

The coordinator knows of each copy its version, part, holder and digest. A version that is held with all its copies
makes older ones superfluous. One that is held with at least one copy of each part is offered to the founders of a new
life, before the newest persistent checkpoint, unless that one is newer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.part import Part, on
from unicron_lightning.coordinator.state import Agent, Task

_OFFERED: Final = 3
_WAIT_SECONDS: Final = 30.0
"""Seconds that a new life waits for workers of nodes without which no offered version is complete."""


def known(task: Task) -> dict[wire.StateVersion, dict[int, list[tuple[Agent, wire.StateCopy]]]]:
    """Return the copies of each version by part."""
    found: dict[wire.StateVersion, dict[int, list[tuple[Agent, wire.StateCopy]]]] = {}
    for agent in task.agents.values():
        for copy in agent.copies:
            found.setdefault(copy.version, defaultdict(list))[copy.part].append((agent, copy))
    return found


def least_copies(version: wire.StateVersion, parts: dict[int, list[tuple[Agent, wire.StateCopy]]]) -> int:
    """Return the smallest number of copies of any part."""
    return min(len(parts.get(part, ())) for part in range(version.parts))


def held(task: Task, turn: Turn, agent: Agent, message: wire.StateHeld) -> None:
    """Record an agent's copies. Not saved: agents repeat them to a restarted coordinator."""
    agent.copies = message.copies
    record, found = task.memory, known(task)
    complete = max((v for v, parts in found.items() if least_copies(v, parts) >= v.copies), default=None)
    if complete is not None and (record.complete is None or record.complete < complete):
        record.complete = complete
        for each in task.agents.values():
            if each.copies:
                turn.send(each, wire.StateComplete(version=complete))


def _error(task: Task, turn: Turn, _agent: Agent, message: wire.ErrorReport) -> None:
    """Doubt all present versions if a worker's parameters differ from those of others: parts may come from it."""
    if message.kind == "parameters_differ":
        task.memory.doubted = task.number
        turn.save(task)


def _usable(task: Task) -> list[tuple[wire.StateVersion, dict[int, list[tuple[Agent, wire.StateCopy]]]]]:
    """Return the versions that are held and not older than the newest checkpoint, newest first."""
    least = task.checkpoint.step if task.checkpoint else 0
    usable = [
        (version, parts)
        for version, parts in known(task).items()
        if version.step >= least and version.epoch > task.memory.doubted and least_copies(version, parts) > 0
    ]
    return sorted(usable, key=lambda each: (each[0].step, each[0]), reverse=True)


def newest(task: Task) -> int | None:
    """Return the step of the newest version from which a new life may begin, as far as agents have reported."""
    usable = _usable(task)
    return usable[0][0].step if usable else None


def offers(task: Task, turn: Turn) -> tuple[wire.StateOffer, ...]:
    """Return the versions from which the present life may begin, newest first: the same for all its founders."""
    record = task.memory
    if record.offered_in == task.life:
        return record.offered
    record.offered = tuple(_offer(version, parts) for version, parts in _usable(task)[:_OFFERED])
    record.offered_in, record.wait = task.life, "none"
    fields = {"life": task.life, "steps": [offer.version.step for offer in record.offered]}
    turn.emit_for(task, None, "memory_offered", fields)
    return record.offered


def _offer(version: wire.StateVersion, parts: dict[int, list[tuple[Agent, wire.StateCopy]]]) -> wire.StateOffer:
    ordered = [parts[part] for part in range(version.parts)]
    return wire.StateOffer(
        version=version,
        digests=tuple(tuple(dict.fromkeys(copy.digest for _, copy in copies)) for copies in ordered),
        holders=tuple(tuple(dict.fromkeys(agent.node for agent, _ in copies)) for copies in ordered),
    )


def waits(task: Task, turn: Turn, complete: Collection[str]) -> bool:
    """Whether founders have to wait for others, whose nodes hold parts of the newest version that can be restored.

    Args:
        task: without an epoch in its present life.
        turn: the present turn.
        complete: agents whose workers are all ready.
    """
    record = task.memory
    if record.offered_in != task.life or record.wait == "over":
        return False
    ready = {task.agents[agent].node for agent in complete}
    there = {task.agents[agent].node for agent in task.slots}
    for offer in record.offered:
        if all(there.intersection(nodes) for nodes in offer.holders):
            late = not all(ready.intersection(nodes) for nodes in offer.holders)
            if late and record.wait == "none":
                record.wait = "begun"
                turn.timer("memory", _WAIT_SECONDS, task=task.id)
                turn.save(task)
            return late
    return False


def _wait_over(task: Task, turn: Turn) -> None:
    if task.memory.wait == "begun":
        task.memory.wait = "over"
        turn.save(task)


def _restore(task: Task, _turn: Turn) -> None:
    if task.memory.wait == "begun":  # its timer is gone
        task.memory.wait = "none"


PART: Final = Part(
    restore=_restore,
    receivers=(on(wire.StateHeld, held), on(wire.ErrorReport, _error)),
    timers={"memory": _wait_over},
)
