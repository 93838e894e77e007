"""The operation of one meeting of manual optimization: a `GradientStep` whose micro-batches are running strands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import msgspec

from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.manual.strand import MeetingPlace
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.commit import Sums
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.digest import NO_DIGEST, StateDigest
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.rows import plan_rows
from unicron_lightning.worker.step import GradientStep


class _Standing(msgspec.Struct):
    """A rank's strands, by micro-batch, and the meeting to which they have come."""

    strands: list[int]
    meeting: str


class MeetingStep(GradientStep):
    """The micro-batches' backwards of one meeting, up to their commit.

    A micro-batch belongs to the lowest rank that has its strand; those without one, of a dead rank, are distributed.

    Args:
        micro_batches: all of the step's, by number.
        gradients: of the meeting.
        sums: of the meeting.
        run: brings one micro-batch through the meeting.
        strands: numbers of the strands on this rank; changes with ``run``.
        meeting: what this rank's strands have come to.
        place: for errors.
        digest: of the state before the step.
    """

    def __init__(
        self,
        micro_batches: Sequence[int],
        gradients: GradientBuckets,
        sums: Sums,
        run: Callable[[int], None],
        *,
        strands: Collection[int],
        meeting: MeetingPlace,
        place: str,
        digest: StateDigest = NO_DIGEST,
    ) -> None:
        super().__init__(micro_batches, gradients, sums, run, digest=digest)
        self._strands = strands
        self._meeting = meeting
        self._place = place

    @property
    def finished(self) -> frozenset[int]:
        """Micro-batches that this rank has brought through the meeting."""
        return frozenset(self._finished)

    def attempt(self, engine: Engine) -> bytes:
        plan = self._plan
        assert plan is not None
        self._plan = replace(plan, todo=tuple(self._own(engine, plan.lost)))
        return super().attempt(engine)

    def _own(self, engine: Engine, lost: Sequence[int]) -> list[int]:
        own = _Standing(strands=sorted(self._strands), meeting=described(self._meeting))
        standing = msgspec.msgpack.encode(own)
        parts = gather_bytes(engine.communicator, standing, engine.tag("meeting"))
        ranks = [msgspec.msgpack.decode(part, type=_Standing) for part in parts]
        check_same([each.meeting for each in ranks], self._place)
        owners = {number: rank for rank, each in reversed(list(enumerate(ranks))) for number in each.strands}
        orphans = plan_rows(lost, owners, engine.world.rank, engine.world.size)
        return sorted([*orphans.rows, *(number for number in lost if owners.get(number) == engine.world.rank)])


def described(meeting: MeetingPlace) -> str:
    """Return a meeting as text that is equal for equal meetings."""
    return "end" if meeting.mask is None else "".join("01"[needed] for needed in meeting.mask)


def check_same(meetings: Sequence[str], place: str) -> None:
    """Refuse micro-batches that call their backwards in different orders.

    Args:
        meetings: as `described` returns them.
        place: for the message.

    Raises:
        ConfigError: quoting the meetings.
    """
    if len(set(meetings)) > 1:
        found = [
            "its end"
            if meeting == "end"
            else f"manual_backward() with {meeting.count('1')} parameters that need gradients"
            for meeting in sorted(set(meetings))
        ]
        raise ConfigError(
            f"{place}: micro-batches of one step have come to {' and to '.join(found)}; the unicron strategy needs the "
            "same manual_backward, toggle_optimizer and optimizer.step calls for all micro-batches of a step: let them "
            "depend on batch_idx, not on the data"
        )
