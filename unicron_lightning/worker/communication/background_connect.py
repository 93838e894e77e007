"""Builds a communicator in a thread that can be abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import Communicator, CommunicatorAborted
from unicron_lightning.worker.communication.owned_group import is_sticky, reason_of

_attempts = threading.local()
Connect = Callable[[wire.Epoch, int, int], Communicator]
"""Builds the communicator of an epoch: (epoch, rank, world). May block; is called in its own thread."""


def abandoned() -> bool:
    """Whether the attempt of this thread has been abandoned, so that no caller waits for its communicator."""
    attempt: Connecting | None = getattr(_attempts, "present", None)
    return attempt is not None and attempt._abandoned


class Connecting:
    """One attempt to build a communicator, in a thread that can be abandoned."""

    def __init__(self, connect: Connect, epoch: wire.Epoch, rank: int) -> None:
        self._build: Callable[[], Communicator] = lambda: connect(epoch, rank, len(epoch.members))
        self._communicator: Communicator | None = None
        self._error: Exception | None = None
        self._abandoned = False
        self.finished = False
        self._name = f"unicron-connect-{epoch.number}"

    def start(self, condition: threading.Condition) -> None:
        self._condition = condition
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def take(self) -> Communicator | None:
        """Return the communicator; None if it is unfinished, in which case it is closed on completion.

        Raises:
            CommunicatorAborted: it could not be built.
            Exception: any other error of the constructor, such as one after which the accelerator cannot be used.
        """
        with self._condition:
            if not self.finished:
                self._abandoned = True
                return None
        error = self._error
        # torch's store and gloo raise subclasses of RuntimeError
        if isinstance(error, (RuntimeError, OSError)) and not is_sticky(str(error)):
            raise CommunicatorAborted(reason_of(error))
        if self._error is not None:
            raise self._error
        return self._communicator

    def _run(self) -> None:
        communicator: Communicator | None = None
        error: Exception | None = None
        _attempts.present = self
        try:
            communicator = self._build()
        except Exception as caught:  # noqa: BLE001 - whatever it is, the engine raises it
            error = caught
        with self._condition:
            self._communicator, self._error = communicator, error
            self.finished = True
            abandoned = self._abandoned
            self._condition.notify_all()
        if abandoned and communicator is not None:
            communicator.close()
