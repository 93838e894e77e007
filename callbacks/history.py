"""A task's incidents as one of its workers learns of them: from the coordinator's notices and its own events.

Pure but for a lock: notices arrive in the control thread, queries come from the training thread and a display's thread.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from unicron_lightning import wire
from unicron_lightning.coordinator.incidents.facts import (
    PHASES,
    BrokenConnection,
    Fact,
    FirstStep,
    IncidentClosed,
    cause_of,
    explains,
    read_fact,
)

KEPT: Final = 32
"""Number of incidents that are kept individually; all are counted."""


@dataclass(kw_only=True)
class Sighting:
    """An incident as far as it is known. Times of day are time.time() of the reporting process, durations are seconds.

    Attributes:
        cause, where: from the event that opened the incident; ``where`` is a node, agent or worker, or empty.
        transition: until the bill arrives, the time from the coordinator's report to this worker's next finished step.
        recomputed: micro-batches that all ranks together recomputed.
        outcome: reason of its end; None while the task is not restored.
    """

    id: str
    cause: str
    where: str
    known_at: float
    detection: float | None = None
    transition: float | None = None
    sub_healthy: float | None = None
    recomputed: int = 0
    outcome: str | None = None

    def line(self) -> str:
        """Describe the incident in one line."""
        about = " ".join(filter(None, [self.id, self.cause, self.where]))
        times = [(name, getattr(self, name)) for name in PHASES]
        parts = [f"{name.replace('_', '-')} {in_words(seconds)}" for name, seconds in times if seconds is not None]
        if self.recomputed:
            parts.append(f"{self.recomputed} micro-batches computed again")
        state = self.outcome or ("training continues" if self.transition is not None else "recovering")
        return f"{about}: {', '.join([state, *parts])}"


class History:
    """All incidents since the task began, or since this worker started if no other worker could send its history."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._recomputed = 0
        self._kept: list[Sighting] = []
        self._news: list[tuple[Sighting, str]] = []
        self._conditions: dict[str, str] = {}

    @property
    def count(self) -> int:
        """Number of incidents so far."""
        return self._count

    @property
    def recomputed(self) -> int:
        """Number of micro-batches recomputed so far."""
        return self._recomputed

    def newest(self, number: int) -> list[Sighting]:
        """Return copies of the last incidents, oldest first."""
        with self._lock:
            return [dataclasses.replace(sighting) for sighting in self._kept[-number:]]

    @property
    def conditions(self) -> dict[str, str]:
        """Descriptions of present slowness, by ``degraded`` or the name of a straggling worker."""
        with self._lock:
            return dict(self._conditions)

    def news(self) -> list[tuple[Sighting, str]]:
        """Return the changes since the last call: incidents as they were then, with ``recovered`` or ``closed``."""
        with self._lock:
            news, self._news = self._news, []
            return news

    def take(self, notice: wire.Notice) -> None:
        """Process a notice, or an event of this worker."""
        fact = read_fact(notice.name, notice.fields, notice.at)
        with self._lock:
            if notice.incident is not None:
                self._of_incident(notice, notice.incident, fact)
            elif isinstance(fact, FirstStep) and fact.name == "recovered":
                self._recovered(fact)
            elif notice.name in ("task_degraded", "straggler"):
                self._conditions[_who(notice)] = _slowness(notice)
            elif notice.name in ("task_normal", "straggler_over"):
                self._conditions.pop(_who(notice), None)

    def state(self) -> dict[str, Any]:
        """Return the history as plain data, for joiners and checkpoints."""
        with self._lock:
            kept = [dataclasses.asdict(sighting) for sighting in self._kept]
            counts = {"count": self._count, "recomputed": self._recomputed}
            return {**counts, "kept": kept, "conditions": dict(self._conditions)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Merge another worker's `state`, for incidents that this worker has not seen itself."""
        with self._lock:
            own = {sighting.id for sighting in self._kept}
            older = [Sighting(**each) for each in state["kept"] if each["id"] not in own]
            self._kept = [*older, *self._kept][-KEPT:]
            self._count = state["count"] + len(own - {each["id"] for each in state["kept"]})
            self._recomputed += state["recomputed"]
            self._conditions = {**state["conditions"], **self._conditions}

    def _of_incident(self, notice: wire.Notice, name: str, fact: Fact | None) -> None:
        sighting = next((each for each in reversed(self._kept) if each.id == name), None)
        if sighting is None:
            cause = cause_of(fact) or str(notice.fields.get("cause", notice.name))
            sighting = Sighting(id=name, cause=cause, where=_where(notice), known_at=notice.at)
            self._kept = [*self._kept, sighting][-KEPT:]
            self._count += 1
        if sighting.cause == BrokenConnection.event and explains(fact):
            sighting.cause, sighting.where = cause_of(fact) or sighting.cause, _where(notice) or sighting.where
        if isinstance(fact, IncidentClosed):
            for phase in PHASES:
                setattr(sighting, phase, fact.bill.phases[phase].seconds)
            sighting.cause, sighting.outcome = fact.bill.cause, fact.outcome
            self._news.append((dataclasses.replace(sighting), "closed"))

    def _recovered(self, step: FirstStep) -> None:
        number = len(step.recomputed)
        self._recomputed += number
        open_ones = [each for each in self._kept if each.outcome is None and each.transition is None]
        for sighting in open_ones:
            sighting.transition = max(0.0, step.at - sighting.known_at)
        if open_ones:
            open_ones[-1].recomputed += number
            self._news.append((dataclasses.replace(open_ones[-1]), "recovered"))


def in_words(seconds: float) -> str:
    """Format a duration briefly: ``0.4 ms``, ``116 ms``, ``4.4 s``."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def _where(notice: wire.Notice) -> str:
    return str(notice.fields.get("node") or notice.fields.get("worker") or notice.fields.get("agent") or "")


def _who(notice: wire.Notice) -> str:
    return str(notice.fields.get("worker", "degraded")) if notice.name.startswith("straggler") else "degraded"


def _slowness(notice: wire.Notice) -> str:
    fields = notice.fields
    if notice.name == "task_degraded":
        return f"steps take {fields.get('times')} times as long as usual"
    who = f"rank {fields.get('rank')} on {fields.get('node')}"
    return f"straggler: {who}, whose micro-batches take {fields.get('times')} times as long as its peers'"
