"""The line that a worker prints when the world changes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel

from unicron_lightning import wire
from unicron_lightning.strategies.console import Announcements, take_over_bar
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


def on_nodes(epoch: int, kind: wire.EpochKind, places: str) -> World:
    """Create a world of ``NODE/AGENT`` places, seen by its first worker."""
    nodes, agents = zip(*(place.split("/") for place in places.split()), strict=True)
    workers = tuple(f"{agent}/0#1" for agent in agents)
    return World(epoch=epoch, kind=kind, rank=0, size=len(workers), hold=False, nodes=nodes, workers=workers)


def test_slots_of_one_node_leave_and_return_one_by_one() -> None:
    said = Announcements()
    said.line(on_nodes(1, "init", "n/a m/b"), 0)
    assert (
        said.line(on_nodes(2, "join", "n/a m/b n/c m/d m/e"), 1)
        == "1 worker on n joined; 2 workers on m joined: 5 workers"
    )
    assert said.line(on_nodes(3, "leave", "n/a m/b m/d m/e"), 2) == "1 worker on n left: 4 workers"
    said.take(notice("agent_lost", agent="c", node="n", away_since=None, silent=None))
    assert said.line(on_nodes(4, "join", "n/a m/b m/d m/e n/c2"), 3) == "1 worker on n is back: 5 workers"
    assert said.line(on_nodes(5, "fail", "n/a m/b"), 4) is not None
    came = said.line(on_nodes(6, "join", "n/a m/b n/x n/y m/z"), 5)
    assert came == "1 worker on n is back; 1 worker on m is back; 1 worker on n joined: 5 workers"


def test_spares_are_named() -> None:
    said = Announcements()
    said.line(on_nodes(1, "init", "n/a m/b o/c p/d"), 0)
    lost = said.line(on_nodes(2, "fail", "n/a m/b o/c"), 1, spares=1)
    assert lost == "rank 3 on p was lost; 3 workers left, 1 of them spare; step 1 continues"
    assert said.line(on_nodes(3, "join", "n/a m/b o/c p/e"), 1) == "p is back: 4 workers"


class TakesOver(pl.Callback):
    """Has a bar begin anew in a step, as on a worker that becomes rank 0, and notes its total."""

    total: float | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 8:
            bar: Any = trainer.progress_bar_callback
            bar.disable()
            take_over_bar(trainer)
            tqdm = isinstance(bar, TQDMProgressBar)
            self.total = bar.train_progress_bar.total if tqdm else bar.progress.tasks[bar.train_progress_bar_id].total


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize(("epochs", "total"), [(-1, 12), (2, 64)])
def test_a_bar_that_is_taken_over_has_the_total_of_the_data_epoch(bar: Any, epochs: int, total: int) -> None:
    takes = TakesOver()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "limit_val_batches": 0}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, max_steps=12, callbacks=[bar(), takes], **quiet)
    trainer.fit(BoringModel())
    assert takes.total == total


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
