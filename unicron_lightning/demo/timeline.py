"""The course of each failure, from the coordinator's event log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


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
    fields, at = event["fields"], event["at"]
    match event["name"]:
        case "worker_died":
            code = f" {fields['code']}" if fields.get("code") is not None else ""
            yield at, "detected", f"worker {fields['worker']}: {fields['cause']}{code}"
        case "agent_lost":
            yield at, "detected", f"agent {fields['agent']} is lost"
        case "coordinator_restored":
            yield at, "coordinator back", "with its state"
        case "epoch_published":
            yield at, f"epoch {fields['number']}", f"{fields['kind']}, {len(fields['members'])} workers"
        case "worker.recovered":
            parts = ", ".join(map(str, fields["recomputed"]))
            done = f"step {fields['step']} finished by {fields['world']}"
            yield fields["at"], "resumed", f"{done}; taken over: micro-batches {parts or 'none'}"
        case "worker_ready_to_join":
            yield at, "ready to join", f"worker {fields['worker']}"
        case "worker.grown":
            yield fields["at"], "rejoined", f"step {fields['step']} finished by {fields['world']}"


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
