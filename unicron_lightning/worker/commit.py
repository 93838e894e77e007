"""The commit of a step: one small sum over all members, after which each of them may step its optimizer.

By it the members sum the step's other results (loss, logged values) and count those that know of a pending epoch; if
all do, all switch at the end of the step. A member with the result knows that every member has come this far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch

from unicron_lightning.worker.buckets import Bucket
from unicron_lightning.worker.engine import Engine

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, bool, list[float], list[float]]).decode


class Sums(Protocol):
    """Other sums over a step's micro-batches: metrics, buffers, the loss."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Large sums over this rank's micro-batches, reduced after the gradients; the same number and sizes on all
        ranks.
        """

    def totals(self) -> Sequence[float]:
        """Small sums over this rank's micro-batches, sent with the commit; equally many on all ranks."""

    def read(self, totals: Sequence[float]) -> bool:
        """Store `totals` summed over the ranks; return whether `settle` must follow."""

    def settle(self, engine: Engine) -> None:
        """Communicate before a second commit; must be repeatable."""


class CommittedStep(Protocol):
    """The operation of a step, committed.

    Attributes:
        recomputed: micro-batches that no present worker had finished when the step was planned again.
    """

    recomputed: list[int]


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The result of a step, the same on all members.

    Attributes:
        leave: the epoch that all members agree to leave at the end of the step; 0: none.
        stop: whether any member wants the run to end with this step.
        own: the members' further numbers, each summed over the members.
        totals: the step's other sums, over the members.
    """

    leave: int
    stop: bool
    own: list[float]
    totals: list[float]

    def encode(self) -> bytes:
        """The commit as the result of an operation."""
        return _encode((self.leave, self.stop, self.own, self.totals))


def commit(engine: Engine, sums: Sums, own: Sequence[float]) -> Commit:
    """Commit a step.

    Args:
        engine: this worker's.
        sums: the step's other sums, complete on this rank; they are read and settled.
        own: further numbers of this rank; equally many on all ranks.
    """
    agreed = _vote(engine, own, sums.totals())
    if sums.read(agreed.totals):
        sums.settle(engine)
        agreed = replace(_vote(engine, own, ()), totals=agreed.totals)
    engine.switch_from, engine.stops = agreed.leave, agreed.stop
    engine.fault("committed", engine.step)
    return agreed


def adopt_commit(engine: Engine, sums: Sums, result: bytes) -> list[float]:
    """Take the commit of another member that has completed the step.

    Returns:
        The members' further numbers, each summed over the members.
    """
    engine.switch_from, engine.stops, own, totals = _decode(result)
    sums.read(totals)
    return own


def _vote(engine: Engine, own: Sequence[float], totals: Sequence[float]) -> Commit:
    pending = engine.control is not None and engine.control.newer_than(engine.world.epoch) is not None
    engine.fault("commit", engine.step)
    ballot = torch.tensor([float(pending), float(engine.wants_stop), *own, *totals], dtype=torch.float64)
    engine.communicator.wait(engine.communicator.all_reduce(ballot))
    votes, stops, *summed = ballot.tolist()
    leave = int(votes) == engine.world.size or engine.world.hold
    return Commit(
        leave=engine.world.epoch if leave else 0,
        stop=stops > 0,
        own=summed[: len(own)],
        totals=summed[len(own) :],
    )
