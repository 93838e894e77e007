"""Injected faults: the targets of an operator's order, and the faults that have struck already (docs/faults.md).

A fault is in the event log before it strikes: ``fault_injected``. An order that waits for a point of a worker's program
is logged as ``fault_ordered`` first. The task counts the strikes of each fault of a worker's own script over all its
lives, so that the replacement of a killed worker does not start from zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.state import Agent, Task
from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.fault import OF_AGENT, Fault, parse, text

NOT_ALLOWED: Final = "this coordinator does not allow fault injection: start it with coordinator.allow_injection=true"
COORDINATOR: Final = "coordinator"
"""The only target of a fault that strikes the coordinator."""


def refusal(task: Task, order: ev.InjectFault) -> str | None:
    """Return why an order cannot be carried out now; None if it can."""
    fault = order.fault
    if fault.task not in (None, task.id):
        return f"{text(fault)!r}: the task is {task.id}"
    if fault.rate is not None or fault.after is not None:
        return f"{text(fault)!r}: an order strikes at once; expected no rate= and no after="
    if fault.joiner:
        return f"{text(fault)!r}: joiners are unknown before they join; expected no joiner="
    if not targets(task, order):
        members = [
            f"{rank} on {member.node}{'' if _reached(task, member.agent) else ', whose agent is away'}"
            for rank, member in enumerate(task.members())
        ]
        return f"{text(fault)!r} has no target; the task's ranks are: {', '.join(members) or 'none yet'}"
    return None


def targets(task: Task, order: ev.InjectFault) -> list[str]:
    """Return an order's targets: workers, agents, or the coordinator; none whose agent is away and unreachable."""
    fault = order.fault
    if fault.kind == "kill coordinator" and not fault.waits:
        return [COORDINATOR]
    members, live = task.members(), {member.worker for member in task.live_members()}
    alone = replace(fault, task=None) if fault.kind != "kill coordinator" else Fault(kind="kill", rank=fault.rank)
    struck = [members[rank] for rank in alone.victims([m.node for m in members], order.draw)] if members else []
    struck = [member for member in struck if _reached(task, member.agent)]
    if fault.kind in ("kill agent", "drop network") and not fault.waits:
        if not members and fault.rank is None:  # no members yet, or a plain script
            there = [agent for agent in task.agents.values() if fault.node in (None, agent.node)]
            return [agent.id for agent in there if _reached(task, agent.id)][:1]
        return list(dict.fromkeys(member.agent for member in struck))
    return [member.worker for member in struck if member.worker in live]


def _reached(task: Task, agent: str) -> bool:
    return agent in task.agents and task.agents[agent].conn is not None


def order(task: Task, turn: Turn, event: ev.InjectFault) -> None:
    """Carry out an order."""
    fault = event.fault
    at_once = fault.kind in OF_AGENT and not fault.waits
    for target in targets(task, event):
        if target == COORDINATOR:
            _log(task, turn, "fault_injected", fault, target=target)
            turn.actions.append(ev.Strike(signal=fault.signal))
            continue
        member = next((m for m in task.members() if target in (m.worker, m.agent)), None)
        agent = task.agents.get(target if member is None else member.agent)
        if agent is None:
            continue
        about: dict[str, Any] = {"agent": agent.id, "node": agent.node}
        if member is not None:
            about |= {"worker": member.worker, "rank": task.members().index(member)}
        _log(task, turn, "fault_injected" if at_once else "fault_ordered", fault, target=target, **about)
        # The target is addressed directly, so the fault's own selectors are dropped.
        here = replace(fault, task=None, node=None, rank=None if fault.kind == "kill coordinator" else "all")
        worker = None if target == agent.id else target
        named = text(replace(fault, task=None))
        turn.send(agent, wire.Inject(worker=worker, key=f"order of {turn.now:.6f}", fault=text(here), ordered=named))


def due(task: Task, turn: Turn, agent: Agent, message: wire.FaultDue) -> None:
    """Answer whether a fault of a worker's script may strike. A repeated question is answered again but counts once."""
    number, last = task.struck.get(message.key, (0, ""))
    reason = ""
    try:
        fault = parse(message.fault)
    except ConfigError as error:
        fault, reason = Fault(kind="kill"), str(error)
    of_coordinator = fault.kind == "kill coordinator"
    if of_coordinator and not turn.limits.allow_injection:
        reason = NOT_ALLOWED
    elif not reason and last != message.claim and message.most is not None and number >= message.most:
        reason = f"it has struck {number} times"
    if not reason and last != message.claim:
        task.struck[message.key] = (number + 1, message.claim)
        about = {"worker": message.worker, "agent": agent.id, "node": agent.node, **message.fields}
        target = COORDINATOR if of_coordinator else message.worker
        _log(task, turn, "fault_injected", fault, target=target, **about)
        if of_coordinator:
            turn.actions.append(ev.Strike(signal=fault.signal))
    answer = wire.FaultRecorded(
        worker=message.worker, claim=message.claim, fault=message.fault, strikes=not reason, reason=reason
    )
    turn.send(agent, answer)


def _log(task: Task, turn: Turn, name: str, fault: Fault, **about: Any) -> None:
    turn.emit_for(task, None, name, {"fault": text(fault), "kind": fault.kind, **about, "at": turn.now})
