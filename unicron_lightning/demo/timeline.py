"""The course of each failure, from the coordinator's event log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unicron_lightning.coordinator.incidents.facts import (
    AgentLoss,
    EpochPublished,
    FirstStep,
    WorkerDeath,
    read_fact,
)


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One event; ``milliseconds`` after the kill."""

    what: str
    milliseconds: float
    detail: str


def moments(events: Sequence[dict[str, Any]], killed_at: float, until: float) -> list[TimelineEvent]:
    """Events after a kill, in order; all times by one machine's clock."""
    found = [m for event in events if killed_at <= event["at"] < until for m in _moment(event)]
    return [
        TimelineEvent(what=what, milliseconds=1e3 * (at - killed_at), detail=detail)
        for at, what, detail in sorted(found)
    ]


def _moment(event: dict[str, Any]) -> Iterator[tuple[float, str, str]]:
    name, fields, at = event["name"], event["fields"], event["at"]
    match read_fact(name, fields, at):
        case WorkerDeath() as death:
            code = "" if death.code is None else f" {death.code}"
            yield at, "detected", f"worker {death.worker}: {death.cause}{code}"
        case AgentLoss(agent=agent):
            yield at, "detected", f"agent {agent} is lost"
        case EpochPublished() as epoch:
            yield at, f"epoch {epoch.number}", f"{epoch.kind}, {len(epoch.members)} workers"
        case FirstStep(name="recovered") as first:
            parts = ", ".join(map(str, first.recomputed))
            done = f"step {first.step} finished by {first.world}"
            yield first.at, "resumed", f"{done}; taken over: micro-batches {parts or 'none'}"
        case FirstStep(name="grown") as first:
            yield first.at, "rejoined", f"step {first.step} finished by {first.world}"
        case _ if name == "coordinator_restored":
            yield at, "coordinator back", "with its state"
        case _ if name == "worker_ready_to_join":
            yield at, "ready to join", f"worker {fields['worker']}"


def first_of_each(story: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """The events without repetitions by several workers."""
    seen: set[tuple[str, str]] = set()
    result = []
    for moment in story:
        key = moment.what, moment.detail
        if key not in seen:
            seen.add(key)
            result.append(moment)
    return result
