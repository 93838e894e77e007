"""Which checkpoints the coordinator keeps, and hands out to a new life."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator.driver import started
from coordinator.fake_agent import FakeAgent

from unicron_lightning import wire
from unicron_lightning.coordinator.membership.workers import CHECKPOINTS_KEPT


def reborn(*agents: FakeAgent) -> list[tuple[str, int]]:
    """All workers die and start again; path and step of each checkpoint that they get."""
    for agent in agents:
        agent.die()
    for agent in agents:
        agent.rendezvous().boot()
    return [(known.path, known.step) for known in agents[0].last(wire.Welcome).resume]


def test_a_new_life_gets_all_known_checkpoints_newest_first() -> None:
    world, (a, b) = started(2)
    for step in (2, 6, 4):
        a.saved(f"/{step}", step)
        b.saved(f"/{step}", step)
    assert world.names().count("checkpoint_saved") == 3
    assert len(world.event("checkpoint_saved").fields["digest"]) == 64
    world.start()  # from its store
    a.register()
    b.register()
    assert reborn(a, b) == [("/6", 6), ("/4", 4), ("/2", 2)]
    assert {known.life for known in a.last(wire.Welcome).resume} == {1}


def fails(agent: FakeAgent) -> str:
    """Report an error that ends the agent's worker; return its name."""
    worker = agent.worker()
    about: dict[str, Any] = {"kind": "other_software_error", "cause": "it broke", "phase": "compute", "step": 3}
    agent.say(wire.ErrorReport(worker=worker, ends=True, at=1.0, details={}, **about))
    return worker


def test_workers_that_an_error_ends_report_the_checkpoint_that_was_being_written() -> None:
    world, (a, b) = started(2)
    first, second = fails(a), fails(b)
    b.saved("/late", 3, worker=second)
    world.start()  # from its store
    for agent in (a, b):
        agent.register()
        agent.die()
    a.rendezvous().boot()
    a.saved("/later", 4, worker=first)  # the founders get the same checkpoints
    b.rendezvous().boot()
    for agent in (a, b):
        assert [(known.path, known.step) for known in agent.last(wire.Welcome).resume] == [("/late", 3)]


def test_the_oldest_are_forgotten() -> None:
    _, (a, b) = started(2)
    for step in range(CHECKPOINTS_KEPT + 3):
        a.saved(f"/{step}", step)
    assert reborn(a, b) == [(f"/{step}", step) for step in range(CHECKPOINTS_KEPT + 2, 2, -1)]


def test_a_path_stands_for_what_was_written_there_last() -> None:
    _, (a, b) = started(2)
    a.saved("/last", 2, "two")
    a.saved("/last", 4, "four")
    b.saved("/last", 2, "two")  # its message was delayed
    assert reborn(a, b) == [("/last", 4)]
    b.saved("/last", 3, "of a life that has begun before step 3")
    assert reborn(a, b) == [("/last", 3)]
    assert a.last(wire.Welcome).resume[0].life == 2


def test_those_of_a_later_fit_are_newer_whatever_their_steps() -> None:
    _, (a, b) = started(2)
    a.saved("/last", 40)
    a.saved("/first fit", 48)
    a.saved("/last", 3, fit=2)
    b.saved("/last", 40)  # its message was delayed
    assert reborn(a, b) == [("/last", 3), ("/first fit", 48)]
    assert [known.fit for known in a.last(wire.Welcome).resume] == [2, 1]


def test_results_of_fits_outlive_a_life() -> None:
    _, (a, b) = started(2)
    a.say(wire.Record(key="results", value="of fit 1", lasting=True))
    a.say(wire.Record(key="other", value="of this life"))
    reborn(a, b)
    for key, value in (("results", "of fit 1"), ("other", None)):
        a.say(wire.Lookup(worker=a.worker(), key=key))
        assert a.last(wire.LookupReply).value == value


def test_two_of_one_step_at_one_path_may_both_be_the_last() -> None:
    """The members' reports may be in different order."""
    _, (a, b) = started(2)
    a.saved("/last", 4, "first")
    a.saved("/last", 4, "second")
    b.saved("/last", 4, "first")
    assert reborn(a, b) == [("/last", 4)] * 2
    assert len({known.digest for known in a.last(wire.Welcome).resume}) == 2


@pytest.mark.parametrize("digest", ["", "x" * 64, "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_a_digest_is_required(digest: str) -> None:
    text = wire.encode(wire.CheckpointSaved(worker="w", path="/p", step=1, digest=digest))
    with pytest.raises(msgspec.ValidationError, match="digest"):
        wire.decode_from_worker(text)
