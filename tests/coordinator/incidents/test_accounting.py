"""Cost of incidents: phases in seconds, losses in worker-seconds and WAF-seconds, nothing counted twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator.driver import FakeAgent, World, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.incidents import accounting
from unicron_lightning.coordinator.incidents.facts import IncidentClosed


def tell(world: World, agent: FakeAgent, name: str) -> None:
    """Report the first finished step of the newest epoch by the agent's worker."""
    fields = {"epoch": world.task().number, "step": 9, "world": 1}
    agent.say(wire.WorkerEvent(worker=agent.worker(), name=name, at=world.now, fields=fields))


def training(count: int, **limits: float) -> tuple[World, list[FakeAgent]]:
    """Create a task of this many nodes with a minimum of one; all of them have finished a step."""
    world = World(join_grace=0.0, **limits)
    agents = form_task(world, count)
    assert world.task().accounts.level.slots == count
    world.advance(100)
    return world, agents


def form_task(world: World, count: int) -> list[FakeAgent]:
    """Have agents of this many nodes form the task and finish a step."""
    world.nodes = (1, 8)
    agents = [world.agent(name).start().launch() for name in "abcdef"[:count]]
    for agent in agents:
        agent.hello()
    for agent in agents:
        agent.ready(0)
    while world.task().go is None:
        settle(world)
    tell(world, agents[0], "grown")
    return agents


def recover(world: World, agent: FakeAgent, seconds: float) -> None:
    """Have the others settle and finish a step after this delay."""
    world.advance(seconds)
    settle(world)
    tell(world, agent, "recovered")


def come_back(world: World, agent: FakeAgent, teller: FakeAgent) -> None:
    agent.rendezvous().boot()
    settle(world)
    tell(world, teller, "grown")


def closed(world: World) -> list[dict[str, Any]]:
    return [{"id": event.incident, **event.fields} for event in world.events if event.name == IncidentClosed.event]


def phases(bill: dict[str, Any], what: str = "seconds") -> list[float]:
    return [bill["phases"][phase][what] for phase in ("detection", "transition", "sub_healthy")]


def die(world: World, agent: FakeAgent, detection: float) -> None:
    """Kill its worker; its agent reports it after this delay."""
    died_at = world.now
    world.advance(detection)
    name = agent.worker()
    agent.workers.pop(name)
    agent.say(wire.WorkerDied(worker=name, cause="signal", code=9, at=died_at))


def test_an_incident_has_three_phases_each_with_what_was_lost():
    world, (a, b, _) = training(3)
    die(world, b, 0.25)
    recover(world, a, 0.5)
    world.advance(10)
    assert closed(world) == []
    come_back(world, b, a)
    (bill,) = closed(world)
    assert (bill["id"], bill["outcome"], bill["cause"], bill["failures"]) == ("i1", "restored", "signal", 1)
    assert phases(bill) == pytest.approx([0.25, 0.5, 10])
    assert phases(bill, "worker_seconds") == pytest.approx([3 * 0.25, 3 * 0.5, 10])
    assert phases(bill, "waf_seconds") == [None] * 3, "nobody knows the FLOPs"
    assert not world.task().accounts.open


def test_waf_is_lost_by_the_step_times_measured_at_each_size():
    world, (a, b, _) = training(3)
    for step in range(10, 20):
        world.advance(2)
        a.say(wire.Progress(worker=a.worker(), step=step, metrics={}, at=world.now, flops_per_step=12.0))
    die(world, b, 1.0)
    recover(world, a, 1.0)
    for step in range(21, 32):
        world.advance(2.5)
        a.say(wire.Progress(worker=a.worker(), step=step, metrics={}, at=world.now))
    seconds = world.now - world.task().accounts.open[0].stepped_at
    come_back(world, b, a)
    (bill,) = closed(world)
    assert bill["flops_per_step"] == 12.0
    assert phases(bill, "waf_seconds") == pytest.approx([6.0, 6.0, seconds * 12 * (1 / 2 - 1 / 2.5)])


def test_of_two_that_overlap_each_answers_for_what_it_took():
    world, (a, b, c) = training(3)
    die(world, b, 0.0)
    recover(world, a, 1.0)
    world.advance(10)
    die(world, c, 0.5)
    recover(world, a, 1.0)
    world.advance(5)
    come_back(world, b, a)
    world.advance(4)
    come_back(world, c, a)
    second, first = closed(world)
    assert (first["id"], second["id"], first["outcome"]) == ("i1", "i2", "restored")
    assert phases(second) == pytest.approx([0.5, 1.0, 5.0])
    assert phases(second, "worker_seconds") == pytest.approx([2 * 0.5, 2 * 1.0, 5.0])
    assert phases(first) == pytest.approx([0.0, 1.0, 10 + 1.5 + 5 + 4])
    assert phases(first, "worker_seconds") == pytest.approx([0.0, 3.0, 20.5]), "one worker short all the time"
    sums = accounting.totals([first, second])
    assert sums["incidents"] == sums["unknown_waf"] == 2
    assert sums["phases"]["transition"] == {"seconds": 2.0, "worker_seconds": 5.0, "waf_seconds": 0.0}


def test_a_second_failure_in_the_recovery_belongs_to_the_same_incident():
    world, (a, b, c, _) = training(4)
    die(world, b, 0.0)
    world.advance(1)
    die(world, c, 0.0)
    recover(world, a, 2.0)
    come_back(world, b, a)
    assert closed(world) == []
    world.advance(7)
    come_back(world, c, a)
    (bill,) = closed(world)
    assert (bill["failures"], bill["workers_before"]) == (2, 4)
    assert phases(bill) == pytest.approx([0.0, 3.0, 7.0])
    assert phases(bill, "worker_seconds") == pytest.approx([0.0, 12.0, 7.0])


def test_a_task_may_end_without_having_been_restored():
    world, (a, b) = training(2)
    die(world, b, 0.0)
    recover(world, a, 1.0)
    world.advance(3)
    a.exit()
    a.bye(succeeded=True)
    b.bye(succeeded=True)
    (bill,) = closed(world)
    assert bill["outcome"] == "ended" and phases(bill) == pytest.approx([0.0, 1.0, 3.0])
    assert not world.machine.tasks


def test_a_task_may_end_before_its_next_step():
    world, (a, b) = training(2)
    die(world, b, 0.0)
    world.advance(2)
    a.bye(succeeded=False)
    b.bye(succeeded=False)
    (bill,) = closed(world)
    assert bill["outcome"] == "ended" and phases(bill) == pytest.approx([0.0, 2.0, 0.0])


def test_a_lost_node_is_dated_by_the_end_of_its_connection():
    world, (a, b, _) = training(3, reconnect_grace=0.25)
    b.drop()
    world.advance(0.25)
    recover(world, a, 0.5)
    world.advance(5)
    d = world.agent("d").start()
    d.boot()
    settle(world)
    tell(world, a, "grown")
    (bill,) = closed(world)
    assert (bill["cause"], bill["failures"]) == ("node lost", 1)
    assert phases(bill) == pytest.approx([0.25, 0.5, 5.0])


def test_a_broken_connection_heals_in_place():
    world, (a, _) = training(2, comm_error_grace=0.5)
    a.say(wire.CommError(worker=a.worker(), epoch=world.task().number, error="reset"))
    world.advance(0.5)
    recover(world, a, 0.1)
    (bill,) = closed(world)
    assert (bill["cause"], bill["outcome"], bill["failures"]) == ("comm_error", "restored", 0)
    assert phases(bill) == pytest.approx([0.0, 0.6, 0.0])


def test_a_death_explains_the_broken_connection_that_was_heard_of_before_it():
    world, (a, b, _) = training(3)
    a.say(wire.CommError(worker=a.worker(), epoch=world.task().number, error="reset"))
    die(world, b, 0.01)
    recover(world, a, 0.5)
    (incident,) = world.task().accounts.open
    assert (incident.id, incident.cause, incident.failures) == ("i1", "signal", 1)


def test_nobody_left_is_one_incident_until_the_restart_has_stepped():
    world, (a, b) = training(2)
    die(world, a, 0.0)
    die(world, b, 0.0)
    world.advance(5)
    a.rendezvous().boot()
    b.rendezvous().boot()
    while world.task().go is None:
        settle(world)
    assert len(world.task().members()) == 2
    world.advance(1)
    tell(world, a, "started")
    (bill,) = closed(world)
    assert phases(bill) == pytest.approx([0.0, 6.0, 0.0])
    assert phases(bill, "worker_seconds")[1] == pytest.approx(12.0)


def test_what_an_operator_takes_away_is_no_loss():
    world, (a, b, _) = training(3)
    die(world, b, 0.0)
    recover(world, a, 1.0)
    world.advance(4)
    world.do(ev.Resize(task="t", nodes=2))
    (bill,) = closed(world)
    assert bill["outcome"] == "replanned" and phases(bill) == pytest.approx([0.0, 1.0, 4.0])


def test_a_node_drained_meanwhile_is_not_missing():
    world, (a, b, c) = training(3)
    die(world, b, 0.0)
    recover(world, a, 1.0)
    world.advance(4)
    c.drain()
    settle(world)
    tell(world, a, "shrunk")
    assert closed(world) == []
    world.advance(6)
    come_back(world, b, a)
    (bill,) = closed(world)
    assert bill["outcome"] == "replanned"
    assert phases(bill, "worker_seconds") == pytest.approx([0.0, 3.0, 10.0])


def test_a_coordinator_restarted_in_the_middle_goes_on_with_the_bill():
    world, (a, b, _) = training(3)
    die(world, b, 0.5)
    agents = list(world.agents.values())
    world.start()
    world.advance(2)
    for agent in agents:
        agent.register()
    settle(world)
    tell(world, a, "recovered")
    world.start()
    world.advance(3)
    for agent in agents:
        agent.register()
    come_back(world, b, a)
    (bill,) = closed(world)
    assert phases(bill) == pytest.approx([0.5, 2.0, 3.0])
    assert phases(bill, "worker_seconds") == pytest.approx([1.5, 6.0, 3.0])


def test_the_first_step_is_dated_by_its_worker():
    world, (a, b, _) = training(3)
    die(world, b, 0.0)
    world.advance(1)
    settle(world)
    stepped_at = world.now + 0.5
    world.advance(2)
    fields = {"epoch": world.task().number, "step": 9, "world": 2}
    a.say(wire.WorkerEvent(worker=a.worker(), name="recovered", at=stepped_at, fields=fields))
    world.advance(1)
    come_back(world, b, a)
    (bill,) = closed(world)
    assert phases(bill) == pytest.approx([0.0, 1.5, 2.5])
    assert phases(bill, "worker_seconds") == pytest.approx([0.0, 4.5, 2.5])


def test_progress_ends_a_transition_if_the_word_of_the_first_step_was_lost():
    world, (a, b, _) = training(3)
    die(world, b, 0.0)
    world.advance(1)
    settle(world)
    world.advance(1)
    a.say(wire.Progress(worker=a.worker(), step=99, metrics={}, at=world.now))
    assert world.task().accounts.open[0].stepped_at == world.now


def test_open_incidents_have_a_bill_up_to_now():
    world, (a, b, _) = training(3)
    die(world, b, 0.0)
    recover(world, a, 1.0)
    task = world.task()
    bill = msgspec.to_builtins(accounting.bill(task, task.accounts.open[0], None, world.now + 8))
    assert phases(bill) == pytest.approx([0.0, 1.0, 8.0])
    assert phases(bill, "worker_seconds") == pytest.approx([0.0, 3.0, 8.0])


def test_a_plain_script_is_accounted_until_it_is_started_again():
    world = World(nodes=(2, 3))
    agents = [world.agent(name).start() for name in "ab"]
    for agent in agents:
        agent.launch()
        agent.say(wire.StoreUsed(round=1))
    name = agents[0].worker()
    died_at = world.now
    world.advance(0.5)
    agents[0].say(wire.WorkerDied(worker=name, cause="signal", code=9, at=died_at))
    for agent in agents:
        world.advance(2)
        agent.rendezvous()
    assert world.names().count("slot_granted") == 4
    (bill,) = closed(world)
    assert bill["outcome"] == "restored" and phases(bill)[0] == pytest.approx(0.5)
    assert phases(bill)[1] > 0


def test_members_dead_before_the_first_step_cost_nothing():
    world, (a, _) = started(2)
    a.die()
    assert world.task().accounts.open[0].due.workers == 0
