"""What a daemon has to do to make what runs what shall run: pure rules, without clock or processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from unicron_lightning.nodewire import Launch, NodeTask

GIVEN_UP_SECONDS: Final = 30.0
"""torchrun gave the agent up, after all restarts that it allows: whoever mends the cause needs longer than a moment."""
KILLED_SECONDS: Final = 1.0
"""torchrun was killed, e.g. for want of memory: that is no fault of the job's."""


class Key(NamedTuple):
    """Names a torchrun agent of a node over its restarts."""

    task: str
    submitted_at: float
    slot: str


@dataclass(frozen=True, kw_only=True)
class State:
    """A torchrun agent that is known to the daemon; times as by time.monotonic().

    Attributes:
        running: whether its process is there.
        stopping: whether it was told to end.
        code: how it ended the last time, see `NodeTask`.
        ended_at: when.
    """

    running: bool
    stopping: bool = False
    code: int | None = None
    ended_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What to do now.

    Attributes:
        start: agents to start.
        stop: agents to stop.
        forget: agents that have ended and are not wanted any more.
        wake_at: when to look again although nothing has happened; None: then not.
    """

    start: tuple[Launch, ...] = ()
    stop: tuple[Key, ...] = ()
    forget: tuple[Key, ...] = ()
    wake_at: float | None = None


def key_of(each: Launch | NodeTask) -> Key:
    """The agent's name."""
    return Key(each.job.name, each.job.submitted_at, each.slot)


def steps(wanted: Sequence[Launch], known: Mapping[Key, State], now: float) -> Steps:
    """Compare what shall run with what does.

    An agent that ended well is not started again; one that failed is, after a pause. One that was stopped and is
    wanted again is started anew once it has ended.
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
    return Steps(
        start=tuple(start),
        stop=tuple(key for key, state in others if state.running and not state.stopping),
        forget=tuple(key for key, state in others if not state.running),
        wake_at=min(wake, default=None),
    )


def _due(state: State) -> float:
    if state.stopping or state.code is None:
        return state.ended_at
    return state.ended_at + (GIVEN_UP_SECONDS if state.code > 0 else KILLED_SECONDS)
