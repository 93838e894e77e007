"""Several tasks share places: the assignment, and the way from one plan to the next."""

from __future__ import annotations

import pytest
from coordinator.driver import FakeAgent, World

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.api.status import staying

GATHERED = 0.6
"""Seconds after which registered agents count."""
SAVED = 40
"""Step of the checkpoints that are written before a pause."""


def crowd(
    places: int, world: World | None = None, **tasks: tuple[int, int]
) -> tuple[World, dict[str, dict[int, FakeAgent]]]:
    """Create an agent of every task at every place; workers run at the places that the plan assigns."""
    world = world or World()
    agents: dict[str, dict[int, FakeAgent]] = {}
    for task, nodes in tasks.items():
        agents[task] = {
            number: world.agent(f"{task}{number}", task=task, nodes=nodes, place=f"n{number}/0")
            for number in range(places)
        }
        for agent in agents[task].values():
            agent.start()
        settle(world, agents)
    return world, agents


def settle(world: World, agents: dict[str, dict[int, FakeAgent]], *, saves: bool = True) -> None:
    """Complete everything that is due: workers start, enter epochs, save before a pause, and stop on order."""
    for _ in range(40):
        busy = False
        for agent in [agent for each in agents.values() for agent in each.values() if agent.conn is not None]:
            if agent.stopped:
                agent.rendezvous()
                busy = True
            if agent.granted and agent.local_world is None:
                agent.boot()
                busy = True
            task = world.machine.tasks.get(agent.task)
            if task is not None and task.epoch is not None and task.go is None:
                for worker in task.workers_of(agent.name):
                    if worker.id in agent.workers and worker.ready < task.number:
                        agent.ready(task.number)
                        busy = True
            elif saves and task is not None and task.pausing and task.settled and agent.workers:
                agent.saved(f"/{agent.task}/paused", SAVED, parting=True)
                busy = True
        if not busy and not world.timers:
            return
        if not busy:
            world.advance(1.0)
    return


def members(world: World, task: str) -> list[str]:
    """Return the nodes whose workers train a task, which must be in an epoch that all have entered."""
    state = world.task(task)
    assert state.settled
    return sorted(member.node for member in state.members())


def exclusive(world: World) -> None:
    """Check that no accelerators are used by two tasks."""
    holders: dict[str, str] = {}
    for task in world.machine.tasks.values():
        for agent in task.agents.values():
            if agent.place is not None and (agent.id in task.slots or agent.stopping):
                assert holders.setdefault(agent.place, task.id) == task.id


def test_a_task_alone_has_all_it_can_use() -> None:
    world, agents = crowd(5, a=(1, 4))
    assert members(world, "a") == ["n0", "n1", "n2", "n3"]
    assert not world.questions and [a.granted for a in agents["a"].values()] == [True] * 4 + [False]


def test_a_second_task_gets_its_share_at_a_step_boundary() -> None:
    world, agents = crowd(4, a=(1, 4), b=(1, 4))
    exclusive(world)
    assert (len(members(world, "a")), len(members(world, "b"))) == (2, 2)
    assert not set(members(world, "a")) & set(members(world, "b"))
    kinds = [message.kind for message in agents["a"][0].all(wire.Epoch)]
    assert "leave" in kinds and "fail" not in kinds, "task a shrank by a planned change, losing nothing"
    assert world.task("a").restarts == 0


def test_the_place_is_free_only_when_the_other_tasks_workers_have_stopped() -> None:
    world, agents = crowd(2, a=(1, 2))
    b = world.agent("b0", task="b", nodes=(1, 2), place="n0/0").start()
    other = world.agent("b1", task="b", nodes=(1, 2), place="n1/0").start()
    world.advance(GATHERED)
    assert world.machine.lasting.allocation == {"a": 1, "b": 1}
    given = next(name for name, task in world.machine.lasting.assigned.items() if task == "b")
    mine, its = (b, agents["a"][0]) if given == "n0/0" else (other, agents["a"][1])
    assert not mine.granted, "task a still trains there"
    for agent in agents["a"].values():
        agent.ready(world.task("a").number)
    assert its.stopped and not mine.granted, "its workers have been told to stop, and may still be there"
    its.rendezvous()
    assert mine.granted
    exclusive(world)


def test_a_lost_node_is_made_good_by_the_plan_and_given_back() -> None:
    world, agents = crowd(6, a=(3, 4), b=(1, 4))
    assert (len(members(world, "a")), len(members(world, "b"))) == (3, 3)
    victim = members(world, "a")[0]
    for task in agents.values():
        agent = task[int(victim[1:])]
        world.do(ev.Disconnected(conn=agent.conn or 0))
        agent.conn = None
    world.advance(1.0)
    settle(world, agents)
    exclusive(world)
    assert (len(members(world, "a")), len(members(world, "b"))) == (3, 2), "the minimum of a is kept"
    assert world.event("plan_made").fields["allocation"] == {"a": 3, "b": 2}
    number = int(victim[1:])
    for task_id, task in agents.items():
        task[number] = world.agent(
            f"{task_id}{number}again", task=task_id, nodes=task[0 if number else 1].nodes, place=f"{victim}/0"
        )
        task[number].start()
    settle(world, agents)
    exclusive(world)
    assert (len(members(world, "a")), len(members(world, "b"))) == (3, 3)
    assert world.task("a").restarts == world.task("b").restarts == 0


@pytest.mark.parametrize("plain", [False, True])
def test_a_task_that_lost_all_it_had_does_not_drive_out_one_that_runs(plain: bool) -> None:
    world = World()
    agents = {}
    for task in "ab":
        agents[task] = {n: world.agent(f"{task}{n}", task=task, nodes=(1, 1), place=f"n{n}/0") for n in range(2)}
        for agent in agents[task].values():
            agent.start()
    world.advance(GATHERED)
    for agent in [agent for each in agents.values() for agent in each.values() if agent.granted]:
        (agent.launch if plain else agent.boot)()
    settle(world, {} if plain else agents)
    (lost,) = [number for number, agent in agents["a"].items() if agent.granted]
    world.answers_at_once = False
    for each in agents.values():
        world.do(ev.Disconnected(conn=each[lost].conn or 0))
        each[lost].conn = None
    world.advance(1.0)
    (question,) = world.questions
    assert {task.name: task.runs for task in question.tasks} == {"a": False, "b": True}


def test_a_task_that_is_resized_leaves_the_places_that_the_plan_takes_from_it() -> None:
    """Places of its newest agents do not go first: it would have to leave twice."""
    world, agents = crowd(5, a=(1, 3), b=(1, 2))
    first = members(world, "a")[0]
    newest = agents["a"][int(first[1:])]
    newest.die()
    newest.rendezvous()
    settle(world, agents)
    assert members(world, "a")[0] == first and world.task("a").slots[-1] == newest.name
    before = world.names("a").count("epoch_published")
    world.do(ev.Resize(task="a", nodes=2))
    settle(world, agents)
    exclusive(world)
    assert len(members(world, "a")) == 2
    assert world.names("a").count("epoch_published") == before + 1, "it leaves once, and nobody has to come"
    kept = {name for name, task in world.machine.lasting.assigned.items() if task == "a"}
    assert kept == {f"{node}/0" for node in members(world, "a")}


def test_a_task_that_is_resized_while_a_worker_restarts_leaves_that_place() -> None:
    world, agents = crowd(5, a=(1, 3), b=(1, 2))
    first = agents["a"][int(members(world, "a")[0][1:])]
    alive = members(world, "a")[1:]
    first.die()
    for agent in agents["a"].values():
        if agent.workers:
            agent.ready(world.task("a").number, step=5)
    world.do(ev.Resize(task="a", nodes=2))
    settle(world, agents)
    assert members(world, "a") == alive
    kept = {name for name, task in world.machine.lasting.assigned.items() if task == "a"}
    assert kept == {f"{node}/0" for node in alive}


def test_a_task_that_ends_leaves_its_places_to_the_others() -> None:
    world, agents = crowd(4, a=(1, 4), b=(1, 4))
    for agent in agents["b"].values():
        if agent.workers:
            agent.say(wire.WorkerDone(worker=agent.worker()))
    for agent in agents["b"].values():
        agent.say(wire.Bye(succeeded=bool(agent.workers)))
    settle(world, agents)
    assert members(world, "a") == ["n0", "n1", "n2", "n3"]
    assert "b" not in world.machine.tasks


def test_weights_decide() -> None:
    world, agents = crowd(4, a=(1, 4))
    agents["b"] = {n: world.agent(f"b{n}", task="b", nodes=(1, 4), place=f"n{n}/0") for n in range(4)}
    for agent in agents["b"].values():
        agent.register(weight=5.0).rendezvous()
    settle(world, agents)
    assert (len(members(world, "a")), len(members(world, "b"))) == (1, 3)


def test_a_task_whose_minimum_does_not_fit_waits_and_starts_when_it_does() -> None:
    world, agents = crowd(3, a=(2, 3), b=(2, 3))
    assert len(members(world, "a")) == 3 and not world.task("b").formed
    for number in range(3, 5):
        for task in agents:
            agents[task][number] = world.agent(f"{task}{number}", task=task, nodes=(2, 3), place=f"n{number}/0").start()
    settle(world, agents)
    assert (len(members(world, "a")), len(members(world, "b"))) in ((3, 2), (2, 3))


def unfit(saves: bool = True) -> tuple[World, dict[str, dict[int, FakeAgent]], str, str]:
    """Let two tasks with a minimum of two nodes lose one of four; return the paused one's name and the lost node."""
    world, agents = crowd(4, a=(2, 2), b=(2, 2))
    for task in agents.values():
        next(agent for agent in task.values() if agent.workers).saved(f"/{agent_task(task)}/7", 7)
    node = members(world, "a")[0]
    number = int(node[1:])
    for task in agents.values():
        agent = task[number]
        world.do(ev.Disconnected(conn=agent.conn or 0))
        agent.conn = None
    world.advance(1.0)
    settle(world, agents, saves=saves)
    if not saves:
        assert not {"task_paused"} & {*world.names("a"), *world.names("b")}, (
            "its members may still be writing the checkpoint"
        )
        world.advance(world.limits.pause_grace)
        settle(world, agents)
    exclusive(world)
    (paused,) = [task for task in "ab" if not world.task(task).formed]
    return world, agents, paused, node


def agent_task(agents: dict[int, FakeAgent]) -> str:
    return agents[0].task


def comes_back(world: World, agents: dict[str, dict[int, FakeAgent]], node: str) -> None:
    for task_id, task in agents.items():
        again = world.agent(f"{task_id}{node[1:]}x", task=task_id, nodes=(2, 2), place=f"{node}/0")
        task[int(node[1:])] = again.start()
    settle(world, agents)
    exclusive(world)
    assert (len(members(world, "a")), len(members(world, "b"))) == (2, 2)


def test_a_drain_pauses_no_task_and_is_done_once_another_place_is_there() -> None:
    world, agents = crowd(3, a=(3, 3), b=(4, 4))
    settle(world, agents)
    before = members(world, "a")
    agents["a"][0].drain()
    settle(world, agents)
    assert members(world, "a") == before and len(before) == 3
    assert world.task("a").life == 1 and "task_paused" not in world.names()
    assert [*staying(world.machine.cluster)] == ["n0"], "not its agent, which was not drained by its id"
    agents["a"][3] = world.agent("a3", task="a", nodes=(3, 3), place="n3/0").start()
    world.advance(1)
    settle(world, agents)
    assert members(world, "a") == ["n1", "n2", "n3"]
    assert world.task("a").life == 1 and not staying(world.machine.cluster)


def test_a_running_task_that_no_longer_fits_saves_and_goes_on_later() -> None:
    world, agents, paused, node = unfit()
    assert world.event("task_paused").fields == {"step": SAVED}
    assert [n for n in world.names(paused) if n.startswith("task_pause")] == ["task_pauses", "task_paused"]
    assert world.task(paused).checkpoint.step == SAVED and not world.task(paused).pausing
    comes_back(world, agents, node)
    assert next(agent for agent in agents[paused].values() if agent.workers).resumes()[0] == f"/{paused}/paused"


def test_a_task_that_does_not_save_in_time_is_paused_all_the_same() -> None:
    world, agents, paused, node = unfit(saves=False)
    assert world.event("task_paused").fields == {"step": 7}
    comes_back(world, agents, node)
    assert next(agent for agent in agents[paused].values() if agent.workers).resumes() == [f"/{paused}/7"]


def test_an_overtaken_answer_changes_nothing() -> None:
    world = World()
    world.answers_at_once = False
    _, agents = crowd(4, world, a=(1, 4), b=(1, 4))
    (old,) = world.questions
    world.advance(GATHERED)
    agents["a"][0].drain()
    (new,) = world.questions
    assert new.key != old.key
    world.do(ev.Planned(key=old.key, allocation={"a": 1, "b": 3}))
    assert "b" not in world.machine.lasting.assigned.values()
    world.answer()
    assert "b" in world.machine.lasting.assigned.values()


def test_a_plan_overtaken_half_way_is_left_without_harm() -> None:
    """Task b ends while task a leaves a place for it: a keeps the place, and no work is repeated."""
    world, agents = crowd(2, a=(1, 2))
    b = [world.agent(f"b{n}", task="b", nodes=(1, 1), place=f"n{n}/0").start() for n in range(2)]
    world.advance(GATHERED)
    assert world.task("a").epoch is not None and world.task("a").epoch.kind == "leave"
    for agent in b:
        agent.say(wire.Bye(succeeded=False))
    assert set(world.machine.lasting.assigned.values()) == {"a"}
    settle(world, agents)
    assert members(world, "a") == ["n0", "n1"]
    assert world.task("a").restarts == 0


@pytest.mark.parametrize("moment", ["asked", "leaving", "stopping", "granted"])
def test_a_restarted_coordinator_goes_on_with_the_plan(moment: str) -> None:
    world = World()
    world.answers_at_once = moment != "asked"
    _, agents = crowd(2, world, a=(1, 2))
    world.answer()
    settle(world, agents)
    agents["b"] = {n: world.agent(f"b{n}", task="b", nodes=(1, 2), place=f"n{n}/0").start() for n in range(2)}
    world.advance(GATHERED)
    if moment in ("stopping", "granted"):
        for agent in agents["a"].values():
            agent.ready(world.task("a").number)
        assert any(agent.stopped for agent in agents["a"].values())
    if moment == "granted":
        settle_once = [agent for agent in agents["a"].values() if agent.stopped]
        for agent in settle_once:
            agent.rendezvous()
        assert any(agent.granted for agent in agents["b"].values())
    world.answers_at_once = True
    world.start()
    for agent in [*agents["a"].values(), *agents["b"].values()]:
        agent.register()
        exclusive(world)
    settle(world, agents)
    exclusive(world)
    assert (len(members(world, "a")), len(members(world, "b"))) == (1, 1)


def test_an_agent_that_comes_back_late_does_not_get_its_place_back() -> None:
    """An agent was declared lost after a cut, and its place belongs to another task: its workers are fenced."""
    world, agents = crowd(2, a=(1, 2))
    late = agents["a"][1]
    world.do(ev.Disconnected(conn=late.conn or 0))
    late.conn = None
    world.advance(1.0)
    b = world.agent("b1", task="b", nodes=(1, 1), place="n1/0").start()
    world.advance(GATHERED)
    assert b.granted
    late.register()
    assert late.all(wire.Fence) and late.stopped and not world.task("a").agents[late.name].waiting
    assert world.machine.lasting.assigned == {"n0/0": "a", "n1/0": "b"}
    late.rendezvous()
    assert not late.granted
    exclusive(world)


def test_agents_without_a_label_are_left_alone() -> None:
    world = World()
    own = [world.agent(f"c{n}", task="c").start().boot() for n in range(2)]
    crowd(2, world, a=(1, 2), b=(1, 2))
    assert all(agent.granted for agent in own)
    assert set(world.machine.lasting.assigned.values()) == {"a", "b"}


def test_with_its_store_lost_the_coordinator_takes_over_the_plan_that_the_agents_tell() -> None:
    world, agents = crowd(6, a=(2, 4), b=(1, 4))
    before = {task: members(world, task) for task in "ab"}
    world.lose_disk()
    world.start()
    for agent in [*agents["b"].values(), *agents["a"].values()]:
        agent.register()
        world.advance(0.3)  # a grant may precede the end of the place's use: the machine's lock prevents a conflict
    settle(world, agents)
    exclusive(world)
    assert {task: members(world, task) for task in "ab"} == before
    assert not any(agent.all(wire.Stop) for agent in agents["a"].values() if agent.workers)
    assert world.task("a").restarts == world.task("b").restarts == 0


def test_of_two_agents_of_a_task_at_a_place_the_one_that_is_there_gets_it() -> None:
    """After a restart of the coordinator the other agent's end is not known yet."""
    world = World()
    world.agent("old", task="a", nodes=(2, 3), place="n0/0").start()
    world.start()
    new = world.agent("new", task="a", nodes=(2, 3), place="n0/0").start()
    other = world.agent("other", task="a", nodes=(2, 3), place="n1/0").start()
    world.advance(0.6)
    world.advance(11.0)
    assert new.granted
    assert other.granted
    exclusive(world)


def test_a_task_alone_takes_no_place_with_which_it_cannot_begin() -> None:
    world, agents = crowd(1, a=(2, 3))
    assert set(world.machine.lasting.assigned.values()) == {""}
    agents["a"][1] = world.agent("a1", task="a", nodes=(2, 3), place="n1/0").start()
    settle(world, agents)
    assert members(world, "a") == ["n0", "n1"]
    agents["a"][1].drop()
    world.advance(1.0)
    assert world.machine.lasting.assigned == {"n0/0": "a"}, "it waits for another with what it has"
