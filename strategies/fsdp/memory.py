"""States of an FSDP2 task in its agents' memory: the parts of each shard; the first one has the state of the loops.

The workers of a shard stage a share each, as those of a whole model do. Copies for other nodes come from the workers of
the same shard there. If there are none, as in a single replica, a worker sends its part to one of another shard, over
the connections of their replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import msgspec
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.errors import UnicronError
from unicron_lightning.replica.fabric import run_released
from unicron_lightning.strategies.state import join_state
from unicron_lightning.strategies.state.division import StateDivision
from unicron_lightning.worker import codec
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.report_sum import ReportSum
from unicron_lightning.worker.staging import StagedVersion, Staging
from unicron_lightning.worker.state_parts import DividedState, SharePart, staged_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class ShardedDivision(StateDivision):
    """Divides the state of a sharded model.

    Args:
        parallel: provides this worker's shard and its connections.
    """

    def __init__(self, parallel: FsdpParallel) -> None:
        super().__init__(parallel.strategy)
        self._parallel = parallel

    @property
    def shards(self) -> int:  # type: ignore[override]
        """Shards of the model."""
        return self._parallel.size

    @property
    def shard(self) -> int:  # type: ignore[override]
        """This worker's shard."""
        return self._parallel.shard

    @override
    def workers(self, world: World) -> Sequence[Sequence[int]]:
        place = self._parallel.member.fabric.place
        assert place is not None and place.epoch == world.epoch
        return [[replica.members[shard] for replica in place.layout.replicas] for shard in range(self.shards)]

    @override
    def divide(self, state: Callable[[], dict[str, Any]]) -> DividedState:
        own = {"shard": self._parallel.member.model.plain_state(), "loops": state() if self.shard == 0 else None}
        return replace(DividedState.of(own), layout=self._layout())

    @override
    def stage(self, staging: Staging, state: Callable[[], dict[str, Any]], partners: int) -> StagedVersion | None:
        engine = self.strategy.engine
        plan = staged_parts(self.workers(engine.world), engine.world.nodes, partners)
        if any(part.receivers for part in plan):
            exchange = PartnerCopies(self, staging, state, partners)
            engine.run(exchange)
            if exchange.error is not None:
                raise exchange.error
            return exchange.staged
        if self._parallel.member.fabric.place.replica is None:  # type: ignore[union-attr]
            return None
        return staging.stage(self.divide(state), engine.step, engine.world, plan)

    def exchange(self, staged: StagedVersion, plan: Sequence[SharePart], rank: int) -> None:
        """Send this worker's parts to workers of other shards of its replica, and receive theirs.

        Raises:
            CommunicatorAborted: a connection broke.
        """
        shard_of = {
            rank: shard for shard, ranks in enumerate(self.workers(self.strategy.engine.world)) for rank in ranks
        }
        sent, received = [], []
        for part in plan:
            if part.holders[0] == rank:
                sent += [(staged.view(part.number), shard_of[to], part.number) for to in part.receivers]
            elif rank in part.receivers:
                received.append((staged.view(part.number), part.shard, part.number))
        run_released(lambda: self._parallel.member.model.group.exchange(sent, received))

    @override
    def refusal(self, version: wire.StateVersion) -> str | None:
        if version.layout != self._layout() or version.parts % self.shards:
            return f"it is of another model, or of another number of shards than {self.shards}"
        return None

    @override
    def check(self, state: Mapping[str, Any]) -> None:
        if state["shard"]["shard"] != self.shard:
            raise LookupError(f"found shard {state['shard']['shard']}, expected {self.shard}")
        if self.shard == 0:
            self.strategy.session.check_fit(state["loops"]["fit"])

    @override
    def common(self, state: dict[str, Any]) -> bytes:
        return codec.encode(state["loops"]) if self.shard == 0 else b""

    @override
    def restore(self, trainer: pl.Trainer, state: dict[str, Any], common: bytes) -> dict[str, Any]:
        loops: dict[str, Any] = codec.decode(common)
        join_state.resume_from(trainer, loops)
        member = self._parallel.member
        member.model.load_plain(state["shard"])
        member.fabric.at = int(loops["checkpoint"]["global_step"])
        return loops

    def _layout(self) -> str:
        """Describe the whole model and the number of shards: the same on all workers."""
        module = self.strategy.module
        named = [(name, str(each.dtype), list(each.shape)) for name, each in module.named_parameters()]
        return hashlib.sha256(msgspec.json.encode([self.shards, named])).hexdigest()


class PartnerCopies(Indivisible):
    """The operation that stages a version of which workers send parts to each other.

    A worker that cannot stage takes part all the same, and nothing is sent then.

    Args:
        division: of the model.
        staging: this worker's.
        state: returns the state of the loops.
        partners: further copies of each part.

    Attributes:
        staged: this worker's parts, after the operation.
        error: the reason why there are none.
    """

    name = "memory_checkpoint"

    def __init__(
        self, division: ShardedDivision, staging: Staging, state: Callable[[], dict[str, Any]], partners: int
    ) -> None:
        self.staged: StagedVersion | None = None
        self.error: OSError | MemoryError | UnicronError | None = None
        self._division = division
        self._staging = staging
        self._state = state
        self._partners = partners

    def plan(self, reports: ReportSum, rank: int) -> None:
        """All ranks do the same."""

    def attempt(self, engine: Engine) -> bytes:
        self.staged, self.error = None, None
        world, rank = engine.world, engine.world.rank
        plan = staged_parts(self._division.workers(world), world.nodes, self._partners)
        divided, self.error = self._divided(rank, plan)
        sizes = self._sizes(divided, rank, plan)
        said = gather_bytes(engine.communicator, msgspec.json.encode(sizes), engine.tag(self.name))
        known: dict[int, int] = {}
        for each in said:
            known.update(msgspec.json.decode(each, type=dict[int, int]))
        incoming = {part.number: known.get(part.number, 0) for part in plan if rank in part.receivers}
        staged = None
        try:
            if divided is not None:
                staged = self._staging.stage(divided, engine.step, world, plan, incoming)
        except (OSError, MemoryError) as error:
            self.error = error
        failed = b"" if self.error is None else b"failed"
        if any(gather_bytes(engine.communicator, failed, engine.tag(f"{self.name} ready"))):
            self.error = self.error or OSError("another worker could not stage its part")
            return b""
        engine.fault("partner_copies", engine.step)
        if staged is not None:
            self._division.exchange(staged, plan, rank)
        self.staged = staged
        return b""

    def _divided(
        self, rank: int, plan: Sequence[SharePart]
    ) -> tuple[DividedState | None, OSError | MemoryError | UnicronError | None]:
        """Return this worker's state, if it has a part, or the reason why it has none."""
        try:
            return (self._division.divide(self._state) if any(rank in part.holders for part in plan) else None), None
        except UnicronError as error:
            return None, error

    def _sizes(self, divided: DividedState | None, rank: int, plan: Sequence[SharePart]) -> dict[int, int]:
        """Return the bytes of each part that this worker sends."""
        if divided is None:
            return {}
        own = [part for part in plan if part.holders[0] == rank and part.receivers]
        return {part.number: divided.size(part.piece, part.pieces) for part in own}
