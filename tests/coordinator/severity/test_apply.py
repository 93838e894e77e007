"""The severity workflow in the coordinator: the messages that its decisions send to agents and workers."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.driver import FakeAgent, World, members, restart, running, settle, started

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev


def progress(agent: FakeAgent, step: int, fit: int = 0) -> None:
    agent.say(wire.Progress(worker=agent.worker(), step=step, metrics={}, fit=fit))


def answer(world: World, *agents: FakeAgent, step: int = 0) -> None:
    """Report for the newest epoch by these agents' workers; none is further than ``step``."""
    number = world.task().number
    for agent in agents:
        agent.ready(number, step=step)


def disconnect(world: World, *agents: FakeAgent) -> None:
    """Have them report a broken connection that no death explains; they do not answer the new epoch yet."""
    for agent in agents:
        agent.say(wire.CommError(worker=agent.worker(), epoch=world.task().number, error="reset"))
    world.advance(1)


def come_back(agent: FakeAgent) -> FakeAgent:
    """torchrun restarts the agent's workers."""
    return agent.rendezvous().boot()


def three(**limits: Any) -> tuple[World, list[FakeAgent]]:
    world = World(**limits)
    return world, running(world, 3, nodes=(1, 4))[:3]


def joined(**limits: Any) -> tuple[World, list[FakeAgent]]:
    """Three members with a minimum of one."""
    world = World(nodes=(1, 4), **limits)
    agents = []
    for name in "abc":
        agents.append(world.agent(name).start().boot())
        settle(world)
    assert len(members(world)) == 3
    return world, agents


# ---- SEV3 and its escalation


def test_a_connection_that_keeps_failing_costs_the_suspect_its_workers():
    world, (a, b, c) = joined()
    step = world.task().severity.step
    for _ in range(3):
        disconnect(world, a, b)
        assert (world.task().epoch.kind, len(members(world))) == ("fail", 3)
        answer(world, a, b, c, step=step)
    disconnect(world, a, b)
    assert "the last in rank order" in world.event("error_escalated").fields["reason"]
    assert [message.worker for message in b.all(wire.Fence)] == ["b/0#1"]
    assert members(world) == ["a/0#1", "c/0#1"]
    answer(world, a, c, step=step)
    come_back(b)
    assert (world.task().epoch.kind, members(world)) == ("join", ["a/0#1", "c/0#1", "b/0#2"])
    assert "task_stopped" not in world.names()


def test_a_connection_that_fails_between_steps_is_renewed_as_often_as_it_takes():
    world, agents = joined()
    for step in range(10, 30):
        disconnect(world, *agents)
        answer(world, *agents, step=step)
        progress(agents[0], step + 1)
    assert not {"error_escalated", "workers_restarted", "task_stopped"} & set(world.names())


# ---- recovery ends


@pytest.mark.parametrize("restarted", [False, True])
def test_a_member_that_never_reports_is_killed_and_the_others_go_on(restarted):
    world, (a, b, c) = joined(recovery_time=60)
    c.die()
    answer(world, a, step=3)
    if restarted:
        restart(world, a, b, c)
    world.advance(59)
    assert not b.all(wire.Fence)
    world.advance(2)
    assert [message.worker for message in b.all(wire.Fence)] == ["b/0#1"]
    assert world.event("workers_restarted").fields["kind"] == "recovery_stuck"
    assert members(world) == ["a/0#1"]
    answer(world, a, step=3)
    assert world.task().settled


def test_a_recovery_ends_when_the_task_does():
    world, (a, b, c) = joined(recovery_time=60)
    a.say(wire.WorkerDone(worker=a.worker()))
    c.die()
    assert world.task().epoch.kind == "fail" and not world.task().settled
    world.advance(61)
    assert [message.worker for message in b.all(wire.Fence)] == ["b/0#1"]
    assert b.last(wire.TaskOver).succeeded, "all of its work was done"


def test_nobody_reports_and_a_new_life_begins():
    world, agents = joined(recovery_time=60)
    agents[2].die()
    world.advance(61)
    assert world.task().life == 2
    assert agents[0].all(wire.Fence) and agents[1].all(wire.Fence)


def test_a_join_waits_for_the_step_boundary_as_long_as_it_takes_and_then_for_nobody():
    world, (a, b, c) = joined(recovery_time=60)
    d = world.agent("d").start().boot()
    d.ready(world.task().number)
    world.advance(1000)
    assert world.task().epoch.kind == "join" and not world.task().settled
    answer(world, a, b, step=9)
    world.advance(61)
    assert [message.worker for message in c.all(wire.Fence)] == ["c/0#1"]
    assert world.task().epoch.kind == "fail"


def test_a_joiner_that_never_comes_does_not_hold_up_the_others():
    world, (a, b, c) = joined(recovery_time=60)
    d = world.agent("d").start().boot()
    answer(world, a, b, c, step=9)
    world.advance(61)
    assert [message.worker for message in d.all(wire.Fence)] == ["d/0#1"]
    assert members(world) == ["a/0#1", "b/0#1", "c/0#1"]


def test_a_member_that_never_gets_connected_is_restarted():
    world, (a, b, c) = joined(recovery_time=60)
    for agent in (a, b, c):
        enter(world, agent)
    world.advance(1000)
    c.die()
    answer(world, a, b, step=5)
    assert world.task().settled
    enter(world, a)
    world.advance(61)
    assert [message.worker for message in b.all(wire.Fence)] == ["b/0#1"]
    assert members(world) == ["a/0#1"]


def enter(world: World, agent: FakeAgent) -> None:
    fields = {"epoch": world.task().number, "step": 1}
    agent.say(wire.WorkerEvent(worker=agent.worker(), name="entered_epoch", at=0.0, fields=fields))


# ---- SEV2 to SEV1: the node


def fail_after_joining(world: World, agent: FakeAgent, others: list[FakeAgent], step: int) -> None:
    """Its worker joins and fails in its first step; the others continue."""
    agent.die(cause="exit", code=1)
    answer(world, *others, step=step)
    if "node_cordoned" not in world.names():
        come_back(agent)
        if world.task().epoch.kind == "join":
            answer(world, *others, agent, step=step + 9)


def test_a_node_whose_workers_fail_again_and_again_is_cordoned_and_a_stand_by_takes_its_place():
    world = World(nodes=(2, 2))
    a, b = (world.agent(name).start() for name in "ab")
    for agent in (a, b):
        agent.boot()
    settle(world)
    spare = world.agent("s").start()
    assert spare.waiting
    for step in range(10, 60, 10):
        if "node_cordoned" not in world.names():
            fail_after_joining(world, b, [a], step)
    assert world.machine.lasting.cordoned.keys() == {"node-b"}
    assert "4 failures in a row" in world.machine.lasting.cordoned["node-b"]
    assert world.machine.drained == ["node-b"]
    assert spare.granted
    spare.boot()
    settle(world)
    assert members(world) == ["a/0#1", "s/0#1"]
    assert "task_stopped" not in world.names()


def cordoned() -> tuple[World, FakeAgent, FakeAgent]:
    world = World(nodes=(1, 2))
    a, b = (world.agent(name).start().boot() for name in "ab")
    settle(world)
    settle(world)
    assert len(members(world)) == 2
    for step in range(10, 60, 10):
        if "node_cordoned" not in world.names():
            fail_after_joining(world, b, [a], step)
    assert "node_cordoned" in world.names()
    return world, a, b


def test_an_operator_lifts_the_cordon():
    world, a, b = cordoned()
    settle(world)
    if not b.waiting:
        b.rendezvous()
    assert b.waiting and not b.granted
    restart(world, a, b)
    assert world.machine.drained == ["node-b"], "remembered"
    assert not b.granted
    b.drain(False)
    assert world.machine.drained == [] and not world.machine.lasting.cordoned
    assert b.granted


def test_a_cordoned_node_is_drained_and_undrained_as_any_other():
    world, _, b = cordoned()
    b.drain()
    b.drain(False)
    assert world.machine.drained == []


def test_a_node_that_the_minimum_needs_is_not_cordoned():
    world, (a, b) = started(2, nodes=(2, 2), crash_attempts=9)
    for step in range(10, 70, 10):
        fail_after_joining(world, b, [a], step)
    assert "cordon_withheld" in world.names()
    assert not world.machine.drained
    assert len(members(world)) == 2


def breaks(agent: FakeAgent, worker: str | None = None) -> None:
    """Report a broken GPU: one that has ended the worker, or that its node's counters show."""
    details = {"type": "RuntimeError", "message": "ECC"}
    about = {"kind": "ecc_error", "cause": "uncorrectable ECC error", "phase": "", "step": None, "details": details}
    agent.say(wire.ErrorReport(worker=worker, at=0.0, ends=worker is not None, **about))


def test_a_broken_node_that_the_minimum_needs_gets_no_workers_until_an_operator_asks_for_it():
    world, (a, b) = started(2, nodes=(2, 2))
    breaks(b, b.worker())
    answer(world, a, step=9)
    assert world.machine.drained == ["node-b"] and world.task().epoch.hold
    b.rendezvous()
    assert b.waiting and not b.granted
    b.drain(False)
    assert b.granted


def test_workers_on_a_broken_node_that_the_minimum_needs_stay_until_they_end():
    world, (a, b) = started(2, nodes=(2, 2))
    number = world.task().number
    breaks(b)
    assert world.machine.drained == ["node-b"] and world.task().number == number
    assert not b.all(wire.Fence) and members(world) == [a.worker(), b.worker()]


PAPER: dict[str, Any] = {"strict": True, "reattempt_limit": 1, "cordon_failures": 2, "hold_timeout": 31536000.0}


def test_by_the_paper_a_broken_node_is_isolated_and_its_task_waits():
    world, (a, b) = started(2, nodes=(2, 2), **PAPER)
    worker = b.worker()
    breaks(b)
    assert [message.worker for message in b.all(wire.Fence)] == [worker]
    answer(world, a, step=9)
    assert world.task().epoch.hold and members(world) == [a.worker()]
    b.rendezvous()
    world.advance(100_000)
    assert not b.granted and "task_stopped" not in world.names()
    c = world.agent("c").start().boot()
    answer(world, a, c, step=9)
    assert members(world) == [a.worker(), c.worker()] and not world.task().epoch.hold


def test_by_the_paper_a_broken_node_that_can_be_spared_is_left_at_a_step_boundary():
    world, (_, b, _) = joined(**PAPER)
    breaks(b)
    assert not b.all(wire.Fence) and world.task().epoch.kind == "leave"


def test_by_the_paper_a_connection_is_renewed_once_and_a_worker_restarted_once():
    world, (a, b, c) = joined(**PAPER)
    step = world.task().severity.step
    disconnect(world, b)
    answer(world, a, b, c, step=step)
    disconnect(world, b)
    assert b.all(wire.Fence) and not world.machine.drained
    answer(world, a, c, step=step)
    come_back(b)
    answer(world, a, b, c, step=step)
    disconnect(world, b)
    assert world.machine.drained == ["node-b"]


def test_connections_between_workers_that_break_often_are_flapping_links_and_renewed():
    world, agents = joined(flapping_cuts=3, flapping_window=300.0)
    for step in range(10, 16):
        before = world.task().number
        disconnect(world, *agents)
        assert (world.task().epoch.kind, world.task().number) == ("fail", before + 1)
        answer(world, *agents, step=step)
        progress(agents[0], step + 1)
    reports = [event.fields for event in world.events if event.name == "error_reported"]
    assert [(report["kind"], report["severity"]) for report in reports] == [("link_flapping", "SEV3")] * 2
    assert "broke 3 times" in reports[0]["cause"]
    world.advance(301)
    disconnect(world, *agents)
    assert world.names().count("error_reported") == 2, "now and then is not often"


def test_an_agent_lost_isolates_nothing_but_itself():
    world, (a, b, c) = joined()
    c.drop()
    world.advance(1)
    answer(world, a, b, step=9)
    assert not world.machine.drained
    assert "node_cordoned" not in world.names()


def test_agents_of_one_node_lost_again_and_again():
    world, (a, b, c) = joined()
    settled = [a, b]
    number = 0
    while "node_cordoned" not in world.names():
        number += 1
        assert number <= 5
        c.drop()
        world.advance(1)
        answer(world, *settled, step=10 * number)
        c = world.agent("c").start().boot() if "node_cordoned" not in world.names() else c
        if world.task().epoch.kind == "join":
            answer(world, *settled, c, step=10 * number + 9)
    assert world.machine.drained == ["node-c"]


# ---- the crash loop


def test_workers_that_are_killed_together_are_one_attempt():
    world, agents = started(8, nodes=(8, 8))
    progress(agents[0], 7)
    for dead in range(7):
        agents[dead].die()
        settle_all(world, *agents[dead + 1 :])
    assert len(members(world)) == 1
    agents[7].die()
    assert "task_restarts" in world.names() and "task_stopped" not in world.names()


def test_a_task_that_fails_at_one_step_for_good_is_stopped_with_its_diagnosis():
    world, (a, b) = started(2, nodes=(1, 4))
    lives = 0
    while "task_stopped" not in world.names():
        lives += 1
        assert lives <= 6
        progress(a, 7)
        for agent in (a, b):
            agent.die(cause="exit", code=1)
        if "task_stopped" not in world.names():
            world.advance(1.5)
            for agent in (a, b):
                agent.rendezvous().boot()
            settle_all(world, a, b)
    assert lives == 5
    said = world.event("task_stopped").fields
    assert said["step"] == 7 and said["attempts"] == 5 and said["causes"] == ["exit 1"]
    assert said["nodes"] == ["node-a", "node-b"]
    assert "exit 1" in said["reason"]
    assert a.last(wire.TaskOver).succeeded is False and b.last(wire.TaskOver).succeeded is False
    assert world.event("task_over").fields["reason"] == said["reason"]
    for agent in (a, b):
        agent.bye(succeeded=False)
    assert "t" not in world.machine.tasks


def settle_all(world: World, *agents: FakeAgent) -> None:
    """Settle consecutive epochs, until all are members; no step is finished."""
    for _ in range(4):
        if not world.task().settled:
            names = members(world)
            answer(world, *(agent for agent in agents if agent.worker() in names))


def test_a_task_that_goes_on_between_failures_is_never_stopped():
    world, (a, b) = started(2, nodes=(1, 4))
    for step in range(50):
        progress(a, 10 * step + 7)
        for agent in (a, b):
            agent.die()
        for agent in (a, b):
            agent.rendezvous().boot()
        settle_all(world, a, b)
    assert world.task().life == 51


def test_steps_of_a_second_fit_are_progress_though_they_count_anew():
    world, (a, b) = started(2, nodes=(1, 4))
    progress(a, 100, fit=1)
    for step in range(10, 90, 10):
        progress(a, step, fit=2)
        b.die()
        world.advance(2)
        settle_all(world, a)
        b.rendezvous().boot()
        settle_all(world, a, b)
        assert world.task().severity.attempts <= 1
    assert "task_stopped" not in world.names() and world.task().life == 1
    for _ in range(2):  # no step of a life that repeats the fits is progress
        for agent in (a, b):
            agent.die()
        for agent in (a, b):
            agent.rendezvous().boot()
        settle_all(world, a, b)
        lives = world.task().severity.lives
        progress(a, 100, fit=1)
        progress(a, 80, fit=2)
        assert world.task().severity.lives == lives
    progress(a, 81, fit=2)
    assert world.task().severity.lives == 0


def test_a_task_whose_workers_never_get_ready_is_stopped():
    world = World(nodes=(1, 2))
    agents = [world.agent(name).start() for name in "ab"]
    for number in range(5):
        assert "task_stopped" not in world.names(), number
        for agent in agents:
            agent.launch().hello()
            agent.die(cause="exit", code=1)
            if world.machine.tasks["t"].over is None:
                agent.rendezvous()
    assert world.event("task_stopped").fields["rule"] == "no way to start"


def test_a_script_that_does_not_start_is_stopped_after_growing_delays():
    world = World(nodes=(1, 2))
    agents = [world.agent(name).start() for name in "ab"]
    for delay in (1.0, 2.0):
        for agent in agents:
            agent.launch().die(cause="exit", code=1)
            agent.rendezvous()
        world.advance(0.9 * delay)
        assert not any(agent.granted for agent in agents)
        world.advance(0.2 * delay)
        assert all(agent.granted for agent in agents)
    agents[0].launch().die(cause="exit", code=1, output=("Traceback:", "ImportError: no x"))
    stopped = world.event("task_stopped").fields
    assert stopped["rule"] == "the script does not start" and "exit 1" in stopped["reason"]
    assert stopped["reason"].splitlines()[1:] == ["  Traceback:", "  ImportError: no x"]
    assert stopped["reason"].count("exit 1") == 1, "equal causes are named once"
    assert world.event("task_over").fields["succeeded"] is False


def test_a_node_on_which_the_script_does_not_start_stops_no_task():
    world = World(nodes=(1, 2))
    bad, good = (world.agent(name).start() for name in "ab")
    good.launch()
    for _ in range(4):
        bad.launch().die(cause="exit", code=1)
        bad.rendezvous()
        world.advance(31.0)
    assert not bad.granted and "task_stopped" not in world.names()
    assert world.event("node_cordoned").fields["node"] == "node-a"
    good.hello()
    assert world.task().elastic and world.task().over is None


def test_workers_that_are_killed_before_they_register_do_not_stop_the_task():
    world = World()
    a = world.agent("a").start()
    for _ in range(4):
        a.launch().die()
        a.rendezvous()
        assert a.granted
    assert "task_stopped" not in world.names()


def test_a_plain_script_is_none_of_its_business():
    world = World(nodes=(1, 2))
    a = world.agent("a").start()
    for _ in range(20):
        a.launch()
        a.say(wire.StoreUsed(round=a.round))
        a.die(cause="exit", code=1)
        a.rendezvous()
    assert a.granted and "task_stopped" not in world.names()


def test_the_chaos_of_a_benchmark_cordons_nothing_and_stops_nothing():
    """200 kills in twelve minutes over four nodes, each soon after the previous recovery."""
    world = World(nodes=(1, 4))
    agents = [world.agent(name).start().boot() for name in "abcd"]
    for _ in range(4):
        if not world.task().settled:
            settle(world)
    step = 10
    for number in range(200):
        victim = agents[(number * 7 + number // 5) % 4]
        step += 9
        victim.die()
        answer(world, *(agent for agent in agents if agent is not victim), step=step)
        world.advance(3.6)
        come_back(victim)
        step += 9
        answer(world, *agents, step=step)
        progress(agents[0], step + 4)
    assert not {"node_cordoned", "cordon_withheld", "task_stopped"} & set(world.names())


def test_what_an_operator_stops_is_no_failure():
    world, (a, b, c) = joined()
    for _ in range(6):
        world.do(ev.Drain(node="node-c", drained=True))
        answer(world, a, b, step=5)
        if world.task().number and c.stopped:
            c.say(wire.WorkerDied(worker=c.worker(), cause="signal", code=15, at=1.0))
            c.rendezvous()
        world.do(ev.Drain(node="node-c", drained=False))
        c.boot()
        answer(world, a, b, c, step=5)
    assert not world.task().severity.series and not world.task().severity.failed
