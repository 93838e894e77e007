"""Lightning's collectives, as operations that survive failures.

Before the first training step of a trainer's first ``fit`` their results are also recorded with the coordinator. A
joiner, whose script runs the same lines alone, reads them there instead of asking members that have long passed these
lines; where none was recorded it uses its own value, but not while the members are still on their way to these lines:
a folder that it chose by itself, e.g. for checkpoints, would be another one than theirs.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from unicron_lightning.copying import OfProcess
from unicron_lightning.errors import UnicronError
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.operations import Agreement

if TYPE_CHECKING:  # it imports this module, by default_group
    from unicron_lightning.worker.control.thread import Control
    from unicron_lightning.worker.session import Session

logger = logging.getLogger(__name__)

RECORD_BYTES: Final = 4 << 20
"""Larger results are not recorded; a joiner then uses its own value."""


START_SECONDS: Final = 600.0
"""Longest time for which a joiner waits for a result of members that are in their start."""
_STARTED: Final = "started"
_FIRST_PAUSE: Final = 0.02
_LAST_PAUSE: Final = 0.5


class CollectiveInStep(UnicronError):
    """A collective was called inside a training or evaluation step, where ranks run different numbers of batches."""


class ShapesDiffer(UnicronError):
    """The tensors that ranks gather cannot be stacked."""


class Collectives(OfProcess):
    """Collectives over the present world.

    Attributes:
        starting: whether the program is before its first training step, where results are recorded or looked up.
        inside: the name of the running step, in which collectives are refused.
        evaluates: returns the name of the evaluation whose batch is in progress, where they are refused, too.
        records: whether results are recorded at all; not in evaluations by a script's second trainer.
        live: whether the last result came from the members present.
        interrupted: returns whether this worker's run is ending by an error of its own. The other workers do not know,
            so each collective is answered with the own value.
        scope: distinguishes parts of the start, some of which joiners skip.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counts: Counter[str] = Counter()
        self.starting = True
        self.records = True
        self.inside: str | None = None
        self.evaluates: Callable[[], str | None] = lambda: None
        self.scope = ""
        self.live = True
        self.interrupted: Callable[[], bool] = lambda: False
        self._passed = False
        """Whether the members are known to have passed their start."""

    @contextmanager
    def refused(self, step: str) -> Iterator[None]:
        """Refuse collectives while the named step runs."""
        self.inside = step
        try:
            yield
        finally:
            self.inside = None

    def gather(self, name: str, payload: Callable[[int], bytes], number: int | None = None) -> list[bytes]:
        """Gather each rank's payload in rank order; ``payload`` is called with this worker's rank.

        Args:
            name: for errors; all ranks must use the same.
            payload: called with this worker's rank.
            number: of parts that a result without the members present is cut or filled to (with the own part).

        Raises:
            CollectiveInStep: in a place where ranks cannot communicate.
        """
        self.live = False
        if self.interrupted():
            return [payload(0)] * (number or 1)
        self._check_place(name)
        self.live = not self._session.joins
        if self.live and not (self.starting and self.records):
            return unpack_parts(self._session.engine.run(Agreement(name, payload)))
        key = f"{self.scope}/{name}/{self._counts[self.scope + name]}"
        self._counts[self.scope + name] += 1
        control = self._session.control
        if not self.live:
            assert control is not None
            value = self._recorded(control, key)
            parts = [] if value is None else unpack_parts(base64.b64decode(value))
            wanted = max(1, len(parts)) if number is None else number
            return [*parts[:wanted], *[payload(0)] * (wanted - len(parts))]
        result = self._session.engine.run(Agreement(name, payload))
        if len(result) > RECORD_BYTES:
            logger.warning("start_result_not_recorded name=%s bytes=%d", name, len(result))
        elif control is not None and self._session.engine.world.rank == 0:
            control.record(key, base64.b64encode(result).decode(), self._session.engine.world.epoch)
        return unpack_parts(result)

    def record_start(self) -> None:
        """Record, as the first rank of each epoch after the start, that no more results of the start will be."""
        session = self._session
        if session.control is not None and not (self.starting or session.joins) and session.engine.world.rank == 0:
            session.control.record(_STARTED, "1", session.engine.world.epoch)

    def _recorded(self, control: Control, key: str) -> str | None:
        """Return what members have recorded; wait while they are in their start."""
        deadline, pause = time.monotonic() + START_SECONDS, _FIRST_PAUSE
        while (value := control.lookup(key)) is None and self.records and not self._passed:
            self._passed = control.lookup(_STARTED) is not None or time.monotonic() > deadline
            if not self._passed:
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        return value

    def _check_place(self, name: str) -> None:
        running = self._session.engine.running
        inside = self.inside or self.evaluates()
        if inside is not None:
            raise CollectiveInStep(
                f"{name}() was called inside {inside}; under the unicron strategy ranks run different numbers of "
                "batches, so collectives belong in epoch-level hooks (self.log(sync_dist=True) works anywhere). Write "
                "instead, for sums: self.log; for the negatives of a contrastive loss: a larger batch_size, or a queue "
                "of earlier samples in a buffer"
            )
        if running is not None:
            raise CollectiveInStep(
                f"{name}() was called while the members are in the operation {running!r}, which other ranks run "
                "without this call; collectives belong in hooks that all ranks run, between steps"
            )

    def barrier(self) -> None:
        """Return when all members have called it."""
        self.gather("barrier", lambda rank: b"")

    def broadcast(self, value: Any, source: int) -> Any:
        """Return rank ``source``'s value, which must be plain data."""
        if self.interrupted():
            return value
        parts = self.gather("broadcast", lambda rank: codec.encode(value) if rank == source else b"")
        return codec.decode(parts[min(source, len(parts) - 1)])

    def decide(self, decision: bool, *, every: bool) -> bool:
        """Return whether every rank (or any) decides so."""
        votes = [part == b"1" for part in self.gather("decide", lambda rank: b"1" if decision else b"0")]
        return all(votes) if every else any(votes)

    def stack(self, name: str, tensor: Tensor) -> Tensor:
        """Stack all ranks' tensors in rank order, on the tensor's device; see `filled` for different lengths."""
        parts = self.gather(name, lambda rank: codec.encode(tensor))
        return torch.stack(filled(name, [codec.decode(part) for part in parts])).to(tensor.device)

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Return mean, sum, minimum or maximum over the ranks, in the tensor's dtype."""
        stacked = self.stack("reduce", tensor)
        if operation in ("mean", "avg") and bool((stacked == stacked[0]).all()):
            return stacked[0]  # without a rounding, which would depend on the number of ranks
        match operation:
            case "mean" | "avg":
                return stacked.double().mean(0).to(tensor.dtype)
            case "sum":
                return stacked.sum(0, dtype=tensor.dtype)
            case "min":
                return stacked.amin(0)
            case "max":
                return stacked.amax(0)
        raise ValueError(f"reduce_op={operation!r} is not supported; expected mean, sum, min or max")


def filled(name: str, parts: Sequence[Tensor]) -> list[Tensor]:
    """Repeat rows of the shorter tensors until all have the same shape.

    Ranks evaluate different numbers of samples. Under ddp the sampler repeats samples of the data set for this purpose.

    Raises:
        ShapesDiffer: tensors differ in more than the number of rows.
    """
    if len({part.shape for part in parts}) == 1:
        return list(parts)
    rows = [len(part) if part.dim() else 0 for part in parts]
    longest = parts[rows.index(max(rows))]
    if len({(part.dim(), part.shape[1:], part.dtype) for part in parts}) > 1:
        shapes = [tuple(part.shape) for part in parts]
        raise ShapesDiffer(f"{name}() was given tensors of the shapes {shapes}; expected the same but in dimension 0")
    logger.info("gathered_rows_repeated name=%s rows=%s", name, rows)
    sources = [part if len(part) else longest for part in parts]
    return [part if len(part) == len(longest) else part[torch.arange(len(longest)) % len(part)] for part in sources]
