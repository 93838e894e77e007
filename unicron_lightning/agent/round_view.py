"""State shared by the agent's thread and torchelastic's main thread: the present rendezvous round, calls, and the
agent's registration, which describes it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from unicron_lightning import wire
from unicron_lightning.agent.options import AgentOptions
from unicron_lightning.agent.workers.roster import Roster
from unicron_lightning.errors import UnicronError

PickedT = TypeVar("PickedT")

_WAIT_SECONDS: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """The present rendezvous round, as both threads see it."""

    number: int = 0
    store: wire.Address | None = None
    local_world: int | None = None
    grant: wire.Grant | None = None
    ranks: wire.Ranks | None = None
    stop: wire.Stop | None = None
    over: wire.TaskOver | None = None
    fatal: UnicronError | None = None
    set_by_script: frozenset[str] | None = None
    """Variables that workers of this or an earlier round have set before their imports; None: none has reported."""
    lightning: bool = False
    """Whether one of these workers has imported Lightning."""

    @property
    def waiting(self) -> bool:
        """Whether the agent waits for a grant of this round, be it a warm one."""
        return self.number > 0 and self.grant is None and self.over is None


class SharedView:
    """A `RoundView` that one thread replaces and the other waits on."""

    def __init__(self) -> None:
        self._now = RoundView()
        self._changed = threading.Condition()

    @property
    def now(self) -> RoundView:
        """The present view."""
        return self._now

    def update(self, **changes: Any) -> None:
        """Replace fields of the view and wake waiting threads."""
        with self._changed:
            self._now = replace(self._now, **changes)
            self._changed.notify_all()

    def wait(self, pick: Callable[[RoundView], PickedT | None], seconds: float | None = None) -> PickedT | None:
        """Wait until ``pick`` returns a value from the view; None after ``seconds``.

        Raises:
            UnicronError: the session ended permanently, or no coordinator answered within the rendezvous time-out.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                found = pick(self._now)
                if found is not None:
                    return found
                if self._now.fatal is not None:
                    raise self._now.fatal
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                # torchelastic's signal handlers are Python code: they only run between waits.
                self._changed.wait(_WAIT_SECONDS)


_LOOK_SECONDS: Final = 0.2


def call(loop: asyncio.AbstractEventLoop, thread: threading.Thread, function: Callable[..., None], *args: Any) -> None:
    """Run a function in the loop and wait until it has run, or until the loop has ended.

    Args:
        loop: the event loop.
        thread: the thread that runs the loop.
        function: the function.
        args: its arguments.
    """
    done = threading.Event()

    def run() -> None:
        try:
            function(*args)
        finally:
            done.set()

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:  # the loop is closed
        return
    while thread.is_alive() and not done.wait(_LOOK_SECONDS):
        pass


def registration(
    options: AgentOptions,
    view: RoundView,
    roster: Roster,
    reading: wire.NodeReading | None,
    secret: str,
    copies: tuple[wire.StateCopy, ...],
) -> wire.Register:
    """Describe the agent and its workers as of now."""
    return wire.Register(
        protocol=wire.PROTOCOL_VERSION,
        task=options.task,
        agent=options.agent,
        node=options.node,
        host=options.host,
        pid=os.getpid(),
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        round=view.number,
        waiting=view.waiting,
        granted=view.grant is not None and not view.grant.warm,
        store=view.store,
        local_world=view.local_world,
        workers=roster.infos(),
        epoch=roster.epoch,
        went=roster.went,
        slot=options.slot,
        rack=options.rack,
        weight=options.weight,
        warm=view.grant is not None and view.grant.warm,
        reading=reading,
        copies=copies,
        secret=secret,
    )
