"""The line that a worker prints when the world changes."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_lightning import wire
from unicron_lightning.strategies.console import Announcements
from unicron_lightning.worker.engine import World


def world(epoch: int, kind: wire.EpochKind, workers: str, own: str, *, hold: bool = False) -> World:
    """Create a world of workers such as ``a/0#1``, on nodes named after their agents."""
    names = tuple(f"{name}#1" for name in workers.split())
    nodes = tuple(f"n-{name.partition('/')[0]}" for name in names)
    rank = names.index(f"{own}#1")
    return World(epoch=epoch, kind=kind, rank=rank, size=len(names), hold=hold, nodes=nodes, workers=names)


def notice(name: str, **fields: Any) -> wire.Notice:
    return wire.Notice(name=name, at=2.0, incident="i1", fields=fields)


def died(worker: str, cause: str, code: int | None = None) -> wire.Notice:
    return notice("worker_died", worker=f"{worker}#1", cause=cause, code=code, received_at=1.0)


def failed(worker: str, cause: str) -> wire.Notice:
    about = {"worker": f"{worker}#1", "cause": cause, "ends": True, "step": 7, "kind": "other_software_error"}
    return notice("error_reported", **about, severity="SEV2", happened_at=1.0, received_at=1.0, details={})


FIRST = "a/0 b/0 c/0"


@pytest.mark.parametrize(
    ("ends", "after", "line"),
    [
        ([died("a/0", "signal", 9)], "b/0 c/0", "rank 0 on n-a exited (signal 9); 2 workers left; step 7 continues"),
        ([died("a/0", "exit", 1)], "b/0 c/0", "rank 0 on n-a exited (status 1); 2 workers left; step 7 continues"),
        ([died("c/0", "silent")], "a/0 b/0", "rank 2 on n-c was silent; 2 workers left; step 7 continues"),
        (
            [failed("c/0", "RuntimeError: boom"), died("c/0", "reported")],
            "a/0 b/0",
            "rank 2 on n-c failed: RuntimeError: boom; 2 workers left; step 7 continues",
        ),
        ([], "b/0", "rank 0 on n-a was lost; rank 2 on n-c was lost; 1 worker left; step 7 continues"),
        ([], FIRST, "connections of 3 workers renewed; step 7 continues"),
    ],
)
def test_a_failure(ends: list[wire.Notice], after: str, line: str) -> None:
    said = Announcements()
    own = after.split()[0]
    assert said.line(world(1, "init", FIRST, own), 0) is None
    for end in ends:
        said.take(end)
    assert said.line(world(2, "fail", after, own), 7) == line
    assert said.line(world(2, "fail", after, own), 7) is None, "the same world, of another run"


def test_a_leave_and_returns() -> None:
    said = Announcements()
    said.line(world(1, "init", FIRST, "b/0"), 0)
    assert said.line(world(2, "leave", "b/0 c/0", "b/0"), 3) == "n-a left: 2 workers"
    assert said.line(world(3, "join", "b/0 c/0 a/1 d/0", "b/0"), 4) == "n-a is back; n-d joined: 4 workers"
    assert said.line(world(4, "relayout", "b/0 c/0 a/1 d/0", "b/0"), 4) is None
    held = said.line(world(5, "fail", "b/0", "b/0", hold=True), 5)
    assert held is not None and held.endswith("; 1 worker left; held below the minimum")


def test_a_node_that_was_lost_before_this_worker_joined_is_back() -> None:
    said = Announcements()
    said.line(world(1, "init", "b/0", "b/0"), 0)
    said.take(notice("agent_lost", agent="a", node="n-a", away_since=None, silent=None))
    assert said.line(world(2, "join", "b/0 a/0", "b/0"), 1) == "n-a is back: 2 workers"


def test_only_the_first_worker_of_an_agent_prints_and_joiners_say_nothing_of_themselves() -> None:
    both = "a/0 a/1 b/0"
    for own, expected in (("a/0", True), ("a/1", False)):
        said = Announcements()
        assert said.line(world(1, "init", both, own), 0) is None
        assert (said.line(world(2, "fail", "a/0 a/1", own), 1) is not None) is expected


def test_a_line_names_few_of_many() -> None:
    said = Announcements()
    many = " ".join(f"{name}/0" for name in "abcdefg")
    said.line(world(1, "init", many, "g/0"), 0)
    line = said.line(world(2, "fail", "g/0", "g/0"), 1)
    assert line is not None and "rank 2 on n-c was lost; 3 other ranks were lost; 1 worker left" in line
