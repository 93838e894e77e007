"""What `unicron status` and `unicron jobs` report about tasks and nodes that do not proceed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator.driver import World, running, settle, started
from coordinator.fake_agent import FakeAgent
from coordinator.fake_daemon import FakeDaemon, job
from coordinator.membership.test_plain import plain
from coordinator.severity.test_apply import breaks, settle_all

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.api.status import (
    cluster_status,
    lost_nodes,
    state_of_task,
    staying,
    task_status,
    why_waiting,
)


def why(world: World, task: str = "t") -> str | None:
    return why_waiting(world.machine.cluster, world.task(task))


def test_a_queued_job_states_what_it_needs_and_what_there_is():
    world = World()
    world.do(ev.Submit(jobs=(job("j", nodes=(4, 4)),)))
    assert why(world, "j") == "needs 4 nodes, 0 slots are usable"
    FakeDaemon(world, "n", "0", "1").connect()
    other = FakeDaemon(world, "m", "0").connect()
    world.advance(1.0)
    assert why(world, "j") == "needs 4 nodes, 3 slots are usable"
    world.do(ev.Drain(node="m", drained=True))
    world.advance(1.0)
    assert why(world, "j") == "needs 4 nodes, 2 slots are usable; drained: m"
    other.drop()
    world.advance(100.0)
    assert why(world, "j") == "needs 4 nodes, 2 slots are usable; lost: m"
    assert list(lost_nodes(world.machine.cluster)) == ["m"]
    FakeDaemon(world, "m", "0", pid=2, started_at=2.0).connect()
    assert not lost_nodes(world.machine.cluster), "it is back"


def test_a_task_that_starts_without_the_node_of_a_broken_gpu_states_which_one_it_lacks():
    """The node is cordoned before the first epoch, and the other node waits. The reason was: 1 of 1 worker ready."""
    world = World(nodes=(2, 2))
    a, b = (world.agent(name).start() for name in "ab")
    for agent in (a, b):
        agent.launch().hello()
    a.ready(0)
    breaks(b, b.worker())
    b.rendezvous()
    reason = why(world)
    assert reason is not None and "1 of 1 worker ready; needs 2 nodes, has 1; drained: node-b" in reason, reason
    assert "uncorrectable ECC error" in reason
    b.drain(False)
    assert b.granted and why(world) == "starting: 1 of 2 workers ready"


def test_a_job_with_slots_is_starting_before_its_agents_register_and_a_goodbye_hides_no_lost_daemon():
    world = World()
    daemon = FakeDaemon(world, "n", "0").connect()
    FakeDaemon(world, "m", "0").connect()
    world.do(ev.Submit(jobs=(job("j", nodes=(2, 2)), job("k", nodes=(3, 3)))))
    world.advance(1.0)
    assigned = world.machine.cluster.lasting.assigned.values()
    assert [state_of_task(world.task(each), assigned) for each in "jk"] == ["starting", "queued"]
    agent = world.agent("a", task="j", nodes=(2, 2), place="n/0").start()
    daemon.drop()
    world.advance(100.0)
    agent.bye(succeeded=False)
    assert list(lost_nodes(world.machine.cluster)) == ["n"]


def test_a_queued_job_states_whose_the_slots_are():
    world = World()
    FakeDaemon(world, "n", "0", "1").connect()
    world.do(ev.Submit(jobs=(job("a", nodes=(1, 2)),)))
    world.advance(1.0)
    assert why(world, "a") == "starting: torchrun at n/0, n/1"
    world.do(ev.Submit(jobs=(job("b", nodes=(2, 2)),)))
    world.advance(1.0)
    for place in ("0", "1"):
        world.agent(f"a{place}", task="a", nodes=(1, 2), place=f"n/{place}").start()
    world.advance(1.0)
    assert why(world, "b") == "needs 2 nodes, the plan gives 2 usable slots to a (2)"


def test_an_attached_task_states_how_many_nodes_wait_and_how_far_workers_are():
    world = World(nodes=(2, 3))
    a = world.agent("a").start()
    assert (why(world), task_status(world.task())["state"]) == ("needs 2 nodes, 1 node waits", "forming")
    b = world.agent("b").start()
    reason = "starting: no worker has reported yet (those of a script without the strategy do not)"
    assert (why(world), task_status(world.task())["state"]) == (reason, "starting")
    a.boot()
    assert (why(world), task_status(world.task())["state"]) == ("starting: 1 of 2 workers ready", "starting")
    b.boot()
    settle(world)
    assert (why(world), task_status(world.task())["state"]) == (None, "running")


def test_a_task_that_waits_states_for_what_and_what_would_end_it():
    world, (a, b) = started(2, nodes=(2, 2), restart_grace=10)
    b.die(cause="exit", code=1)
    assert why(world) == "recovering: waits for a/0#1; for detection.recovery_time at most"
    settle(world)
    assert task_status(world.task())["state"] == "holding"
    ends = "another node joins, it is resized, or severity.hold_timeout has passed"
    last = "last failure, on node-b: exit 1"
    assert why(world) == f"holds below its minimum: needs 2 nodes, has 1, until {ends}; {last}"
    b.drain()
    b.rendezvous()
    assert why(world) == f"holds below its minimum: needs 2 nodes, has 1, until {ends}; drained: node-b; {last}"
    b.drain(False)
    b.boot()
    settle(world)
    assert why(world) is None
    world.do(ev.Cancel(task="t", save=True))
    assert why(world) == "pausing: its members write a checkpoint; for detection.pause_grace at most"
    world.lose_disk()
    world.start()
    a.register()
    assert (why(world) or "").startswith("resuming: the coordinator had lost its record")


def test_a_plain_script_that_restarts_states_for_whom_it_waits():
    world, (a, b) = plain(2)
    assert why(world) is None
    c = world.agent("c").start()
    assert (task_status(world.task())["state"], c.all(wire.Grant)) == ("restarting", [])
    assert why(world) == "restarting with other nodes: waits until node-a, node-b have stopped their workers"
    a.rendezvous()
    assert why(world) == "restarting with other nodes: waits until node-b have stopped their workers"
    b.rendezvous()
    assert (why(world), task_status(world.task())["state"]) == (None, "plain")


def test_a_job_whose_torchruns_wait_states_why():
    world = World()
    FakeDaemon(world, "n", "0").connect()
    world.do(ev.Submit(jobs=(job("j", nodes=(1, 1)),)))
    world.advance(1.0)
    agent = world.agent("a", task="j", nodes=(1, 1), place="n/0").register()
    world.task("j").agents["a"].held = True
    agent.rendezvous()
    assert why(world, "j") == "starting: torchrun at n/0; n has failed to start, and begins again after 30 s at most"


def test_an_agent_whose_grant_is_delayed_states_why():
    world = World(nodes=(2, 2))
    a = world.agent("a").start()
    world.task().agents["a"].held = True
    assert why(world) == "needs 2 nodes, 1 node waits; node-a has failed to start, and begins again after 30 s at most"
    world.task().agents["a"].held = False
    a.drop()
    assert why(world) == "needs 2 nodes, 1 node waits; node-a is away, for detection.reconnect_grace at most"


def test_a_task_that_a_new_coordinator_restores_states_for_whom_it_waits():
    world = World(nodes=(2, 3))
    a, b = (world.agent(name).start() for name in "ab")
    world.start()
    most = "300 s at most, as the coordinator hears no agent"
    assert why(world) == f"resuming: waits for node-a, node-b to connect again; for {most}"
    a.register()
    assert why(world) == "resuming: waits for node-b to connect again; for detection.restart_grace at most"
    b.register()
    assert why(world) == "starting: no worker has reported yet (those of a script without the strategy do not)"


def test_a_hold_ends_the_task_in_time():
    world, (a, b) = started(2, nodes=(2, 2), hold_timeout=100)
    b.die()
    settle_all(world, a)
    world.advance(90)
    b.rendezvous().boot()
    settle_all(world, a, b)
    b.die()  # before a step is finished
    settle_all(world, a)
    world.advance(11)
    said = world.event("task_over").fields
    assert said["succeeded"] is False
    assert said["reason"].startswith("held below the minimum of 2 nodes: for 10") and "node-b" in said["reason"]
    assert a.last(wire.TaskOver).succeeded is False


def test_a_task_that_trains_after_a_hold_is_not_ended_though_its_steps_are_long():
    world, (a, b) = started(2, nodes=(2, 2), hold_timeout=100)
    for step in (2, 3):
        b.die()
        settle_all(world, a)
        assert task_status(world.task())["state"] == "holding"
        world.advance(50)
        b.rendezvous().boot()
        settle_all(world, a, b)
        world.advance(60)
        a.say(wire.Progress(worker=a.worker(), step=step, metrics={}))
        world.advance(60)
        assert task_status(world.task())["state"] == "running"
    b.die()
    settle_all(world, a)
    world.advance(101)
    assert world.task().over is not None, "the time counts anew from the last hold that a step has ended"


WRONG = {"kind": "other_software_error", "cause": "WorkersDiffer: lr is 0.1, expected 0.2"}
RAISED = {"type": "WorkersDiffer", "frames": ["train.py:1 in main"]}


def fail_and_return(world: World, a: FakeAgent, b: FakeAgent, number: int, **report: Any) -> None:
    """Have a new worker of ``b`` report an error and end, and start the next one."""
    about = {"phase": "setup", "step": 0, "at": world.now, "details": RAISED, "ends": True, **WRONG, **report}
    b.say(wire.ErrorReport(worker=b.worker(), **about))
    b.workers.clear()
    settle_all(world, a)
    if world.task().over is None:
        assert task_status(world.task())["state"] == "holding"
        world.advance(2)
        b.rendezvous().boot()
        settle_all(world, a, b)
        a.say(wire.Progress(worker=a.worker(), step=number + 1, metrics={}))  # joiners may take part in a step


@pytest.mark.parametrize("differ", [False, True])
def test_equal_failures_of_the_only_other_node_end_the_task_when_it_has_left(differ: bool):
    world, (a, b) = started(2, nodes=(2, 2))
    for number in range(3):
        fail_and_return(world, a, b, number, **({"cause": "another"} if differ and number == 2 else {}))
    b.workers.clear()
    b.bye(succeeded=False)
    settle_all(world, a)
    if differ:
        assert world.task().over is None, "its failures differ"
        return
    reason = world.event("task_over").fields["reason"]
    assert "no other node is left, and node-b fails in one way: 3 times in a row" in reason
    assert "WorkersDiffer: lr is 0.1, expected 0.2" in reason
    assert a.last(wire.TaskOver).succeeded is False


@pytest.mark.parametrize(
    "spared", ["", "another starts, too", "no exception of the program", "a failure differs", "a worker lasted"]
)
def test_equal_exceptions_of_the_only_other_node_end_the_task_though_its_agent_tries_again(spared: str):
    world = World(crash_attempts=5)
    if spared == "another starts, too":
        a, b, c = running(world, 3, nodes=(3, 3))
        c.die()
        settle_all(world, a, b)
    else:
        a, b = running(world, 2, nodes=(2, 2))
    for number in range(5):
        assert world.task().over is None
        if number == 4 and spared == "a worker lasted":
            a.say(wire.Progress(worker=a.worker(), step=20, metrics={}))
        other = {"kind": "cuda_error"} if spared == "no exception of the program" else {}
        if number == 4 and spared == "a failure differs":
            other = {"cause": "another"}
        fail_and_return(world, a, b, number, **other)
    if spared:
        assert world.task().over is None
        return
    reason = world.event("task_over").fields["reason"]
    assert "no other node is there, and node-b fails in one way: 5 times in a row" in reason
    assert a.last(wire.TaskOver).succeeded is False


def test_a_drained_node_states_why_it_stays():
    world, (a, b) = started(2, nodes=(2, 2))
    b.drain()
    reason = "task t needs at least 2 nodes, 1 other has its workers"
    assert staying(world.machine.cluster) == {"node-b": reason}
    assert cluster_status(world.machine.cluster)["staying"] == {"node-b": reason}
    c = world.agent("c").start()
    c.boot()
    assert not staying(world.machine.cluster)
    a.drain()
    assert list(staying(world.machine.cluster)) == ["node-a", "node-b"]


def test_a_lost_node_is_down_until_it_registers_again():
    world, (_, b) = started(2, nodes=(1, 2))
    b.drop()
    world.advance(1.0)
    assert list(lost_nodes(world.machine.cluster)) == ["node-b"]
    world.agent("b2", place="node-b/0").start()
    assert not lost_nodes(world.machine.cluster)


def test_members_of_a_spread_model_show_their_replica_and_stage():
    world, agents = started(3)
    names = [agent.worker() for agent in agents]
    task = world.task()
    layout = wire.Layout(tensor=1, pipeline=2)
    task.replicas, task.replicas_of = [names[:2]], task.number
    task.layouts.spread = wire.Spread(
        layout=layout, ordered=False, workers=2, micro_batches=2, tensor_divides={}, pipeline_divides={}
    )
    shown = [(each["replica"], each["stage"], each["spare"]) for each in task_status(task)["members"]]
    assert shown == [(0, 0, False), (0, 1, False), (None, None, True)]
    assert msgspec.json.encode(task_status(task))
