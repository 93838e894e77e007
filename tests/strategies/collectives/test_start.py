"""Results of the start, as a joiner finds them: those of the members, also if they are not there yet."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from unicron_lightning.strategies.collectives.operations import Collectives
from unicron_lightning.worker.communication.communicator import SoloCommunicator
from unicron_lightning.worker.engine import Engine


class Records:
    """The control thread's records, shared by the workers of a task."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.asked = threading.Event()

    def record(self, key: str, value: str, epoch: int) -> None:
        self.values[key] = value

    def lookup(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None:
            self.asked.set()
        return value


def worker(records: Records, *, joins: bool) -> Collectives:
    engine = Engine(None, lambda *about: SoloCommunicator(), lambda world: None, is_joiner=False)
    session: Any = SimpleNamespace(control=records, engine=engine, joins=joins)
    return Collectives(session)


def test_a_joiner_that_is_as_early_as_the_members_gets_their_folder() -> None:
    records, found = Records(), []
    founder, joiner = worker(records, joins=False), worker(records, joins=True)
    thread = threading.Thread(target=lambda: found.append(joiner.broadcast("logs/version_1", 0)))
    thread.start()
    assert records.asked.wait(20), "the joiner asks before there is a record"
    assert founder.broadcast("logs/version_0", 0) == "logs/version_0"
    thread.join(20)
    assert found == ["logs/version_0"]


def test_a_joiner_uses_its_own_value_where_members_have_passed_without_a_record() -> None:
    records = Records()
    founder, joiner = worker(records, joins=False), worker(records, joins=True)
    founder.record_start()
    assert not records.values, "it is in its start"
    founder.starting = False
    founder.record_start()
    assert joiner.broadcast("own", 0) == "own"
    joiner.record_start()
    records.values.clear()  # of a coordinator that lost its store
    assert joiner.broadcast("own again", 0) == "own again", "it knows that they have passed"
