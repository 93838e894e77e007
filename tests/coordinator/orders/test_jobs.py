"""Submitted tasks and nodes' daemons: launches on each node, and the ends of jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator.driver import FakeAgent, World, settle
from coordinator.fake_daemon import FakeDaemon, job

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.places import competing_tasks
from unicron_lightning.coordinator.allocation.plans import standing
from unicron_lightning.coordinator.api.status import why_waiting
from unicron_lightning.coordinator.orders.jobs import job_status, refusal
from unicron_lightning.jobs import Job, problem
from unicron_lightning.planner.performance.description import TransformerProfile
from unicron_lightning.wire.daemon import NodeTask

AWAY = 0.3
"""Seconds after which a daemon is lost."""
RESTART = 10.1
"""Seconds after which a daemon is lost after a restart of the coordinator."""


def submit(world: World, name: str, **fields: Any) -> None:
    new = job(name, **fields)
    assert refusal(world.machine.cluster, [new]) is None
    world.do(ev.Submit(jobs=(new,)))


def status(world: World, name: str) -> str | None:
    found = job_status(world.machine.cluster, name)
    return None if found is None else str(found["state"])


def runs(world: World, daemon: FakeDaemon, name: str, slot: str, nodes: tuple[int, int] = (1, 1)) -> FakeAgent:
    """Let the daemon start a job's torchrun, which starts its worker if it may."""
    daemon.obey()
    agent = world.agent(f"{name}-{daemon.node}-{slot}", task=name, nodes=nodes, place=f"{daemon.node}/{slot}").start()
    world.advance(1.0)
    if agent.granted:
        agent.boot()
        settle(world, name)
    return agent


def ordered(*slots: str, **fields: Any) -> tuple[World, FakeDaemon]:
    """A daemon that is ordered to run the only job."""
    world = World()
    daemon = FakeDaemon(world, "n", *(slots or ("0",))).connect()
    submit(world, "j", **fields)
    world.advance(1.0)
    return world, daemon


def running_job() -> tuple[World, FakeDaemon, FakeAgent]:
    """The same, once the job trains there."""
    world, daemon = ordered()
    return world, daemon, runs(world, daemon, "j", "0")


def test_a_job_runs_where_a_daemon_is_and_ends_well():
    world = World()
    submit(world, "j")
    assert status(world, "j") == "queued"
    daemon = FakeDaemon(world, "n", "0").connect()
    world.advance(1.0)
    assert daemon.wanted == [("j", "0")]
    agent = runs(world, daemon, "j", "0")
    assert status(world, "j") == "running"
    agent.exit()
    assert status(world, "j") == "succeeded"
    assert [launch.ending for launch in daemon.launches] == [True], "torchrun is left to end by itself"
    agent.bye(succeeded=True)
    assert "j" not in world.machine.tasks
    daemon.ends("j", "0", 0)
    assert daemon.wanted == []
    world.start()
    assert status(world, "j") == "succeeded", "it is remembered"
    submit(world, "j")
    assert status(world, "j") == "queued"


def test_two_jobs_share_two_slots_and_the_second_waits_for_a_third():
    world = World()
    daemon = FakeDaemon(world, "n", "0", "1").connect()
    for name in ("a", "b", "c"):
        submit(world, name)
    world.advance(1.0)
    assert [name for name, _ in daemon.wanted] == ["a", "b"]
    assert status(world, "c") == "queued"
    agents = {name: runs(world, daemon, name, slot) for name, slot in daemon.wanted}
    agents["a"].exit()
    world.advance(1.0)
    assert ("c", "0") in daemon.wanted or ("c", "1") in daemon.wanted


def test_what_was_launched_stands_by_until_the_job_is_over():
    world = World()
    daemon = FakeDaemon(world, "n", "0", "1").connect()
    submit(world, "a", nodes=(1, 2))
    world.advance(1.0)
    assert daemon.wanted == [("a", "0"), ("a", "1")]
    runs(world, daemon, "a", "0", (1, 2))
    runs(world, daemon, "a", "1", (1, 2))
    submit(world, "b", weight=5.0)
    world.advance(1.0)
    assert [each for each in daemon.wanted if each[0] == "a"] == [("a", "0"), ("a", "1")]
    assert len(daemon.wanted) == 3
    world.do(ev.Cancel(task="a"))
    assert [name for name, _ in daemon.wanted] == ["b"]


def test_jobs_run_on_nodes_of_their_kind():
    world = World()
    fast = FakeDaemon(world, "f", "0", "1", kind="h100").connect()
    plain = FakeDaemon(world, "p", "0").connect()
    submit(world, "a", nodes=(1, 3), kind="h100")
    submit(world, "b", nodes=(1, 3))
    submit(world, "c", kind="a100")
    world.advance(1.0)
    assert fast.wanted == [("a", "0"), ("a", "1")] and plain.wanted == [("b", "0")]
    assert why_waiting(world.machine.cluster, world.task("c")) == "needs 1 node of kind a100, 0 slots are usable"
    world.answers_at_once = False
    submit(world, "d", kind="h100")
    assert sorted((n, sorted(names)) for n, names in world.questions[-1].parts) == [(1, ["b"]), (2, ["a", "d"])]
    world.answers_at_once = True
    world.do(ev.Disconnected(conn=plain.conn))
    world.advance(AWAY)
    slow = FakeDaemon(world, "p", "0", pid=2, started_at=2.0, kind="a100").connect()
    world.advance(1.0)
    assert slow.wanted == [("c", "0")] and status(world, "b") == "queued"


def test_a_kind_is_a_word():
    assert problem(job("j", kind="a b")) == "kind='a b': expected the kind of some nodes, as in unicron agent --kind"


def test_cancel_ends_a_job_and_tells_its_agents():
    world, daemon, agent = running_job()
    world.do(ev.Cancel(task="j"))
    assert agent.last(wire.TaskOver).succeeded is False
    assert (status(world, "j"), daemon.wanted) == ("cancelled", [])
    submit(world, "queued")
    world.do(ev.Cancel(task="queued"))
    assert status(world, "queued") == "cancelled"
    assert "queued" not in world.machine.tasks


def test_cancel_ends_a_task_that_nobody_submitted():
    world = World(restart_grace=10.0)
    agent = world.agent("a").start().boot()
    settle(world)
    world.do(ev.Cancel(task="t"))
    assert agent.last(wire.TaskOver).succeeded is False
    assert job_status(world.machine.cluster, "t")["managed"] is False
    assert status(world, "t") == "cancelled"


def test_a_job_is_queued_again_when_its_only_node_is_lost():
    world, daemon, agent = running_job()
    daemon.drop()
    agent.drop()
    world.advance(100.0)
    assert status(world, "j") == "queued", "it waits as long as it takes"
    assert not world.machine.cluster.nodes
    again = FakeDaemon(world, "n", "0", pid=2, started_at=2.0).connect()
    world.advance(1.0)
    assert again.wanted == [("j", "0")]
    back = runs(world, again, "j", "0")
    assert back.granted
    assert world.task("j").life == 2


def test_a_job_that_torchrun_gave_up_has_failed():
    world, daemon = ordered("0", "1", nodes=(1, 2))
    first = runs(world, daemon, "j", "0", (1, 2))
    second = runs(world, daemon, "j", "1", (1, 2))
    first.die(code=1, cause="exit")
    first.bye(succeeded=False)
    daemon.ends("j", "0", 1)
    assert status(world, "j") == "running", "the other one goes on"
    second.die(code=1, cause="exit")
    second.bye(succeeded=False)
    assert status(world, "j") == "queued"
    daemon.ends("j", "1", 1)
    assert status(world, "j") == "failed"
    assert job_status(world.machine.cluster, "j")["reason"].startswith("torchrun ended with status 1 at n/")


def test_the_reason_why_a_job_could_not_be_started_is_that_of_its_failure():
    world, daemon = ordered()
    (launch,) = daemon.launches
    failed = NodeTask(job=launch.job, slot="0", starts=1, code=127, reason="can't be started: no such folder")
    daemon.runs["j", "0"] = failed
    daemon.tell()
    assert job_status(world.machine.cluster, "j")["reason"] == "torchrun at n/0 can't be started: no such folder"
    assert status(world, "j") == "failed"
    assert world.event("launch_ended").fields["reason"] == failed.reason


def test_a_job_that_ended_well_while_the_coordinator_was_away_has_succeeded():
    world, daemon, _ = running_job()
    submit(world, "waits")
    world.start()
    daemon.connect()
    daemon.ends("j", "0", 0)
    assert status(world, "j") == "running", "its agent may still come and say so itself"
    world.advance(20.0)
    assert status(world, "j") == "succeeded"
    assert ("waits", "0") in daemon.wanted


def test_a_job_whose_torchrun_was_killed_is_not_given_up():
    world, daemon = ordered()
    runs(world, daemon, "j", "0").drop()
    daemon.ends("j", "0", -9)
    world.advance(60.0)
    assert status(world, "j") == "queued"


def test_a_restarted_coordinator_goes_on():
    world, daemon, agent = running_job()
    submit(world, "waits")
    number = world.task("j").number
    world.start()
    daemon.connect()
    assert daemon.wanted == [("j", "0")]
    agent.register()
    world.advance(RESTART)
    assert world.task("j").number == number, "training did not notice"
    assert {name: status(world, name) for name in ("j", "waits")} == {"j": "running", "waits": "queued"}


def test_daemons_that_stay_away_after_a_restart_are_lost():
    world = World()
    FakeDaemon(world, "n", "0").connect()
    world.start()
    assert world.machine.cluster.nodes
    world.advance(RESTART)
    assert not world.machine.cluster.nodes


def test_a_coordinator_that_lost_its_store_hears_of_jobs_from_daemons():
    world, daemon = ordered()
    daemon.obey()
    world.lose_disk()
    world.start()
    daemon.connect()
    world.advance(1.0)
    assert daemon.wanted == [("j", "0")]
    assert status(world, "j") == "queued"


def test_a_job_that_ended_while_the_daemon_was_away_is_stopped_there():
    world, daemon = ordered()
    daemon.obey()
    daemon.drop()
    world.advance(AWAY)
    world.do(ev.Cancel(task="j"))
    daemon.connect()
    assert daemon.wanted == []
    submit(world, "j")
    world.advance(1.0)
    (launch,) = daemon.launches
    assert launch.job.submitted_at == world.machine.cluster.lasting.jobs["j"].submitted_at, "a new one of that name"


@pytest.mark.parametrize("again", [False, True])
def test_an_agent_that_starts_after_its_job_s_end_begins_nothing(again: bool):
    world, daemon = ordered("0", "1", nodes=(1, 2))
    agent = runs(world, daemon, "j", "0", (1, 2))
    agent.exit()
    agent.bye(succeeded=True)
    assert daemon.wanted == [("j", "0"), ("j", "1")], "both are left to end by themselves"
    if again:
        submit(world, "j", nodes=(1, 2))
    late = world.agent("late", task="j", nodes=(1, 2), place="n/1")
    late.register(pid=daemon.runs["j", "1"].pid)
    assert late.last(wire.Refused).reason == "job 'j' is over"
    assert status(world, "j") == ("queued" if again else "succeeded")


def test_of_two_daemons_with_one_label_the_newer_stays():
    world = World()
    old = FakeDaemon(world, "n", "0", pid=1, started_at=1.0).connect()
    new = FakeDaemon(world, "n", "0", pid=2, started_at=2.0).connect()
    assert old.refused == "a newer daemon has the label 'n'"
    assert old.conn is None
    old.refused = None
    old.connect()
    assert old.refused == "a newer daemon (process 2 on h) has the label 'n'"
    assert new.conn is not None
    again = FakeDaemon(world, "n", "0", pid=2, started_at=2.0).connect()
    assert again.refused is None
    assert new.conn is None, "the same daemon's older connection is closed"


@pytest.mark.parametrize("cordoned", [False, True])
def test_nothing_is_launched_on_a_drained_or_cordoned_node(cordoned: bool):
    world = World()
    if cordoned:
        world.machine.lasting.cordoned["n"] = "it fails again and again"
    daemon = FakeDaemon(world, "n", "0").connect()
    if not cordoned:
        world.do(ev.Drain(node="n", drained=True))
    submit(world, "j")
    world.advance(1.0)
    assert daemon.wanted == []
    world.do(ev.Drain(node="n", drained=False))
    world.advance(1.0)
    assert daemon.wanted == [("j", "0")], "undrain lifts both"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"slots": []}, "different slots"),
        ({"slots": ["0", "0"]}, "different slots"),
        ({"node": "a/b"}, "without '/'"),
    ],
)
def test_a_daemon_that_makes_no_sense_is_refused(fields: dict[str, Any], words: str):
    world = World()
    daemon = FakeDaemon(world, fields.get("node", "n"), *fields.get("slots", ["0"])).connect()
    assert daemon.refused is not None and words in daemon.refused
    assert not world.machine.cluster.nodes


def test_names_are_not_given_twice():
    world = World()
    world.agent("a").start()
    assert "task 't' exists already" in (refusal(world.machine.cluster, [job("t")]) or "")


SHAPE = TransformerProfile(
    num_layers=2, hidden_size=8, num_heads=2, sequence_length=8, vocabulary_size=64, global_batch_size=4
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "a b"}, "name='a b': expected"),
        ({"name": "../x"}, "name='../x': expected"),
        ({"command": []}, "command=[]: expected the script"),
        ({"min_nodes": 3, "max_nodes": 2}, "min_nodes=3, max_nodes=2: expected 1 <= min_nodes <= max_nodes"),
        ({"workers_per_node": 0}, "workers_per_node=0: expected a number >= 1"),
        ({"max_restarts": -1}, "max_restarts=-1: expected a number >= 0"),
        ({"weight": 0.0}, "weight=0.0: expected a number > 0"),
        ({"weight": float("nan")}, "weight=nan: expected a number > 0"),
        ({"flops_per_step": 0.0}, "flops_per_step=0.0: expected a number > 0"),
        ({"profile": {0: 1.0}}, "profile={0: 1.0}: expected"),
        (
            {
                "transformer": replace(SHAPE, accelerator="A100", num_experts=4, experts_per_token=1),
                "auto_layouts": True,
            },
            "transformer.expert_parallel is missing: expected the script's",
        ),
        ({"transformer": SHAPE}, "transformer.accelerator is missing: expected one of A100, A800, H100, H200"),
        (
            {"transformer": replace(SHAPE, accelerator="A100", num_layers=10**9)},
            "transformer.num_layers=1000000000: expected a number <= 100000000",
        ),
        ({"folder": "here"}, "folder='here': expected an absolute path"),
        ({"environment": {"A=B": "c"}}, "environment: 'A=B'='c' can't be a variable"),
    ],
)
def test_a_definition_that_makes_no_sense_is_refused_in_words(fields: dict[str, Any], words: str):
    assert words in (problem(Job(**{"name": "j", "command": ["x"], **fields})) or "")
    assert problem(Job(name="j", command=["x"])) is None


def in_order(world: World, *jobs: Job) -> str | None:
    """Submit jobs together; return why they are refused."""
    refused = refusal(world.machine.cluster, jobs)
    if refused is None:
        world.do(ev.Submit(jobs=jobs))
    return refused


def test_a_job_comes_after_others_have_succeeded():
    world = World()
    daemon = FakeDaemon(world, "n", "0", "1").connect()
    assert in_order(world, job("a"), job("b"), job("c", after=["a", "b"]), job("d", after=["c"])) is None
    world.advance(1.0)
    assert [name for name, _ in daemon.wanted] == ["a", "b"]
    assert why_waiting(world.machine.cluster, world.task("c")) == "comes after a, b"
    slots = dict(daemon.wanted)
    agents = {name: runs(world, daemon, name, slot) for name, slot in slots.items()}
    for name in ("a", "b"):
        assert status(world, "c") == "queued"
        agents[name].exit()
        agents[name].bye(succeeded=True)
        daemon.ends(name, slots[name], 0)
    world.advance(1.0)
    assert [name for name, _ in daemon.wanted] == ["c"]
    submit(world, "a")
    world.advance(1.0)
    assert "c" in [name for name, _ in daemon.wanted], "another task of the same name does not matter"
    assert in_order(world, job("e", after=["b"])) is None, "it has succeeded already"
    assert "e" not in world.machine.lasting.held


def test_the_launch_of_a_job_after_a_task_is_a_situation_that_is_planned_before():
    world = World()
    daemon = FakeDaemon(world, "n", "0", "1").connect()
    together = job("a"), job("b"), job("c", after=["a"]), job("d", after=["a", "b"]), job("e", after=["c"])
    assert in_order(world, *together) is None
    world.advance(1.0)
    slots = dict(daemon.wanted)
    agents = {name: runs(world, daemon, name, slot) for name, slot in slots.items()}
    now = standing(world.machine.cluster)
    assert [(name, [each.name for each in jobs]) for name, jobs in now.coming] == [("a", ["c"])]
    (launch,) = now.launches()
    assert [each.name for each in launch.tasks] == ["b", "c"]
    world.answers_at_once = False
    agents["a"].exit()
    assert [question.situation for question in world.questions] == [launch]


def test_what_comes_after_a_failure_fails_with_it_over_a_restart():
    world = World()
    daemon = FakeDaemon(world, "n", "0").connect()
    assert in_order(world, job("a"), job("b", after=["a"]), job("c", after=["b"]), job("d")) is None
    world.advance(1.0)
    world.start()
    assert world.machine.lasting.held == {"b": ["a"], "c": ["b"]}
    world.do(ev.Cancel(task="a"))
    assert [status(world, name) for name in "abcd"] == ["cancelled", "failed", "failed", "queued"]
    reasons = [job_status(world.machine.cluster, name)["reason"] for name in "bc"]
    assert reasons == ["it comes after task a, which has been cancelled", "it comes after task b, which has failed"]
    assert set(world.machine.tasks) == {"d"}
    assert world.machine.lasting.held == {}
    assert daemon.node == "n"


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (
            [job("x", after=["nobody"])],
            "after='nobody': no such task; expected one that has succeeded, or one of ",
        ),
        ([job("x", after=["gone"])], "after='gone': expected a task that runs or has succeeded; it has been cancelled"),
        ([job("x", after=["y"]), job("y")], "after='y': no such task"),
        ([job("x"), job("x")], "name='x' is submitted twice"),
        ([job("x"), job("r")], "task 'r' exists already"),
    ],
)
def test_jobs_that_are_submitted_together_are_accepted_all_or_none(jobs: list[Job], words: str):
    world = World()
    submit(world, "r")
    submit(world, "gone")
    world.do(ev.Cancel(task="gone"))
    assert words in (in_order(world, *jobs) or "")
    assert set(world.machine.tasks) == {"r"}


def test_a_time_limit_counts_from_the_start_over_a_restart():
    world = World()
    submit(world, "j", time_limit_seconds=100.0)
    world.advance(1000.0)
    daemon = FakeDaemon(world, "n", "0").connect()
    world.advance(1.0)
    agent = runs(world, daemon, "j", "0")
    world.advance(60.0)
    assert status(world, "j") == "running"
    world.start()
    daemon.conn = None
    daemon.connect()
    agent.register()
    world.advance(30.0)
    assert status(world, "j") == "running"
    world.advance(15.0)
    assert agent.last(wire.TaskOver).succeeded is False
    found = job_status(world.machine.cluster, "j")
    assert (found["state"], found["reason"]) == ("failed", "its time limit of 100 s is reached")


def test_the_queue_is_in_the_order_of_submissions():
    world = World()
    FakeDaemon(world, "n", "0", "1").connect()
    assert in_order(world, *(job(f"j-{number}") for number in range(9, 13))) is None
    assert [task.id for task in competing_tasks(world.machine.cluster)] == ["j-9", "j-10", "j-11", "j-12"]
