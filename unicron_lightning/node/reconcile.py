"""The steps that bring a daemon's agents from their present to the ordered state: pure rules, no clock, no
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from unicron_lightning.wire.daemon import Launch, NodeTask

GIVEN_UP_SECONDS: Final = 30.0
"""torchrun failed after all allowed restarts: repairing the cause takes a while."""
KILLED_SECONDS: Final = 1.0
"""torchrun was killed, e.g. for lack of memory, which is not the job's fault."""


class AgentKey(NamedTuple):
    """Identifies a torchrun agent of a node over its restarts."""

    task: str
    submitted_at: float
    slot: str


@dataclass(frozen=True, kw_only=True)
class AgentState:
    """A torchrun agent known to the daemon; times as by time.monotonic().

    Attributes:
        running: whether its process exists.
        stopping: whether it was ordered to end.
        code: exit code of the last end, see `NodeTask`.
        ended_at: time of the last end.
    """

    running: bool
    stopping: bool = False
    code: int | None = None
    ended_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DueSteps:
    """Steps to take now.

    Attributes:
        start: agents to start.
        stop: agents to stop.
        forget: agents that have ended and are no longer wanted.
        wake_at: time of the next review without an event; None: not needed.
    """

    start: tuple[Launch, ...] = ()
    stop: tuple[AgentKey, ...] = ()
    forget: tuple[AgentKey, ...] = ()
    wake_at: float | None = None


def key_of(each: Launch | NodeTask) -> AgentKey:
    """Return the agent's key."""
    return AgentKey(each.job.name, each.job.submitted_at, each.slot)


def steps(wanted: Sequence[Launch], known: Mapping[AgentKey, AgentState], now: float) -> DueSteps:
    """Compare wanted agents with known ones.

    An agent that succeeded is not started again; one that failed is, after a pause. One that was stopped and is wanted
    again is restarted once it has ended.
    """
    start: list[Launch] = []
    wake: list[float] = []
    for launch in wanted:
        state = known.get(key_of(launch))
        if launch.ending or (state is not None and (state.running or (state.code == 0 and not state.stopping))):
            continue
        due = now if state is None else _due(state)
        if due <= now:
            start.append(launch)
        else:
            wake.append(due)
    keys = {key_of(launch) for launch in wanted}
    others = [(key, state) for key, state in known.items() if key not in keys]
    return DueSteps(
        start=tuple(start),
        stop=tuple(key for key, state in others if state.running and not state.stopping),
        forget=tuple(key for key, state in others if not state.running),
        wake_at=min(wake, default=None),
    )


def _due(state: AgentState) -> float:
    if state.stopping or state.code is None:
        return state.ended_at
    return state.ended_at + (GIVEN_UP_SECONDS if state.code > 0 else KILLED_SECONDS)
