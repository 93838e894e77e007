"""The severity workflow of one task: a pure state machine, with a function for each input that returns `Decision`s.

It keeps a `SeverityRecord`, which it changes in place; times are arguments. It distinguishes failures *with progress*
between them from those without. A task that finishes steps may fail any number of times: that is its purpose.

*Progress* is a step beyond all steps ever known to be finished. An *attempt* is a settled epoch. It has failed if one
of its workers failed, and counts if it got no further than the newest known step (`SeverityRecord.mark`), or finished
no step at all. Failures on the way back to that step from a checkpoint do not count, but the life does, once, if no
worker survives it.

The progress of an epoch is known when the next one is settled, as all members then report their position: its failures
are judged there, or where a new life begins.

Failures count against a node if they are *soon*: of workers that did not take part in ``soon_steps`` steps. A worker
that does ends its node's series.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from unicron_lightning.coordinator.events import Limits
from unicron_lightning.coordinator.severity.record import (
    EQUAL_FAILURES,
    KEPT,
    SEVERITY,
    Failure,
    Joined,
    Recurrence,
    Series,
    SeverityRecord,
)
from unicron_lightning.coordinator.severity.rules import RECURRENCES, Case, Decision, FailureContext, Rule, first

ATTEMPT_SECONDS: Final = 1.0
"""Time within which failures at a step are one attempt to get past it."""
_NUMBERS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Parts of an exception's text that may differ each time."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """An error occurred.

    Attributes:
        failure: the error; with a worker if the error ended it.
        round: round of the agent's rendezvous in which a worker that is no member failed.
        training: whether any worker has the task's state.
        sent: whether only another process sends this signal (KILL, TERM): before the worker is a member, it does not
            incriminate the node.
        registered: whether a worker of the task has ever registered.
    """

    failure: Failure
    round: int = 0
    training: bool = True
    sent: bool = False
    registered: bool = True


def named(record: SeverityRecord, agent: str) -> None:
    """An agent's worker reported a failed connection."""
    record.named[agent] = record.named.get(agent, 0) + 1


def settled(here: Case, step: int, members: Mapping[str, str]) -> list[Decision]:
    """A new epoch has all its members' reports: the newest reported step, and the node of each member."""
    record = here.record
    decisions = _judge(here, step)
    record.base = record.step
    before, joined = record.joined, record.step
    record.joined = {w: before.get(w) or Joined(node=node, step=joined) for w, node in members.items()}
    return decisions


def overdue(here: Case, agents: Iterable[tuple[str, str]]) -> list[Decision]:
    """The newest epoch has timed out: ``agents`` and nodes whose workers it still waits for."""
    step, now = here.record.step, here.now
    stuck = [Failure(kind="recovery_stuck", node=node, agent=agent, step=step, at=now) for agent, node in agents]
    return [decision for failure in stuck for decision in _alive(here, failure)]


def suspect(record: SeverityRecord, view: FailureContext) -> tuple[str, str, str] | None:
    """Return the suspect of a connection that keeps failing: agent, node, and reason; None without members.

    Both ends of a broken connection report it, so reports alone may not decide: among the agents named most often, the
    suspect is the last in rank order, which has joined last.
    """
    if not view.members:
        return None
    order = list(dict.fromkeys(view.members))
    most = max(record.named.get(agent, 0) for agent, _ in order)
    foremost = [(agent, node) for agent, node in order if record.named.get(agent, 0) == most]
    why = "named most often" if len(foremost) == 1 and most else "unknown: the last in rank order"
    return (*foremost[-1], why)


def occurred(here: Case, seen: Error) -> list[Decision]:
    """An error occurred."""
    record, failure = here.record, seen.failure
    alone = failure.worker in record.joined or not seen.training
    case = replace(here, error=failure, alone=alone)
    if case.wrong_value:
        return [_refused(case)]
    if failure.worker is None and SEVERITY[failure.kind] == "SEV3":
        return _connection(here, failure)
    if failure.worker is None:
        return _alive(here, failure)
    if failure.worker in record.joined:
        # its progress is not known yet
        record.unjudged.append(failure)
        return []
    if record.rounds.get(failure.agent) == seen.round:
        return []
    record.rounds[failure.agent] = seen.round
    _remember(record, failure)
    if not seen.training:
        record.starts[failure.agent] = record.starts.get(failure.agent, 0) + 1
        if not (seen.registered or seen.sent):
            record.exits[failure.agent] = record.exits.get(failure.agent, 0) + 1
        if failure.fault and seen.registered:
            _repeat(record, f"{failure.fault} (agent {failure.agent})")
    if not seen.sent:
        _count(record, failure)
    return [*_decide(here, failure), *_give_up(here)]


def _connection(here: Case, failure: Failure) -> list[Decision]:
    case, record, now = replace(here, error=failure), here.record, here.now
    rule = first("SEV3", case)
    assert rule is not None
    facts: dict[str, object] = {"times": case.retried}
    if rule.action == "stop":
        facts = {"step": failure.step, "nodes": [failure.node], "causes": [failure.cause]}
        return [
            Decision(rule=rule.name, action="stop", error=None, reason=f"{rule.name}: {failure.cause}", facts=facts)
        ]
    if rule.action == "tell":
        return [Decision(rule=rule.name, action="tell", error=failure, reason=failure.cause, facts={})]
    if rule.action == "reattempt" or (blamed := suspect(record, here.view)) is None:
        record.reattempts.append(now)
        return [Decision(rule=rule.name, action="reattempt", error=failure, reason=failure.cause, facts=facts)]
    agent, node, why = blamed
    reason = f"the connection failed {case.retried + 1} times at step {record.step}; suspect {agent}, {why}"
    escalated = Failure(kind="keeps_failing", node=node, agent=agent, cause=reason, step=record.step, at=now)
    if not here.limits.severity.strict:
        record.reattempts.clear()
        record.named.clear()
    decision = Decision(rule=rule.name, action="escalate", error=escalated, reason=reason, facts=facts)
    return [decision, *_alive(here, escalated)]


def _alive(here: Case, failure: Failure) -> list[Decision]:
    """Handle an error of an agent as a whole: it is decided at once, but it may also fail the epoch."""
    here.record.unjudged.append(failure)
    _count(here.record, failure)
    return _decide(here, failure)


def progressed(record: SeverityRecord, step: int, limits: Limits) -> None:
    """This number of steps is finished in this life."""
    if step > record.step:
        record.step = step
        record.reattempts.clear()
        record.named.clear()
        for member in record.joined.values():
            if step - member.step >= limits.severity.soon_steps:
                _lasted(record, member)
    if step > record.mark:
        record.mark = step
        record.attempts = record.lives = 0
        record.starts.clear()
        record.exits.clear()
        record.raised.clear()
        record.faults.clear()
        record.failed.clear()


def _judge(here: Case, step: int) -> list[Decision]:
    """Judge the failures of the ended epoch, now that its progress is known."""
    record, limits, now = here.record, here.limits, here.now
    lasted: list[tuple[Failure, Joined]] = []
    counted: set[str] = set()
    for failure in record.unjudged:
        came = record.joined.pop(failure.worker or "", None)  # it has no part in steps that finish from here on
        if came is None:
            continue  # counted and decided on when it occurred
        if max(step, record.step) - came.step < limits.severity.soon_steps:
            _count(record, failure)
        else:
            _lasted(record, came)
            lasted.append((failure, came))
            # A restart follows, which is the only one: agents of one node that fail together count once.
            if limits.severity.strict and SEVERITY[failure.kind] != "SEV1" and failure.node not in counted:
                counted.add(failure.node)
                _count(record, failure)
    failures, record.unjudged = record.unjudged, []
    progressed(record, step, limits)
    for failure in failures:
        _remember(record, failure)
        if failure.fault and failure.fault not in record.raised:
            record.raised.append(failure.fault)
        _compare(record, failure)
    for failure, came in lasted:
        _recur(record, failure, came, limits)
    failed = any(failure.kind != "lost_connection" for failure in failures)
    if failed and record.step in (record.mark, record.base) and _is_another(record.attempted_at, now):
        record.attempts, record.attempted_at = record.attempts + 1, now
    new = [failure for failure in failures if failure.worker is not None]
    decided = [decision for failure in new for decision in _decide(here, failure)]
    return [*decided, *_give_up(here)]


def _compare(record: SeverityRecord, failure: Failure) -> None:
    """Compare a member's failure with the last one of its agent.

    A worker that raises in its first validation as its predecessor did will be replaced again and again, however many
    steps the others finish meanwhile.
    """
    if failure.worker is None or failure.kind == "lost_connection":
        return
    if failure.place and failure.first and record.places.get(failure.agent) == failure.place:
        record.faults[f"{failure.place} (agent {failure.agent})"] = 2
    record.places[failure.agent] = failure.place


def _recur(record: SeverityRecord, failure: Failure, came: Joined, limits: Limits) -> None:
    """Compare an exception of a member that had lasted with the last ones of the same text, of any agent.

    Chance does not raise it at multiples of a number of steps, or after as many steps of each worker: of errors that
    strike one step in twenty, about one in a thousand would be taken for regular, of rarer ones fewer. The others
    finish the steps meanwhile, so no other rule ends the replacements.
    """
    if not failure.place:
        return
    key = f"{failure.place}: {_NUMBERS.sub('#', failure.cause)}"
    new = Recurrence(step=failure.step, age=failure.step - came.step, at=failure.at)
    before = record.recurring.pop(key, [])
    counted = [each for each in before if each.step < new.step and new.at - each.at < limits.severity.cordon_window]
    last = [*counted, new][-RECURRENCES:]
    record.recurring = {**dict([*record.recurring.items()][1 - KEPT :]), key: last}
    distances = [later.step - each.step for each, later in pairwise(last)]
    if len(last) < RECURRENCES or min(distances) < limits.severity.soon_steps:
        return
    period = math.gcd(*distances)
    # At each multiple, as code of rank 0; or at the first one that each worker reached, if it starts for longer.
    regular = len({*distances}) == 1 or all(each.age <= period for each in last[1:])
    if regular and period >= limits.severity.soon_steps:
        record.faults[f"{failure.place}, every {period} steps"] = RECURRENCES
    elif len({each.age for each in last}) == 1:
        record.faults[f"{failure.place}, after {new.age} steps of each worker"] = RECURRENCES


def _is_another(before: float | None, now: float) -> bool:
    """Whether a failure is another attempt than the last one: workers that are killed together die one by one."""
    return before is None or now - before >= ATTEMPT_SECONDS


def new_life(here: Case) -> list[Decision]:
    """No worker that has the task's state is left."""
    record = here.record
    # Counted once per life: its members often fail by the same exception, one after the other.
    raised, record.raised = [*record.raised, *(failure.fault for failure in record.unjudged)], []
    for fault in _unique(filter(None, raised)):
        _repeat(record, fault)
    if any(failure.kind != "lost_connection" for failure in record.unjudged):
        record.lives += 1
    decisions = _judge(here, record.step)
    record.raised.clear()
    record.step = record.base = 0
    record.joined.clear()
    record.reattempts.clear()
    record.named.clear()
    return decisions


def _decide(here: Case, failure: Failure) -> list[Decision]:
    case, record = replace(here, error=failure), here.record
    # For a process that is gone, SEV3's reaction in place comes too late.
    severity = max(SEVERITY[failure.kind], "SEV2", key=("SEV3", "SEV2", "SEV1").index)
    rule = first(severity, case)
    assert rule is not None
    facts: dict[str, object] = {"severity": severity}
    if "needed" in rule.name:
        facts["withheld"] = "cordon"
    what = failure.what
    reason = f"{case.in_a_row} failures in a row, the last: {what}" if case.blamed else what
    if rule.action == "cordon":
        record.series.pop(failure.node, None)
        record.attempts = 0  # the task continues without it: that is another attempt
        record.starts.clear()
        record.exits.clear()
    return [Decision(rule=rule.name, action=rule.action, error=failure, reason=reason, facts=facts)]


def _give_up(here: Case) -> list[Decision]:
    record, rule = here.record, first("judged", here)
    if rule is None:
        return []
    counts = {"attempts": record.attempts, "lives": record.lives, "starts": record.most_starts}
    last = [f"{failure.worker or failure.agent}: {failure.what}" for failure in record.failed[-5:]]
    facts = {
        "step": record.mark,
        **counts,
        "nodes": _unique(failure.node for failure in record.failed),
        "causes": _unique(failure.what for failure in record.failed),
        "last": last,
    }
    if rule.name == "the program fails":
        return [_hopeless(record, rule, facts)]
    number = {
        "no way into a layout": record.tries,
        "the script does not start": record.most_exits,
        "no way past a step": record.attempts,
        "no way past a checkpoint": record.lives,
        "no way to start": record.most_starts,
    }[rule.name]
    last_of_each = {failure.what: each for failure, each in zip(record.failed[-5:], last, strict=True)}
    reason = f"{rule.name}: failed {number} times at step {record.mark}; the last: {'; '.join(last_of_each.values())}"
    printed = next((failure.output for failure in reversed(record.failed) if failure.output), ())
    reason = "\n".join([reason, *(f"  {line}" for line in printed)])
    if rule.action == "revert":
        record.begin_afresh()
    return [Decision(rule=rule.name, action=rule.action, error=None, reason=reason, facts=facts)]


def _hopeless(record: SeverityRecord, rule: Rule, facts: dict[str, object]) -> Decision:
    """Stop a task whose program raises the same exception at each try."""
    fault = record.repeated
    assert fault is not None
    own = [each for each in record.failed if any(name and name in fault for name in (each.fault, each.place))]
    last = (own or record.failed)[-1]
    facts = {**facts, "fault": fault, "times": record.faults[fault]}
    return _stopped(rule, f"{last.cause} (raised again, {fault})", last, facts)


def _refused(case: Case) -> Decision:
    """Stop a task that has a wrong setting."""
    rule, failure = first("SEV2", case), case.error
    assert rule is not None and failure is not None
    facts = {"step": case.record.mark, "nodes": [failure.node], "causes": [failure.cause]}
    return _stopped(rule, failure.cause, failure, facts)


def _stopped(rule: Rule, reason: str, failure: Failure, facts: dict[str, object]) -> Decision:
    """Decide the end of the task, with the last frames of the exception."""
    lines = [f"{rule.name}: {reason}", *(f"  at {frame}" for frame in failure.frames)]
    return Decision(rule=rule.name, action="stop", error=None, reason="\n".join(lines), facts=facts)


def _repeat(record: SeverityRecord, fault: str) -> None:
    record.faults[fault] = record.faults.get(fault, 0) + 1


def _count(record: SeverityRecord, failure: Failure) -> None:
    """Add a failure to its node's series, if one node may have caused it."""
    if failure.kind == "gradients_differ":
        return
    series = record.series.setdefault(failure.node, Series(mark=record.mark))
    series.times = [*series.times, failure.at][-KEPT:]
    series.step = record.step


def _lasted(record: SeverityRecord, member: Joined) -> None:
    """End the series of a member's node if the member joined after its failures and has lasted."""
    series = record.series.get(member.node)
    if series is not None and member.step >= series.step:
        del record.series[member.node]


def _remember(record: SeverityRecord, failure: Failure) -> None:
    record.failed = [*record.failed, failure][-KEPT:]
    record.latest = [*record.latest, failure][-EQUAL_FAILURES:]


def _unique(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
