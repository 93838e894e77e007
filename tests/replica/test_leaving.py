"""Whether a worker that leaves an epoch cuts its replica's connections."""

from __future__ import annotations

from typing import get_args

import pytest

from unicron_lightning import wire
from unicron_lightning.megatron.grid import Shape
from unicron_lightning.replica.fabric import Phase, ReplicaFabric
from unicron_lightning.replica.layout import ShardReport


class Connections:
    """A replica's group that records cuts."""

    def __init__(self) -> None:
        self.cuts = 0

    def cut(self) -> None:
        self.cuts += 1


def epoch(number: int, kind: wire.EpochKind = "fail") -> wire.Epoch:
    store = wire.Address(host="127.0.0.1", port=1)
    return wire.Epoch(number=number, kind=kind, members=[], store=store, hold=False, incident=None, published_at=0.0)


def leaving(phase: Phase) -> tuple[ReplicaFabric, Connections]:
    fabric, connections = ReplicaFabric(Shape(tensor=1, pipeline=2, replicas=2)), Connections()
    fabric._inner[0, 1] = connections  # type: ignore[assignment]
    fabric.phase, fabric.intact = phase, True
    return fabric, connections


@pytest.mark.parametrize("phase", get_args(Phase))
def test_its_partners_are_let_go_but_where_they_do_not_wait(phase: Phase) -> None:
    fabric, connections = leaving(phase)
    word = fabric.about(epoch(2))
    assert connections.cuts == (phase != "reducing")
    assert ShardReport.from_plain(word).intact == (phase == "reducing")


def test_a_planned_change_cuts_nothing() -> None:
    fabric, connections = leaving("idle")
    fabric.about(epoch(2, "join"))
    assert connections.cuts == 0


def test_one_that_has_not_entered_the_next_epoch_lets_go_of_a_partner_that_has() -> None:
    """The partner is in a call for the lost replica; all of its own replica are alive, so only a cut interrupts it."""
    fabric, connections = leaving("reducing")
    fabric.about(epoch(2))
    assert connections.cuts == 0
    fabric.about(epoch(3))
    assert connections.cuts == 1
