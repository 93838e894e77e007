"""The pairwise check: before an agent has workers it exchanges data with an agent of another node of its task.

Rules:

* Partners are chosen in this order: agents that have a slot, those that have passed, those that wait; suspects come
  last in each group. A node takes part in one exchange at a time, so that no exchange slows another.
* A successful exchange admits both agents, if the partner waits too. Agents of a node that has passed, or has workers,
  pass with it.
* After a failed exchange a second partner is tried. If that fails too, the agent's node is to blame. If it succeeds,
  the node is admitted and the first partner is *suspected*: an event is logged, and a partner that waits itself and was
  admitted only because it was alone has to pass now.
* Without a second partner the node is not admitted, as its workers could not reach the others'; the fault may be in
  either link.
* An agent that is not admitted tries again after a while, and at once when a partner leaves or a new one registers.
* An agent with no possible partner is admitted.
* A failed exchange counts once the partner has reported its side; if the partner is gone, the exchange is ignored.
"""

from __future__ import annotations

from typing import Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.part import Part, on
from unicron_lightning.coordinator.severity import reports
from unicron_lightning.coordinator.state import Agent, Task
from unicron_lightning.detection import pairs

ANSWER_SECONDS: Final = 10.0
"""Seconds to wait for an agent's report beyond an exchange's limit: more than the longest tolerated silence."""
KIND: Final = "link_degraded"


def review(task: Task, turn: Turn) -> None:
    """Start the exchanges that are due; admit or bar agents whose result is known. Idempotent."""
    limits = turn.limits.pairs
    if not limits.check or task.over is not None or task.finishing or task.restoring or task.rebuilding:
        return
    for agent in task.agents.values():
        _forget_gone(task, turn, agent)
    for agent in sorted(turn.undrained(task.queue()), key=lambda agent: agent.arrived):
        paired = agent.paired
        if agent.conn is None or agent.unhealthy or paired.passed or paired.check or paired.rests:
            continue
        fellow = next((one for one in task.agents.values() if one.node == agent.node and _is_in(task, one)), None)
        if fellow is not None:
            _admit(task, turn, agent, fellow.paired.proof)
        else:
            _go_on(task, turn, agent)


def receive(task: Task, turn: Turn, agent: Agent, message: wire.PairServing | wire.PairResult) -> None:
    """Handle an agent's report of an exchange."""
    newcomer = task.agents.get(message.check.rpartition("#")[0])
    if newcomer is None or newcomer.paired.check != message.check:
        return  # the exchange is over
    paired = newcomer.paired
    partner = task.agents.get(paired.partner)
    if isinstance(message, wire.PairServing):
        if agent is partner and not paired.asked:
            paired.asked = True
            _ask(task, turn, newcomer, partner, message)
    elif agent is newcomer:
        _newcomer_told(task, turn, newcomer, message)
    elif agent is partner and message.cause:
        if paired.asked and not paired.own_cause:
            paired.partner_cause = message.cause
            turn.save(task)
        else:
            _failed(task, turn, newcomer, paired.own_cause or f"it cannot serve: {message.cause}", message.cause)


def timer_fired(task: Task, turn: Turn, agent: Agent) -> None:
    """Retry an agent that was barred, or fail its exchange that has timed out."""
    paired = agent.paired
    if paired.rests:
        paired.rests, paired.bad = False, []
        turn.save(task)
    elif paired.check:
        silent = "its agent does not answer" if not paired.asked else "this agent sent no report"
        _failed(task, turn, agent, paired.own_cause or silent, "nothing" if paired.own_cause else "")


def restore(task: Task, _turn: Turn) -> None:
    """Restore a task of an earlier coordinator process, whose timers are gone: exchanges start over."""
    for agent in task.agents.values():
        agent.paired.ended()
        agent.paired.rests, agent.paired.bad = False, []


def _is_in(task: Task, agent: Agent) -> bool:
    return agent.paired.passed or agent.id in task.slots


def _forget_gone(task: Task, turn: Turn, agent: Agent) -> None:
    """Discard exchanges with partners that have left."""
    paired = agent.paired
    if paired.check and paired.partner not in task.agents:
        paired.ended()
        turn.cancel("pair", task=task.id, agent=agent.id)
        turn.save(task)
    bad = [each for each in paired.bad if each.agent in task.agents]
    new = paired.rests and len(bad) < pairs.PARTNERS and bool(_untried(task, turn, agent))
    if len(bad) < len(paired.bad) or new:
        paired.bad = bad
        if paired.rests:
            paired.rests = False
            turn.cancel("pair", task=task.id, agent=agent.id)
        turn.save(task)


def _untried(task: Task, turn: Turn, agent: Agent) -> list[Agent]:
    tried = {agent.node, *(each.node for each in agent.paired.bad)}
    well = (other for other in task.agents.values() if other.node not in tried and not other.unhealthy)
    return turn.undrained(well)


def _go_on(task: Task, turn: Turn, agent: Agent) -> None:
    untried = _untried(task, turn, agent)
    match pairs.conclude(agent.paired.bad, others=bool(untried), before=_came_before(task, agent)):
        case "try":
            _try(task, turn, agent, untried)
        case "admit":
            _admit(task, turn, agent, "")
        case "bar":
            _bar(task, turn, agent)


def _came_before(task: Task, agent: Agent) -> bool:
    other = task.agents.get(agent.paired.bad[-1].agent) if agent.paired.bad else None
    return other is not None and not _is_in(task, other) and agent.arrived < other.arrived


def _try(task: Task, turn: Turn, agent: Agent, untried: list[Agent]) -> None:
    running = [one for one in task.agents.values() if one.paired.check]
    busy = {task.agents[name].node for one in running for name in (one.id, one.paired.partner) if name in task.agents}
    free = [other for other in untried if other.conn is not None and other.node not in busy]
    if agent.node in busy or not free:
        return  # the end of an exchange, or an agent's return, triggers another review
    partner = min(
        free,
        key=lambda one: (one.id not in task.slots, not one.paired.passed, one.paired.suspect, one.arrived, one.id),
    )
    paired = agent.paired
    paired.count += 1
    paired.check, paired.partner = f"{agent.id}#{paired.count}", partner.id
    limits = turn.limits.pairs
    turn.send(partner, wire.PairServe(check=paired.check, amount=limits.amount))
    turn.timer("pair", limits.seconds + ANSWER_SECONDS, task=task.id, agent=agent.id)
    turn.save(task)


def _ask(task: Task, turn: Turn, agent: Agent, partner: Agent, word: wire.PairServing) -> None:
    limits = turn.limits.pairs
    order = wire.PairConnect(
        check=word.check, agent=partner.id, host=word.host, port=word.port, key=word.key, amount=limits.amount
    )
    turn.send(agent, order)
    turn.timer("pair", limits.seconds + ANSWER_SECONDS, task=task.id, agent=agent.id)
    turn.save(task)


def _newcomer_told(task: Task, turn: Turn, agent: Agent, result: wire.PairResult) -> None:
    paired = agent.paired
    wrong = pairs.fault(result, turn.limits.pairs)
    if not wrong:
        _succeeded(task, turn, agent, result)
    elif paired.partner_cause or not result.cause:
        _failed(task, turn, agent, wrong, paired.partner_cause)
    else:
        paired.own_cause = wrong
        turn.send(task.agents[paired.partner], wire.PairEnd(check=paired.check))
        turn.timer("pair", ANSWER_SECONDS, task=task.id, agent=agent.id)
        turn.save(task)


def _failed(task: Task, turn: Turn, agent: Agent, why: str, saw: str) -> None:
    paired = agent.paired
    partner = task.agents.get(paired.partner)
    if partner is not None:
        failed = pairs.FailedExchange(agent=partner.id, node=partner.node, cause=why, partner_cause=saw)
        paired.bad = [*paired.bad, failed]
    paired.ended()
    turn.cancel("pair", task=task.id, agent=agent.id)
    turn.save(task)


def _succeeded(task: Task, turn: Turn, agent: Agent, result: wire.PairResult) -> None:
    paired = agent.paired
    partner = task.agents[paired.partner]
    paired.ended()
    turn.cancel("pair", task=task.id, agent=agent.id)
    fields = {
        "agent": agent.id,
        "node": agent.node,
        "partner": partner.id,
        "partner_node": partner.node,
        "round_trip": result.round_trip,
        "sent": result.sent,
        "received": result.received,
    }
    turn.emit_for(task, None, "pair_checked", fields)
    bad = paired.bad
    _admit(task, turn, agent, partner.id)
    partner.paired.suspect = False
    if len(partner.paired.bad) < pairs.PARTNERS and not partner.paired.check:
        bad = [*bad, *partner.paired.bad]
        _admit(task, turn, partner, agent.id)
    for each in bad:
        _suspect(task, turn, each, agent)


def _suspect(task: Task, turn: Turn, bad: pairs.FailedExchange, agent: Agent) -> None:
    """Suspect an agent whose exchange with this one failed, while this one succeeded with another."""
    other = task.agents.get(bad.agent)
    if other is None or other.paired.suspect:
        return
    other.paired.suspect = True
    if other.id not in task.slots and not other.paired.proof:
        other.paired.passed = False
    fields = {"agent": other.id, "node": other.node, "by": agent.node, "cause": bad.cause}
    turn.emit_for(task, None, "link_suspected", fields)


def _admit(task: Task, turn: Turn, agent: Agent, proof: str) -> None:
    paired = agent.paired
    known, paired.passed, paired.proof = paired.passed, True, proof or paired.proof
    paired.rests, paired.bad = False, []
    turn.cancel("pair", task=task.id, agent=agent.id)
    if paired.reason:
        paired.reason = ""
        turn.emit_for(task, None, "node_healthy", {"agent": agent.id, "node": agent.node, "checks": ["exchange"]})
        turn.send(agent, wire.Barred(reason=agent.barred))
    if not known:
        turn.places_changed = True
    turn.save(task)


def _bar(task: Task, turn: Turn, agent: Agent) -> None:
    paired = agent.paired
    first = not paired.reason
    paired.reason = pairs.cause(paired.bad)
    paired.rests = True
    turn.timer("pair", turn.limits.pairs.retry, task=task.id, agent=agent.id)
    turn.save(task)
    if not first:
        return
    turn.send(agent, wire.Barred(reason=agent.barred))
    if any(one.node == agent.node and one.paired.reason for one in task.agents.values() if one is not agent):
        return  # the node was reported already
    partners = [msgspec.structs.asdict(failed) for failed in paired.bad]
    word = wire.ErrorReport(
        worker=None,
        kind=KIND,
        cause=paired.reason,
        phase="",
        step=None,
        at=turn.now,
        details={"check": "exchange", "partners": partners},
    )
    reports.handle_error(task, turn, agent, word)


PART: Final = Part(
    restore=restore,
    receivers=(on(wire.PairServing, receive), on(wire.PairResult, receive)),
    agent_timers={"pair": timer_fired},
    review=review,
)
