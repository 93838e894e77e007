"""Which states in agents' memory are complete, and offered to a new life."""

from __future__ import annotations

import hashlib

import pytest
from coordinator.driver import World, members, running, settle, started
from coordinator.fake_agent import FakeAgent

from unicron_lightning import wire
from unicron_lightning.detection.exceptions import describe
from unicron_lightning.errors import GradientsDiffer, SilentCorruption
from unicron_lightning.worker.state_parts import partners_of


def copy(
    step: int, part: int, *, epoch: int = 1, parts: int = 2, copies: int = 1, digested: bool = True
) -> wire.StateCopy:
    version = wire.StateVersion(life=1, epoch=epoch, step=step, parts=parts, copies=copies, layout="0" * 64)
    digest = hashlib.sha256(f"{step} {part}".encode()).hexdigest() if digested else None
    return wire.StateCopy(version=version, part=part, size=10, digest=digest)


def holds(agent: FakeAgent, *copies: wire.StateCopy) -> None:
    agent.say(wire.StateHeld(copies=copies))


def offered(*agents: FakeAgent) -> list[int]:
    """All workers die and start again; the steps of the versions that they are offered."""
    for agent in agents:
        agent.die()
    for agent in agents:
        agent.rendezvous().boot()
    found = [agent.last(wire.Welcome).memory for agent in agents]
    assert all(each == found[0] for each in found), "all founders get the same"
    return [offer.version.step for offer in found[0]]


def test_a_version_is_complete_with_all_copies_and_offered_with_one_of_each_part() -> None:
    _, (a, b) = started(2)
    holds(a, copy(4, 0, copies=2), copy(4, 1, copies=2), copy(8, 0))
    assert not a.all(wire.StateComplete)
    holds(b, copy(4, 0, copies=2), copy(4, 1, copies=2))
    assert a.last(wire.StateComplete) == b.last(wire.StateComplete)
    assert a.last(wire.StateComplete).version.step == 4
    a.saved("/3", 3)
    assert offered(a, b) == [4], "of step 8 a part is missing"
    (offer,) = a.last(wire.Welcome).memory
    assert all(len(nodes) == 2 for nodes in offer.holders)


def test_a_newer_checkpoint_is_preferred() -> None:
    world, (a, b) = started(2)
    holds(a, copy(4, 0), copy(4, 1), copy(8, 0), copy(8, 1))
    a.saved("/6", 6)
    assert offered(a, b) == [8]
    assert world.event("task_restarts").fields == {"life": 2, "path": "/6", "step": 6, "memory": 8}


def test_agents_repeat_their_copies_to_a_restarted_coordinator() -> None:
    world, (a, b) = started(2)
    world.start()
    a.register(copies=(copy(4, 0),))
    b.register(copies=(copy(4, 1),))
    assert offered(a, b) == [4]


def one_of_two_is_back() -> tuple[World, FakeAgent]:
    """Let both workers die, whose agents hold one part each, and start one again; return the agent of the other."""
    world, (a, b) = started(2, nodes=(1, 2))
    holds(a, copy(4, 0))
    holds(b, copy(4, 1))
    a.die()
    b.die()
    a.rendezvous().boot()
    b.rendezvous()
    return world, b


def test_founders_wait_for_a_node_with_a_part() -> None:
    world, b = one_of_two_is_back()
    assert not members(world), "b may bring its part"
    b.boot()
    assert len(members(world)) == 2


def test_founders_do_not_wait_for_ever() -> None:
    world, _ = one_of_two_is_back()
    world.advance(31)
    assert len(members(world)) == 1


def test_founders_wait_for_digests() -> None:
    world, (a, b) = started(2)
    holds(a, copy(4, 0), copy(8, 0, digested=False))
    holds(b, copy(4, 1), copy(8, 1))
    assert offered(a, b) == [] and not members(world)
    assert world.event("task_restarts").fields["memory"] == 8
    holds(a, copy(4, 0), copy(8, 0))
    assert len(members(world)) == 2
    assert [offer.version.step for offer in b.last(wire.Welcome).memory] == [8, 4]


def test_without_digests_an_older_version_is_offered() -> None:
    world, (a, b) = started(2)
    holds(a, copy(4, 0), copy(8, 0, digested=False))
    holds(b, copy(4, 1), copy(8, 1))
    assert offered(a, b) == []
    world.advance(31)
    assert [offer.version.step for offer in b.last(wire.Welcome).memory] == [4]


def test_versions_staged_before_workers_differed_are_not_offered() -> None:
    a, b = running(World(), 2)
    holds(a, copy(4, 0), copy(4, 1))
    about = {"kind": "parameters_differ", "cause": "x", "phase": "step", "step": 5, "at": 1.0, "details": {}}
    a.say(wire.ErrorReport(worker=a.worker(), ends=True, **about))
    assert offered(a, b) == []


@pytest.mark.parametrize(
    ("error", "kind", "doubts"),
    [
        (SilentCorruption("x", suspect={}), "silent_data_corruption", True),
        (GradientsDiffer("x"), "gradients_differ", True),
        (ValueError("GradientsDiffer"), "other_software_error", False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "ecc_error", False),
    ],
)
def test_versions_staged_before_a_wrong_gradient_was_found_are_doubted(
    error: Exception, kind: str, doubts: bool
) -> None:
    """Parts may come from the wrong rank."""
    world = World()
    a, _ = running(world, 2)
    epoch = world.task("t").number
    found = describe(error)
    assert found.kind == kind
    about = {"kind": kind, "cause": "x", "phase": "step", "step": 5, "at": 1.0, "details": found.details}
    a.say(wire.ErrorReport(worker=a.worker(), ends=True, **about))
    assert world.task("t").memory.doubted == (epoch if doubts else 0)


def partners(world: World) -> dict[str, str]:
    """The first partner of each node, as all workers of the newest epoch derive it."""
    places = [(member.rack or member.node, member.node) for member in world.task("t").members()]
    return {place[1][-1]: partners_of(places, place)[0][-1] for place in places}


def test_no_rack_is_its_own_partner_in_any_epoch() -> None:
    world = World(nodes=(1, 5))
    agents = [world.agent(name) for name in "abcde"]
    for agent, rack in zip(agents, ("r", "r", "s", "s", None), strict=True):
        agent.rack = rack
        agent.start()
    for agent in agents:
        agent.boot()
    settle(world)
    racks = {agent.name: agent.rack or agent.name for agent in agents}

    def check() -> None:
        found = partners(world)
        assert found.keys() == {member.agent for member in world.task("t").members()}
        assert all(racks[one] != racks[other] for one, other in found.items())

    check()
    assert len(set(partners(world).values())) >= 4, "copies are spread"
    _, _, c, d, e = agents
    for gone in (e, d):
        gone.die()
        settle(world)
        check()
    c.die()
    settle(world)
    assert partners(world) == {"a": "b", "b": "a"}, "there is no other rack"
