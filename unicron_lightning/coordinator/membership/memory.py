"""States in the agents' memory: which version is complete, and from which ones a new life may begin.

The coordinator knows of each copy its version, part, holder and digest. A version that is held with all its copies
makes older ones superfluous. One that is held with at least one copy of each part is offered to the founders of a new
life, before the newest persistent checkpoint, unless that one is newer. The founders get the offer with their first
epoch, when agents have computed the digests of what their workers had handed over at their ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.severity.record import DOUBTING
from unicron_lightning.coordinator.state import Agent, Task

_OFFERED: Final = 3
_WAIT_SECONDS: Final = 30.0
"""Seconds that a new life waits for workers of nodes that hold parts of a version, and for digests."""
_Copies = dict[int, list[tuple[Agent, wire.StateCopy]]]
"""Copies of a version by part, with the agents that hold them."""


def known(task: Task) -> dict[wire.StateVersion, _Copies]:
    """Return the copies of each version by part."""
    found: dict[wire.StateVersion, _Copies] = {}
    for agent in task.agents.values():
        for copy in agent.copies:
            found.setdefault(copy.version, defaultdict(list))[copy.part].append((agent, copy))
    return found


def least_copies(version: wire.StateVersion, parts: _Copies) -> int:
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
    """Doubt all present versions if a worker's parameters or gradients are wrong: parts may come from it.

    Of gradients that differ without a majority it is not known whose, and all workers end.
    """
    if message.kind in DOUBTING:
        task.memory.doubted = task.number
        turn.save(task)


def _usable(task: Task) -> list[tuple[wire.StateVersion, _Copies]]:
    """Return the versions that are held and not older than the newest checkpoint, newest first."""
    least = (task.checkpoint.fit, task.checkpoint.step) if task.checkpoint else (0, 0)
    usable = [
        (version, parts)
        for version, parts in known(task).items()
        if (version.fit, version.step) >= least
        and version.epoch > task.memory.doubted
        and least_copies(version, parts) > 0
    ]
    return sorted(usable, key=lambda each: (each[0].fit, each[0].step, each[0]), reverse=True)


def newest(task: Task) -> int | None:
    """Return the step of the newest version from which a new life may begin, as far as agents have reported."""
    usable = _usable(task)
    return usable[0][0].step if usable else None


def offered(task: Task) -> tuple[wire.StateOffer, ...]:
    """Return the versions that were offered to the founders of the present life."""
    return task.memory.offered if task.memory.offered_in == task.life else ()


def offer(task: Task, turn: Turn) -> tuple[wire.StateOffer, ...]:
    """Decide from which versions a new life may begin, before its first epoch; return them, newest first."""
    record = task.memory
    if task.life > 1 and record.offered_in != task.life:
        found = [_offer(version, parts) for version, parts in _usable(task)]
        record.offered = tuple(offer for offer in found if all(offer.digests))[:_OFFERED]
        record.offered_in, record.wait = task.life, "none"
        turn.cancel("memory", task=task.id)
        steps = [offer.version.step for offer in record.offered]
        turn.emit_apart(task, "memory_offered", life=task.life, steps=steps)
    return offered(task)


def _offer(version: wire.StateVersion, parts: _Copies) -> wire.StateOffer:
    ordered = [[(agent, copy) for agent, copy in parts[part] if copy.digest] for part in range(version.parts)]
    return wire.StateOffer(
        version=version,
        digests=tuple(tuple(dict.fromkeys(copy.digest for _, copy in copies if copy.digest)) for copies in ordered),
        holders=tuple(tuple(dict.fromkeys(agent.node for agent, _ in copies)) for copies in ordered),
    )


def waits(task: Task, turn: Turn, complete: Collection[str]) -> bool:
    """Whether founders have to wait for workers of nodes that hold parts of a version, or for digests of its copies.

    Args:
        task: without an epoch in its present life.
        turn: the present turn.
        complete: agents whose workers are all ready.
    """
    record = task.memory
    if task.life == 1 or record.wait == "over" or not _late(task, complete):
        return False
    if record.wait == "none":
        record.wait = "begun"
        turn.timer("memory", _WAIT_SECONDS, task=task.id)
        turn.save(task)
    return True


def _late(task: Task, complete: Collection[str]) -> bool:
    """Whether the newest version that can be restored is not yet held by founders, or its digests are not known."""
    agents = task.agents
    ready = {agents[agent].node for agent in complete}
    there = {agents[agent].node for agent in task.slots}
    for version, parts in _usable(task)[:_OFFERED]:
        nodes = [{agent.node for agent, _ in parts[part]} for part in range(version.parts)]
        if all(not there.isdisjoint(each) for each in nodes):
            computed = all(copy.digest for copies in parts.values() for _, copy in copies)
            return not computed or any(ready.isdisjoint(each) for each in nodes)
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
