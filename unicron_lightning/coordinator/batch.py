"""What the machine has decided and nobody has carried out yet: of one input, or of several that arrived together.

It is written as one transaction, then told. A message for many is encoded once.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.session import frame_of
from unicron_lightning.coordinator.store import NewEvent, Store

logger = logging.getLogger(__name__)


class Batch:
    """Answers of the machine, in order."""

    def __init__(self) -> None:
        self._decided: list[tuple[float, list[ev.Action]]] = []
        self._frames: dict[int, bytes] = {}
        """By the identity of messages, which ``_decided`` keeps alive."""

    def add(self, now: float, actions: list[ev.Action]) -> None:
        """One more answer, given at time.time() ``now``."""
        self._decided.append((now, actions))

    def withhold(self, tasks: Container[str], conns: Container[int]) -> None:
        """Neither write these tasks nor send anything over these connections: they are set back."""

        def stays(action: ev.Action) -> bool:
            match action:
                case ev.Save(task=task) | ev.Forget(task=task):
                    return task not in tasks
                case ev.Send(conn=conn):
                    return conn not in conns
            return True

        self._decided = [(now, [each for each in actions if stays(each)]) for now, actions in self._decided]

    def actions(self) -> Iterator[ev.Action]:
        """All of it."""
        for _, actions in self._decided:
            yield from actions

    def frame(self, message: msgspec.Struct) -> bytes:
        """A message of this batch as it goes over a connection."""
        frame = self._frames.get(id(message))
        if frame is None:
            frame = self._frames[id(message)] = frame_of(wire.encode(message))
        return frame

    def write(self, store: Store, machine: Machine) -> bool:
        """Make it durable, all or nothing; ``machine`` is as it was after the last answer. Whether there was anything.

        Raises:
            sqlite3.Error: e.g. the disk is full.
        """
        changed: set[str] = set()
        gone: set[str] = set()
        news: list[NewEvent] = []
        lasting = None
        for now, actions in self._decided:
            for action in actions:
                match action:
                    case ev.Save(task=task):
                        changed.add(task)
                    case ev.Forget(task=task):
                        gone.add(task)
                    case ev.SaveLasting():
                        lasting = machine.lasting
                    case ev.Emit(name=name, task=of, incident=incident, fields=fields):
                        news.append(NewEvent(at=now, name=name, task=of, incident=incident, fields=fields))
                        logger.info("%s task=%s incident=%s %s", name, of, incident, fields)
        save = [machine.tasks[task] for task in sorted(changed) if task in machine.tasks]
        forget = sorted(task for task in gone if task not in machine.tasks)
        if not (save or forget or news or lasting):
            return False
        store.write(save=save, forget=forget, events=news, lasting=lasting)
        return True
