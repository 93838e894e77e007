"""The training loader of an iterable data set: steps whose number is unknown until the streams end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.loader import GlobalBatch, StepLoader
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.sources import name_of
from unicron_lightning.data.streams import StreamEnds, Streams


class StreamLoader(StepLoader):
    """Yields the `GlobalBatch` es of an epoch of streams.

    Args:
        loader: the user's, over an iterable data set.
        shape: of the steps.
        streams: reads it.
        ends: the streams' lengths, as far as they are known.
        limit: largest number of batches for each of the shape's devices in an epoch; None: all.
        position, share, boundary: as for `IndexedSteps`; of the streams, as of the first micro-batches of a full step.
        own: returns which micro-batches of a step are this rank's, given their numbers in a full step.
        agree: given a function of a rank's streams, calls it for this rank and returns the ends that any rank has found
            in it.
        begins: called when an iteration begins.
        reading: context in which streams are read ahead, for the detection of hangs.
    """

    _fetcher: Streams

    def __init__(
        self,
        loader: DataLoader[Any],
        shape: StepShape,
        streams: Streams,
        ends: StreamEnds,
        *,
        limit: int | None,
        position: Callable[[], tuple[int, int]],
        share: Callable[[range], list[int]],
        own: Callable[[Sequence[int]], list[int]],
        boundary: Callable[[], None],
        agree: Callable[[Callable[[], dict[int, int]]], dict[int, int]],
        begins: Callable[[], None],
        reading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(loader)
        self._position = position
        self._share = share
        self._own = own
        self._boundary = boundary
        self._shape = shape
        self._fetcher = streams
        self._ends = ends
        self._most = limit
        self._agree = agree
        self._begins = begins
        self._reading = reading
        self._checked = False
        self._iterates = False

    def expected_steps(self) -> float:
        """Return the steps of an epoch that stated length and limit let expect; `math.inf` without any."""
        numbers = [number for number in (self._most, self._fetcher.expected()) if number is not None]
        return self._shape.of(self._position()[0]).steps(min(numbers)) if numbers else math.inf

    def __len__(self) -> int:
        """Number of steps by the limit. Before an iteration, Lightning asks for a length without limits: none."""
        self.taken()
        limit = self._limit(self._position()[0]) if self._iterates else None
        if limit is None:
            raise TypeError(f"{name_of(self._loader)} is a stream, which has no length")
        return limit

    def _limit(self, epoch: int) -> int | None:
        """Largest number of steps in an epoch."""
        return None if self._most is None else self._shape.of(epoch).steps(self._most)

    def __iter__(self) -> Iterator[GlobalBatch]:
        self._iterates = True
        self._begins()
        return super().__iter__()

    def _epoch(self) -> Iterator[GlobalBatch]:
        while True:
            self._boundary()
            if not self._checked:  # workers that are not compared
                with self._reading():
                    self.first()
            epoch, step = self._position()
            limit = self._limit(epoch)
            if limit is not None and step >= limit:
                break
            self._fetcher.begin_step(epoch, step)
            self._enter(epoch, step)
            batch = self._at(epoch, step)
            if not batch.micro_batches:
                break
            yield batch
        self._fetcher.end_epoch()

    def _enter(self, epoch: int, step: int) -> None:
        """Make known which micro-batches a step has: in later steps of an epoch, the commit before has done that."""
        if epoch != self._ends.epoch:
            self._begin(epoch, step)

    def _at(self, epoch: int, step: int) -> GlobalBatch:
        shape = self._shape.of(epoch)
        places = self._ends.places(step, shape)
        first, size = step * shape.accumulation, self._loader.batch_size or 1
        in_full_step = [(number - first) * shape.devices + stream for stream, number in places]
        return GlobalBatch(
            epoch,
            step,
            range(len(places)),
            lambda m: self._fetcher.get(epoch, *places[m]),
            lambda m: size,
            lambda numbers: self._own(in_full_step),
            finished=lambda m: self._look(epoch, step + 1, places[m][:1]),
            in_full_step=in_full_step,
            stand_in=lambda m: self._fetcher.stand_in(epoch, *places[m]),
        )

    def is_last(self, batch: GlobalBatch) -> bool:
        """Whether no step follows in the epoch; known when the step is committed."""
        return not self._ends.places(batch.step + 1, self._shape.of(batch.epoch))

    def first(self) -> Any:
        """Return the first batch of the first stream, which is read to check that it repeats itself.

        Raises:
            ConfigError: it does not.
        """
        self._checked = True
        return self._fetcher.check()

    def _begin(self, epoch: int, step: int) -> None:
        """Begin an epoch, or a part of it that is resumed: find streams that end within the step."""
        ends = self._ends
        ends.begin(epoch, {})

        def look() -> dict[int, int]:
            streams: Sequence[int] = self._share(range(self._shape.devices))
            self._look(epoch, step, streams)
            return ends.found

        ends.begin(epoch, self._agree(look))

    def _look(self, epoch: int, step: int, streams: Sequence[int], ahead: int = 0) -> None:
        with self._reading():
            self._fetcher.look(epoch, step, streams, ahead)


class SingleReading(StreamLoader):
    """Yields the `GlobalBatch` es of an epoch of one stream in a process without an agent: no batch is read again.

    Batches are read as by Lightning with one device; each `GlobalBatch` holds its own, which may be used at any time.
    If the number of an epoch's batches is known, from the data's length or a limit, no batch is read before its step.
    Otherwise the batch after the step is read, too, to know whether the step is the last.

    Args:
        length: returns the number of batches of the stream; None if it is known only at the end.
        last: called before the last step of an epoch.
        given, named: of `StreamLoader`, in a world of one device.
    """

    def __init__(self, *given: Any, length: Callable[[], int | None], last: Callable[[], None], **named: Any) -> None:
        super().__init__(*given, **named)
        self._length = length
        self._last = last
        self._checked = True

    @override
    def __len__(self) -> int:
        length = self._length()
        if length is None:
            return super().__len__()
        self.taken()
        most = self._total() if self._iterates else length
        return self._shape.of(self._position()[0]).steps(int(most))

    def _total(self) -> float:
        """Number of batches of an epoch; `math.inf` if it is known only at the end."""
        return min(math.inf if each is None else each for each in (self._most, self._length()))

    @override
    def __iter__(self) -> Iterator[GlobalBatch]:
        self._ends.epoch = -1  # an earlier fit, broken off in the same epoch, may have known an end
        return super().__iter__()

    @override
    def _enter(self, epoch: int, step: int) -> None:
        self._ends.most = self._total()
        super()._enter(epoch, step)
        self._look(epoch, step, [0], ahead=int(math.isinf(self._ends.most)))
        self._ends.known |= self._ends.found

    @override
    def _at(self, epoch: int, step: int) -> GlobalBatch:
        batch = super()._at(epoch, step)
        read = [batch.fetch(number) for number in batch.micro_batches]
        batch.fetch = batch.stand_in = read.__getitem__
        batch.finished = lambda number: None
        if read and self.is_last(batch):
            self._last()
        return batch
