"""Reported errors: logged once, with place and cause, and handled by their severity."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.driver import FakeAgent, World, members, restart, running
from coordinator.severity.test_apply import answer, come_back, joined

from unicron_lightning import wire


def report(agent: FakeAgent, kind: str, **fields: Any) -> None:
    given = {
        "worker": agent.worker(),
        "phase": "compute",
        "step": 7,
        "at": agent.world.now,
        "details": {},
        "ends": True,
    }
    agent.say(wire.ErrorReport(kind=kind, cause="it broke", **{**given, **fields}))


def exits(agent: FakeAgent) -> None:
    agent.say(wire.WorkerDied(worker=agent.worker(), cause="exit", code=1, at=agent.world.now))


def events(world: World, name: str) -> list[dict[str, Any]]:
    return [event.fields for event in world.events if event.name == name]


def test_an_exception_is_one_error_whatever_follows_from_it():
    world, (a, b, c) = joined()
    a.say(wire.CommError(worker=a.worker(), epoch=world.task().number, error="closed by peer"))
    report(b, "illegal_memory_access")
    assert (world.task().epoch.kind, members(world)) == ("fail", ["a/0#1", "c/0#1"])
    c.say(wire.CommError(worker=c.worker(), epoch=world.task().number - 1, error="closed by peer"))
    report(b, "illegal_memory_access")  # repeated after a reconnection
    exits(b)
    answer(world, a, c, step=8)
    [told] = events(world, "error_reported")
    assert {"node": "node-b", "rank": 1, "phase": "compute", "step": 7, "severity": "SEV2"}.items() <= told.items()
    assert (told["kind"], told["cause"]) == ("illegal_memory_access", "it broke")
    [incident] = world.task().accounts.open
    assert (incident.cause, incident.failures) == ("illegal_memory_access: it broke", 1)
    assert not b.all(wire.Fence), "it ends by itself, and has something to write down first"
    assert len(world.task().severity.failed) == 1
    assert [death["cause"] for death in events(world, "worker_died")] == ["reported"]
    come_back(b)
    assert members(world) == ["a/0#1", "c/0#1", "b/0#2"]


def test_a_broken_connection_that_ends_a_worker_is_answered_as_its_death():
    world, (a, b, _) = joined()
    report(a, "other_network_error")
    report(b, "connection_failed")
    assert members(world) == ["c/0#1"]
    assert [told.get("symptom", False) for told in events(world, "error_reported")] == [False, True]
    assert [failure.kind for failure in world.task().severity.unjudged] == ["other_network_error"]


def test_a_worker_that_hangs_is_killed_because_its_agent_says_so():
    world, (_, b, _) = joined()
    report(b, "task_hang", ends=False)
    assert [fence.reason for fence in b.all(wire.Fence)] == ["task_hang: it broke"]
    assert members(world) == ["a/0#1", "c/0#1"]
    b.say(wire.WorkerDied(worker="b/0#1", cause="signal", code=9, at=world.now))
    assert len(events(world, "worker_died")) == 1


def test_a_connection_that_a_live_worker_names_is_renewed_in_place():
    world, (a, b, c) = joined()
    report(a, "nccl_timeout", ends=False)
    assert (world.task().epoch.kind, len(members(world))) == ("fail", 3)
    report(b, "nccl_timeout", ends=False)
    assert len(events(world, "error_reported")) == 1, "the other end of the same connection"
    answer(world, a, b, c, step=3)
    assert world.task().settled


def test_a_broken_node_is_cordoned_though_no_worker_of_it_has_failed():
    world, (_, b, _) = joined()
    report(b, "ecc_error", worker=None, ends=False, step=None, phase="")
    assert world.machine.drained == ["node-b"]
    assert events(world, "error_reported")[0]["worker"] is None
    assert world.task().epoch.kind == "leave"


@pytest.mark.parametrize("kind", ["link_degraded", "nan_loss"])
def test_what_is_only_told_disturbs_nobody(kind):
    world, (_, b, _) = joined()
    before = world.task().number
    for _ in range(2):
        report(b, kind, ends=False)
    assert world.task().number == before and world.task().incident is None
    assert len(events(world, "error_reported")) == 1
    world.advance(1)
    report(b, kind, ends=False)
    assert len(events(world, "error_reported")) == 2, "it has happened again"


@pytest.mark.parametrize("recovers", [False, True])
def test_parameters_that_differ_stop_the_task_with_one_error(recovers: bool):
    world, (a, b, c) = joined()
    if recovers:  # the open incident must not hide the report
        a.die()
    for agent in (b, c):
        report(agent, "parameters_differ", ends=False)
    assert world.event("task_over").fields["reason"] == "the parameters differ: it broke"
    assert world.names().count("task_stopped") == 1
    assert len(events(world, "error_reported")) == 1
    for agent in (a, b, c):
        [over] = agent.all(wire.TaskOver)
        assert not over.succeeded and over.reason == "the parameters differ: it broke"


def test_a_worker_that_fails_while_it_starts_is_known_by_what_it_said():
    world = World(nodes=(1, 4))
    [a] = running(world, 1, nodes=(1, 4))
    b = world.agent("b").start()
    report(b, "out_of_memory", step=None)
    assert world.task().incident is None
    exits(b)
    assert [failure.kind for failure in world.task().severity.failed] == ["out_of_memory"]
    assert world.event("worker_died").fields["cause"] == "reported"
    assert not world.task().severity.unattributed
    assert members(world) == [a.worker()]


def test_a_kind_that_is_not_known_is_answered_all_the_same():
    world, (_, b, _) = joined()
    report(b, "of_a_newer_agent")
    [told] = events(world, "error_reported")
    assert (told["kind"], told["told_as"], told["severity"]) == ("unnamed_software_error", "of_a_newer_agent", "SEV2")


def test_a_link_that_breaks_again_and_again_is_told_once_and_disturbs_nobody():
    world, (_, b, _) = joined(flapping_cuts=3, flapping_window=60.0)
    before = world.task().number
    for _ in range(2):
        for _ in range(3):
            b.drop()
            world.advance(0.1)
            b.register()
    assert [error["cause"] for error in events(world, "error_reported")] == [
        "the connection broke 3 times within 0 s, and was renewed"
    ] * 2
    assert {error["kind"] for error in events(world, "error_reported")} == {"link_degraded"}
    assert world.task().number == before
    for _ in range(4):
        world.advance(40)
        b.drop()
        b.register()
    assert len(events(world, "error_reported")) == 2, "now and then is not often"


def test_a_link_is_not_judged_by_a_coordinator_that_stood_still():
    world, (_, b, _) = joined(flapping_cuts=2)
    for _ in range(4):
        b.drop()
        b.register(excused=True)
    assert not events(world, "error_reported")
    b.drop()
    b.register()
    assert not events(world, "error_reported")
    b.drop()
    b.register()
    assert [error["kind"] for error in events(world, "error_reported")] == ["link_degraded"]


def test_agents_that_come_back_to_a_restarted_coordinator_do_not_flap():
    world, agents = joined(flapping_cuts=2)
    for _ in range(4):
        restart(world, *agents)
    assert not events(world, "error_reported")
