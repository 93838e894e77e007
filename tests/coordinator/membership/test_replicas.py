"""Tasks whose model is spread over several workers: whatever they lose, a whole replica stays."""

from __future__ import annotations

import msgspec
import pytest
from coordinator.allocation.test_answers import KNOWN, on, situation, task
from coordinator.driver import FakeAgent, World, members, settle

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.answers import allocation_of, state_of
from unicron_lightning.coordinator.membership.slots import refusal
from unicron_lightning.planner.placement import Place, assign
from unicron_lightning.planner.solver import solve


def grid(names: str, *replicas: str, at_once: int | None = None) -> World:
    """Create a task of this many agents with one worker each, two to a replica, which has reported its replicas."""
    world = World()
    start(world, names, (2, 6))
    assert len(members(world)) == len(names)
    tell(world, *replicas, at_once=at_once)
    return world


def start(world: World, names: str, nodes: tuple[int, int], capacity: int = 8) -> None:
    """Start a number of agents, in a settled epoch as far as the task admits them."""
    world.nodes = nodes
    started = [world.agent(name).start() for name in names]
    for agent in started:
        agent.granularity = 2
        agent.boot(capacity=capacity)
    for _ in names:
        settle(world)
    assert world.task().settled


def tell(world: World, *replicas: str, at_once: int | None = None) -> None:
    """Have the first member report the members of each replica, by letters."""
    tell_of(world, "t", *map(list, replicas), at_once=at_once)


def tell_of(world: World, task: str, *replicas: list[str], at_once: int | None = None) -> None:
    """Report the replicas of a task by name."""
    first = world.task(task).members()[0]
    named = [[agents(world)[name].worker() for name in replica] for replica in replicas]
    word = wire.Replicas(worker=first.worker, epoch=world.task(task).number, replicas=named, at_once=at_once)
    agents(world)[first.agent].say(word)


def agents(world: World) -> dict[str, FakeAgent]:
    return {agent.name: agent for agent in world.agents.values()}


def staying(world: World) -> str:
    """Return the agents of the newest epoch, if it is a ``leave``."""
    assert world.task().epoch.kind == "leave"
    return "".join(member.agent for member in world.task().members())


def resize(world: World, nodes: int) -> None:
    world.do(ev.Resize(task="t", nodes=nodes))


def test_a_task_shrinks_by_its_youngest_replica() -> None:
    """In slot order it would keep one worker of each."""
    world = grid("abcd", "bd", "ac")
    resize(world, 2)
    assert staying(world) == "bd"


def test_spares_leave_first() -> None:
    world = grid("abcde", "cd", "be")
    resize(world, 4)
    assert staying(world) == "bcde"


def test_replicas_that_have_died_are_none() -> None:
    world = grid("abcd", "ab", "cd")
    agents(world)["b"].die()
    resize(world, 2)
    settle(world)
    assert len(members(world)) == 3, "not before the members have told of this epoch"
    tell(world, "cd")
    assert staying(world) == "cd"


def test_no_more_leave_at_once_than_is_safe() -> None:
    world = grid("abcdef", "ab", "cd", "ef", at_once=1)
    resize(world, 2)
    assert staying(world) == "abcd"
    settle(world)
    assert len(members(world)) == 4
    tell(world, "ab", "cd", at_once=1)
    assert staying(world) == "ab"


def test_a_word_that_the_coordinator_has_lost_is_said_again_when_the_agent_registers() -> None:
    world = grid("abcd", "ab", "cd")
    world.task().replicas_of = 0
    agents(world)["d"].drain()
    assert world.task().epoch.kind != "leave"
    first = agents(world)["a"]
    named = [[agents(world)[name].worker() for name in replica] for replica in ("ab", "cd")]
    first.drop()
    word = wire.Replicas(worker=first.worker(), epoch=world.task().number, replicas=named)
    first.workers[first.worker()] = msgspec.structs.replace(first.workers[first.worker()], replicas=word)
    first.register()
    assert staying(world) == "abc"


def test_a_drained_node_stays_until_another_replica_is_whole() -> None:
    world = grid("abcd", "ab", "cd")
    agents(world)["a"].drain()
    agents(world)["c"].drain()
    assert staying(world) == "bcd"
    settle(world)
    tell(world, "cd")
    assert world.task().settled and not agents(world)["c"].all(wire.Stop)
    late = world.agent("e").start()
    late.granularity = 2
    late.boot()
    settle(world)
    tell(world, "cd", "eb")
    assert staying(world) == "bde"


def test_who_comes_for_a_drained_node_stays_although_they_are_too_many_until_it_has_left() -> None:
    """An agent released before the members reported their replicas would return, and be released again."""
    world = World()
    start(world, "abcd", (4, 4), capacity=4)
    tell(world, "ab", "cd")
    agents(world)["a"].drain()
    late = world.agent("e").start()
    late.granularity = 2
    late.boot(capacity=4)
    settle(world)
    assert len(members(world)) == 5 and world.task().settled
    tell(world, "ab", "cd")
    assert staying(world) == "bcde"
    settle(world)
    tell(world, "cd", "be")
    assert len(members(world)) == 4 and world.task().settled and not late.all(wire.Stop)


def test_a_task_is_given_whole_replicas() -> None:
    world = World()
    start(world, "abcde", (2, 5))
    assert world.task().limit == 4
    assert world.task().slots == list("abcd") and agents(world)["e"].all(wire.Stop)
    assert len(members(world)) == 4
    assert refusal(world.task(), 4) is None
    assert "nodes=3: a replica of the model takes 2 nodes; expected 2, ... 4, or all" in (
        refusal(world.task(), 3) or ""
    )


@pytest.mark.parametrize(("nodes", "target", "limit"), [((3, 3), None, 3), ((3, 5), 3, 4), ((2, 5), 3, 2)])
def test_the_least_number_of_nodes_is_kept(nodes: tuple[int, int], target: int | None, limit: int) -> None:
    world = World()
    world.nodes = nodes
    world.agent("a").start()
    world.task().replica_nodes = 2
    world.task().target = target
    assert world.task().limit == limit


def test_an_agent_of_several_workers_takes_more_than_one_to_a_replica() -> None:
    world = World(nodes=(1, 4))
    for size, granularity, nodes in ((1, 4, 4), (2, 4, 2), (4, 4, 1), (8, 4, 1)):
        agent = world.agent(f"a{size}", task=f"t{size}", size=size)
        agent.granularity = granularity
        agent.start().boot()
        assert world.task(f"t{size}").replica_nodes == nodes


def test_the_planner_gives_multiples() -> None:
    spread = on(task("a", 4, weight=3.0, high=8), granularity=2)
    question = situation(7, spread, task("b", 2))
    assert allocation_of(question, solve(state_of(question, KNOWN))) == {"a": 6, "b": 1}


def test_a_task_whose_minimum_is_no_multiple_is_not_paused_for_that() -> None:
    """The last node of a second replica takes the only multiple with it; three nodes are enough for the user."""
    world = World()
    agents = {}
    for name in "ab":
        for node in range(4):
            agents[name, node] = world.agent(f"{name}{node}", task=name, nodes=(3, 4), place=f"n{node}/0").start()
        for agent in [agents[key] for key in agents if key[0] == name == "a"]:
            agent.granularity = 2
            agent.boot()
    world.advance(1.0)
    settle(world, "a")
    world.answers_at_once = False
    for name in "ab":
        world.do(ev.Disconnected(conn=agents[name, 3].conn or 0))
        agents[name, 3].conn = None
    world.advance(1.0)
    (question,) = world.questions
    assert allocation_of(question, solve(state_of(question, KNOWN))) == {"a": 3, "b": 0}


def test_a_plan_follows_the_only_whole_replica() -> None:
    """It could not leave: the other task would wait for its place for ever."""
    world = World()
    both = {
        name: [world.agent(f"{name}{n}", task=name, nodes=(2, 4), place=f"n{n}/0") for n in range(4)] for name in "ab"
    }
    for agent in both["a"]:
        agent.granularity = 2
        agent.start()
    for agent in both["a"]:
        agent.boot(capacity=4)
    settle(world, "a")
    settle(world, "a")
    tell_of(world, "a", ["a0", "a1"], ["a2", "a3"])
    world.answers_at_once = False
    for agent in both["b"]:
        agent.start()
    world.advance(1.0)
    world.do(ev.Planned(key=world.questions[0].key, allocation={"a": 2, "b": 2}))
    assert world.machine.lasting.assigned == {"n0/0": "a", "n1/0": "a", "n2/0": "b", "n3/0": "b"}
    both["a"][1].die()  # before the others have left
    settle(world, "a")
    assert [member.agent for member in world.task("a").members()] == ["a0", "a2", "a3"]
    tell_of(world, "a", ["a2", "a3"])
    assert world.machine.lasting.assigned == {"n0/0": "b", "n1/0": "b", "n2/0": "a", "n3/0": "a"}
    assert [member.agent for member in world.task("a").members()] == ["a2", "a3"]


def test_a_plan_takes_the_places_of_whole_replicas() -> None:
    places = [Place(name=f"n{number}/0", node=f"n{number}", tasks=("a", "b")) for number in range(4)]
    before = {place.name: "a" for place in places}
    worth = {"n0/0": 1, "n1/0": 0, "n2/0": 0, "n3/0": 1}
    after = assign(places, {"a": 2, "b": 2}, before, worth)
    assert [name for name, owner in sorted(after.items()) if owner == "a"] == ["n1/0", "n2/0"]
