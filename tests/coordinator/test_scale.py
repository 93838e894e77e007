"""Large tasks: no work that grows with the square of the agents, and no message encoded twice."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.server.batch import Batch
from unicron_lightning.coordinator.server.peers import frame_of
from unicron_lightning.coordinator.storage import Store

AGENTS = 400


def register(number: int) -> wire.Register:
    return wire.Register(
        protocol=wire.PROTOCOL_VERSION,
        task="t",
        agent=f"n{number}",
        node=f"n{number}",
        host="127.0.0.1",
        pid=1,
        min_nodes=AGENTS - 1,
        max_nodes=AGENTS,
        round=1,
        waiting=True,
        granted=False,
        store=wire.Address(host="127.0.0.1", port=1),
        local_world=None,
        workers=[],
        epoch=0,
    )


class Crowd:
    """A task of `AGENTS` agents in its first epoch, and the machine that coordinates it."""

    def __init__(self) -> None:
        self.machine = Machine(ev.Limits())
        self.machine.handle(ev.Started(), 0.0)
        self.say((number, register(number)) for number in range(AGENTS))
        self.say((n, wire.LocalWorld(round=1, size=1)) for n in range(AGENTS))
        self.say((n, wire.WorkerHello(worker=f"n{n}/0#1", local_rank=0, pid=1, capacity=10_000)) for n in range(AGENTS))
        self.say((n, wire.WorkerReady(worker=f"n{n}/0#1", epoch=0, state={})) for n in range(AGENTS))
        self.settle()

    def say(self, messages: Iterable[tuple[int, wire.FromAgent]]) -> list[ev.Action]:
        actions = []
        for number, message in messages:
            actions += self.machine.handle(ev.AgentMessage(conn=number, message=message), 1.0)
        return actions

    def settle(self) -> None:
        task = self.machine.tasks["t"]
        while task.go is None:
            number = task.number
            state = {"step": 1, "has_state": True}
            names = [int(member.agent[1:]) for member in task.members()]
            self.say((n, wire.WorkerReady(worker=f"n{n}/0#1", epoch=number, state=state)) for n in names)
            assert task.go is not None or task.number > number


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    return Crowd()


def test_what_all_say_at_once_or_all_the_time_is_cheap(crowd: Crowd):
    number = crowd.machine.tasks["t"].number
    began = time.process_time()
    for step in range(5):
        crowd.say((n, wire.Progress(worker=f"n{n}/0#1", step=step, metrics={"loss": 1.0})) for n in range(AGENTS))
    fields = {"epoch": number, "step": 1}
    crowd.say((n, wire.WorkerEvent(worker=f"n{n}/0#1", name="grown", at=1.0, fields=fields)) for n in range(AGENTS))
    dead = crowd.say([(3, wire.WorkerDied(worker="n3/0#1", cause="signal", code=9, at=1.0))])
    crowd.settle()
    assert time.process_time() - began < 2.0, "it takes 0.1 s; with the square of the agents it was 20 s"
    told = [action.message for action in dead if isinstance(action, ev.Send)]
    changes = [message for message in told if isinstance(message, wire.EpochChange) and message.number == number + 1]
    assert len(changes) == AGENTS - 1 and all(change is changes[0] for change in changes)
    assert len(changes[0].left) == 1 and not changes[0].came
    assert len(wire.encode(changes[0])) < 500, "its size does not grow with the task"


def test_a_message_for_many_is_encoded_once(crowd: Crowd):
    batch = Batch()
    epoch = crowd.machine.tasks["t"].epoch
    assert epoch is not None
    batch.add(1.0, [ev.Send(conn=conn, message=epoch) for conn in range(3)])
    frames = [batch.frame(action.message) for action in batch.actions() if isinstance(action, ev.Send)]
    assert frames[0] is frames[1] is frames[2]
    assert frames[0].endswith(wire.encode(epoch))


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_frames_say_their_length(size: int):
    frame = frame_of(b"x" * size)
    length = frame[1]
    assert frame[0] == 0x81 and length < 128, "a whole text message, not masked"
    if length == 126:
        (length,) = struct.unpack_from("!H", frame, 2)
    elif length == 127:
        (length,) = struct.unpack_from("!Q", frame, 2)
    assert length == size and frame.endswith(b"x" * size)


def test_answers_that_come_together_are_one_transaction(tmp_path: Path):
    machine = Machine(ev.Limits())
    batch = Batch()
    store = Store(tmp_path)
    try:
        assert not batch.write(store, machine)
        batch.add(1.0, machine.handle(ev.Started(), 1.0))
        for number in range(2):
            batch.add(
                2.0 + number, machine.handle(ev.AgentMessage(conn=number, message=register(number)), 2.0 + number)
            )
        assert batch.write(store, machine)
        assert sorted(store.load().tasks["t"].agents) == ["n0", "n1"]
        logged = [(event["name"], event["at"]) for event in store.events(task="t")]
        assert logged == [("task_created", 2.0), ("agent_registered", 2.0), ("agent_registered", 3.0)]
    finally:
        store.close()
