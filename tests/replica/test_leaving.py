"""Whether a worker that leaves an epoch cuts its replica's connections."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from unicron_lightning import wire
from unicron_lightning.replica.fabric import Phase, ReplicaFabric, run_released
from unicron_lightning.replica.layout import Shape, ShardReport
from unicron_lightning.worker.communication.communicator import CommunicatorAborted
from unicron_lightning.worker.communication.lazy_groups import LazyGroups


class Connections:
    """A replica's group that records cuts."""

    def __init__(self) -> None:
        self.cuts = 0
        self.lost = False

    def broken(self) -> bool:
        return self.lost

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


def accelerated() -> tuple[ReplicaFabric, Connections]:
    """A worker whose tensors are exchanged by NCCL."""
    fabric, connections = leaving("calls")
    fabric.channels = SimpleNamespace(inner_accelerated=LazyGroups([object()]))  # type: ignore[assignment]
    return fabric, connections


def guard() -> None:
    """What a user's code does where a kernel that was cut has left garbage."""
    raise ValueError("the loss is not finite")


def test_a_call_does_not_count_if_a_partner_has_closed_its_socket() -> None:
    """`PartnerWatch` may notice it a tenth of a second later."""
    fabric, connections = accelerated()
    fabric.arrive(torch.device("cpu"))
    connections.lost = True
    with pytest.raises(CommunicatorAborted, match="were cut"):
        fabric.arrive(torch.device("cpu"))


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_an_exception_on_what_a_lost_partner_has_left_is_an_abort(after: float) -> None:
    fabric, connections = accelerated()
    late = threading.Timer(after, lambda: setattr(connections, "lost", True))
    late.start()
    with pytest.raises(CommunicatorAborted, match="a partner was lost: the loss is not finite"):
        run_released(guard, fabric)
    late.join()


def test_an_exception_without_a_failure_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_lightning.replica.fabric.EXPLANATION_SECONDS", 0.2)
    fabric, connections = accelerated()
    with pytest.raises(ValueError, match="not finite"):
        run_released(guard, fabric)
    connections.lost = True
    with pytest.raises(RuntimeError, match="CUDA error"):
        run_released(lambda: exec("raise RuntimeError('CUDA error: misaligned address')"), fabric)
    with pytest.raises(ValueError, match="not finite"):
        run_released(guard, leaving("calls")[0])
