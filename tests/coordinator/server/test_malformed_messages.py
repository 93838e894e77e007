"""Malformed messages: each ends with its connection, and other tasks are not affected."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import aiohttp
import msgspec
import pytest
from coordinator.driver import World, settle, started
from coordinator.shell import Coordinator, access, connected, get, train

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import parts, state
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.machine import MOST_OF_A_TASK
from unicron_lightning.coordinator.membership.registration import refusal
from unicron_lightning.coordinator.server import peers
from unicron_lightning.coordinator.state import NodeExclusion
from unicron_lightning.coordinator.storage import Store
from unicron_lightning.link import open_socket
from unicron_lightning.wire.daemon import decode_from_node
from unicron_lightning.wire.fields import shortened

REGISTER: dict[str, Any] = {
    "type": "register",
    "protocol": wire.PROTOCOL_VERSION,
    "task": "bad",
    "agent": "x",
    "node": "x",
    "host": "127.0.0.1",
    "pid": 1,
    "min_nodes": 1,
    "max_nodes": 1,
    "round": 1,
    "waiting": False,
    "granted": True,
    "store": {"host": "127.0.0.1", "port": 1},
    "local_world": 1,
    "workers": [],
    "epoch": 0,
}
HELLO: dict[str, Any] = {"type": "worker_hello", "worker": "x/0#1", "local_rank": 0, "pid": 1, "capacity": 8}
READY: dict[str, Any] = {"type": "worker_ready", "worker": "x/0#1", "epoch": 0, "state": {}}
LONG = "x/0#" + "9" * 5000
BAD_REGISTRATIONS: list[dict[str, Any]] = [
    {"local_world": 0},
    {"store": None},
    {"store": None, "granted": False, "warm": True},
    {"warm": True},
    {"min_nodes": 0},
    {"task": ""},
    {"task": "a\nb"},
    {"task": "[red]x"},
    {"node": "\u001b[31mx"},
    {"slot": "\u202e0"},
    {"agent": "x" * 5000},
    {"weight": 0},
    {"weight": 1e300},
    {"round": -1},
    {"store": {"host": "127.0.0.1", "port": 65536}},
    {"workers": [{"worker": LONG, "local_rank": 0}]},
    {"workers": [{"worker": "x/0#1", "local_rank": 0, "hello": {**HELLO, "capacity": 0}}]},
    {"workers": [{"worker": "x/0#1", "local_rank": 0, "hello": {**HELLO, "worker": "y/0#1"}}]},
    {"workers": [{"worker": "x/0#1", "local_rank": 0, "ready": {**READY, "state": {"step": True}}}]},
]
BAD_WORDS: list[dict[str, Any]] = [
    {**HELLO, "worker": LONG},
    {**HELLO, "capacity": 0},
    {**HELLO, "capacity": -1},
    {**HELLO, "granularity": 0},
    {**READY, "state": {"step": True}},
    {**READY, "state": {"step": -1}},
    {**READY, "state": {"step": 10**30}},
    {**READY, "state": {"has_state": "yes"}},
    {"type": "local_world", "round": 1, "size": 0},
    {"type": "worker_died", "worker": LONG, "cause": "exit", "code": 1, "at": 1.0},
    {"type": "worker_died", "worker": "x/0#1", "cause": "exit", "code": 10**30, "at": 1.0},
    {"type": "worker_event", "worker": "x/0#1", "name": "started", "at": 1.0, "fields": {"step": True}},
    {"type": "progress", "worker": "x/0#1", "step": -1, "metrics": {}},
    {"type": "replicas", "worker": "x/0#1", "epoch": 1, "replicas": [], "at_once": -1},
]


@pytest.fixture
def coordinator(tmp_path):
    with Coordinator(tmp_path / "state") as running:
        yield running


@pytest.mark.parametrize("message", [{**REGISTER, **bad} for bad in BAD_REGISTRATIONS])
def test_a_registration_that_cannot_be_is_refused_with_its_value(message):
    data = json.dumps(message)
    try:
        decoded = wire.decode_from_agent(data)
        reason = refusal(None, decoded)
    except peers.UNREADABLE as error:
        assert peers.is_first(data)
        reason = peers.described(data, error)
    assert reason is not None
    assert "xpected" in reason
    assert len(reason) < 400, reason
    assert reason.isprintable()
    assert "got" in reason or "=" in reason


@pytest.mark.parametrize("message", BAD_WORDS)
def test_a_message_out_of_range_is_not_decoded(message):
    data = json.dumps(message)
    with pytest.raises(peers.UNREADABLE) as caught:
        wire.decode_from_agent(data)
    assert len(peers.described(data, caught.value)) < 400
    assert not peers.is_first(data)


def test_the_refusal_quotes_what_was_given():
    data = json.dumps({**REGISTER, "local_world": 0})
    with pytest.raises(msgspec.ValidationError) as caught:
        wire.decode_from_agent(data)
    assert peers.described(data, caught.value) == "local_world=0: expected `int` >= 1"
    assert shortened("a" * 500) == f"{ascii('a' * 81)[:80]}..."
    assert shortened(10**5000) == "a very large number"


@pytest.mark.parametrize("bad", [{"node": "a\u001bb"}, {"slots": [""]}, {"pid": -1}, {"host": "a b"}])
def test_a_daemons_message_out_of_range_is_not_decoded(bad):
    hello = {"type": "node_hello", "protocol": 1, "node": "n", "host": "h", "pid": 1, "started_at": 1.0, "slots": ["0"]}
    decode_from_node(json.dumps({**hello, "tasks": []}))
    with pytest.raises(msgspec.ValidationError):
        decode_from_node(json.dumps({**hello, "tasks": [], **bad}))


async def test_bad_messages_end_their_connection_and_no_other(coordinator):
    async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as (a, b):
        await train([a, b])
        async with aiohttp.ClientSession() as http:
            for bad in BAD_REGISTRATIONS:
                async with await open_socket(http, f"{coordinator.url}/v1/agent", access()) as socket_:
                    await socket_.send_str(json.dumps({**REGISTER, **bad}))
                    frame = await socket_.receive(timeout=30)
                    assert isinstance(wire.decode_to_agent(frame.data), wire.Refused), bad
                    assert (await socket_.receive(timeout=30)).type is aiohttp.WSMsgType.CLOSE
            for number, bad in enumerate([*BAD_WORDS, "[" * 50_000]):
                async with await open_socket(http, f"{coordinator.url}/v1/agent", access()) as socket_:
                    fields = {"agent": f"x{number}", "granted": False, "waiting": True, "local_world": None}
                    await socket_.send_str(json.dumps({**REGISTER, **fields}))
                    await socket_.send_str(bad if isinstance(bad, str) else json.dumps(bad))
                    frames = [await socket_.receive(timeout=30)]
                    while frames[-1].type is aiohttp.WSMsgType.TEXT:
                        frames.append(await socket_.receive(timeout=30))
                    assert frames[-1].type is aiohttp.WSMsgType.CLOSE, bad
        await a.say(wire.Lookup(worker=a.worker, key="k"))
        assert (await a.hear(wire.LookupReply)).value is None
        status = await get(f"{coordinator.url}/v1/status")
        assert status["tasks"]["t"]["incidents"] == 0
        assert status["coordinator"]["pid"] == coordinator.process.pid
    _, output = coordinator.stop()
    assert "message_malformed" in output
    assert "capacity=-1: expected `int` >= 1" in output
    assert "Traceback" not in output
    assert max(len(line) for line in output.splitlines()) < 2000


class Broken(Exception):
    """Raised by a machine that is broken for the test."""


def contained(world: World, event: ev.Input) -> None:
    """Handle an input at which the machine raises; everything before it has been written."""
    with pytest.raises(Broken) as caught:
        world.machine.handle(event, world.now)
    touched = world.machine.touched
    world.timers = {key: at for key, at in world.timers.items() if key.task not in touched}

    def stored(name: str) -> state.Task | None:
        return state.decode_task(world.disk[name]) if name in world.disk else None

    for action in world.machine.contain(event, caught.value, stored, world.now):
        world._carry_out(action)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break records with the key "poison"."""
    (whole,) = parts.RECEIVERS[wire.Record]

    def record(task: Any, turn: Any, agent: Any, message: wire.Record) -> None:
        if message.key == "poison":
            task.slots.clear()  # half a change
            raise Broken("no such record")
        whole(task, turn, agent, message)

    monkeypatch.setitem(parts.RECEIVERS, wire.Record, [record])


def test_a_failed_input_sets_its_task_back_and_training_continues(monkeypatch):
    world, (a, b) = started(2)
    (other,) = [world.agent("o", task="other", nodes=(1, 1)).start().boot()]
    settle(world, "other")
    poisoned(monkeypatch)
    before = state.encode(world.task("other"))
    contained(world, ev.AgentMessage(conn=b.conn, message=wire.Record(key="poison", value="1")))
    assert state.encode(world.task("other")) == before
    assert other.conn is not None
    assert a.conn is None
    assert b.conn is None
    assert "Broken: 'no such record'" in world.event("task_set_back").fields["reason"]
    a.register()
    b.register()
    assert world.task().slots == ["a", "b"]
    assert not world.task().restoring
    assert world.task().incidents == 0
    b.die()
    assert [member.worker for member in world.task().members()] == [a.worker()]


def test_a_task_that_is_set_back_probes_its_excluded_nodes_again(monkeypatch):
    world, (_, b) = started(2)
    poisoned(monkeypatch)
    world.task().probing.nodes["elsewhere"] = NodeExclusion(times=[world.now], reason="it does not reach others")
    world.disk["t"] = state.encode(world.task())
    contained(world, ev.AgentMessage(conn=b.conn, message=wire.Record(key="poison", value="1")))
    assert ev.TimerKey("parted", "t") in world.timers


def test_an_agent_that_fails_again_is_refused_and_a_task_that_fails_too_often_is_stopped(monkeypatch):
    world, (a, b) = started(2)
    poisoned(monkeypatch)
    for number in range(MOST_OF_A_TASK):
        conn = b.conn
        contained(world, ev.AgentMessage(conn=conn, message=wire.Record(key="poison", value="1")))
        if number < MOST_OF_A_TASK - 1:
            a.register()
            b.register()
        assert bool(b.all(wire.Refused)) == (number > 0)
    assert a.last(wire.TaskOver).succeeded is False
    assert "Broken" in a.last(wire.TaskOver).reason
    assert "Broken" in world.event("task_stopped").fields["reason"]
    assert world.machine.lasting.results[-1].state == "failed"
    a.bye(succeeded=False)
    if b.conn is not None:
        b.bye(succeeded=False)
    world.advance(60)
    assert "t" not in world.machine.tasks
    assert "t" not in world.disk
    world.start()


def test_an_unreadable_task_is_set_aside_and_the_others_live(tmp_path):
    tasks = [
        state.Task(id=name, min_nodes=1, max_nodes=1, created_at=1.0, lifecycle=Lifecycle())
        for name in ("good", "bad", "fine")
    ]
    store = Store(tmp_path)
    store.write(save=tasks, forget=[], events=[])
    store.close()
    with sqlite3.connect(tmp_path / "coordinator.sqlite") as db:
        db.execute("""UPDATE tasks SET state = replace(state, '"min_nodes":1', '"min_nodes":true') WHERE id = 'bad'""")
    db.close()
    for _ in range(2):
        store = Store(tmp_path)
        assert list(store.load().tasks) == ["good", "fine"]
        (event,) = store.events(task="bad")
        assert event["name"] == "state_unreadable"
        assert "Expected `int`, got `bool`" in event["fields"]["error"]
        store.close()
    with sqlite3.connect(tmp_path / "coordinator.sqlite") as db:
        assert [row[0] for row in db.execute("SELECT id FROM unreadable")] == ["bad"]
    db.close()


async def test_a_coordinator_with_an_unreadable_task_starts_and_its_other_task_goes_on(tmp_path):
    with Coordinator(tmp_path / "state") as coordinator:
        async with connected(coordinator.url, "a", nodes=(1, 1)) as (a,):
            await train([a])
            coordinator.kill()
        with sqlite3.connect(tmp_path / "state" / "coordinator.sqlite") as db:
            db.execute("INSERT INTO tasks VALUES ('bad', '{}')")
            db.execute("UPDATE lasting SET state = 'nonsense'")
        db.close()
        coordinator.start()
        async with connected(coordinator.url, "a", nodes=(1, 1)) as (a,):
            await a.register(**a.back(ready=1, epoch=1))
            await a.say(wire.Lookup(worker=a.worker, key="k"))
            assert (await a.hear(wire.LookupReply)).value is None
        names = [event["name"] for event in await get(f"{coordinator.url}/v1/events")]
        assert "state_unreadable" in names
        assert "coordinator_restored" in names
