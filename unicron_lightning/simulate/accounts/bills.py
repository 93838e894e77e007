"""The cost of each failure of a task: detection, transition, sub-healthy.

The rules are the coordinator's (docs/monitoring.md): a failure before the task makes steps again belongs to the same
incident; of overlapping incidents, each accounts only for the capacity that the next one found.
"""

from __future__ import annotations

from unicron_lightning.coordinator.incidents.record import PHASES, Phase, left_to
from unicron_lightning.simulate.result import MICRO, SimIncident, State

_PHASE: dict[State, Phase] = {"detecting": "detection", "useful": "sub_healthy"}
"""Phases by state; all other states belong to the transition."""


class _Open:
    """An incident that is not over."""

    def __init__(self, kind: str, at: int, due: float) -> None:
        self.kind = kind
        self.at = at
        self.due = due
        self.known_at: int | None = None
        self.running_at: int | None = None
        self.micros: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self.waf: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)


class Bills:
    """Bills of one task."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._closed: list[_Open] = []

    def strikes(self, now: int, kind: str, waf: float) -> None:
        """Record a failure, with the task's WAF before it."""
        if not self.is_struck:
            self._open.append(_Open(kind, now, waf))

    @property
    def is_struck(self) -> bool:
        """Whether a failure is not recovered from yet."""
        return bool(self._open) and self._open[-1].running_at is None

    def known(self, now: int) -> None:
        """Record that the system has detected the newest failure."""
        if self._open and self._open[-1].known_at is None:
            self._open[-1].known_at = now

    def runs(self, now: int) -> None:
        """Record that the task makes steps again."""
        if self.is_struck:
            self.known(now)
            self._open[-1].running_at = now

    def forgive(self) -> None:
        """Close running incidents: the cluster's tasks have changed, so their due WAF is no longer defined."""
        kept = [incident for incident in self._open if incident.running_at is None]
        self._closed.extend(incident for incident in self._open if incident not in kept)
        self._open = kept

    def settle(self, start: int, end: int, state: State, waf: float) -> None:
        """Account for a period; incidents whose WAF is restored are closed."""
        while state == "useful" and self._open and waf >= self._open[-1].due * (1.0 - 1e-12):
            self._closed.append(self._open.pop())
        for place, incident in enumerate(self._open):
            newest = place + 1 == len(self._open)
            phase: Phase = "sub_healthy" if incident.running_at is not None else _PHASE.get(state, "transition")
            if newest and state == "recomputing":
                phase = "transition"
            had = left_to(self._open, place, waf)
            incident.micros[phase] += end - start
            incident.waf[phase] += max(0.0, incident.due - had) * ((end - start) / MICRO)

    def all(self, task: str) -> list[SimIncident]:
        """Return all incidents by start; open ones are reported with their costs so far."""
        ordered = sorted([*self._closed, *self._open], key=lambda incident: incident.at)
        return [_told(task, incident) for incident in ordered]


def _told(task: str, incident: _Open) -> SimIncident:
    return SimIncident(
        task=task,
        kind=incident.kind,
        at=incident.at / MICRO,
        known_at=None if incident.known_at is None else incident.known_at / MICRO,
        running_at=None if incident.running_at is None else incident.running_at / MICRO,
        seconds={phase: micros / MICRO for phase, micros in incident.micros.items()},
        waf_seconds=dict(incident.waf),
    )
