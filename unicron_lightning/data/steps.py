"""Loaders of global batches: an item per optimizer step in training, and in evaluations of a model that several workers
hold together.

Both read the same steps, of data with an index or of streams, and differ in the places that they read. In training
these come from Lightning's own progress counters, the single source of truth: restoring the counters (from a checkpoint
or a peer's state) restores the data position. An evaluation counts its global batches by itself.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.fetch import Fetcher, MakeFetcher
from unicron_lightning.data.loader import GlobalBatch, InPlace, TrainedInPlace
from unicron_lightning.data.order import DataOrder, EpochOrder, MicroBatchId, StepShape
from unicron_lightning.data.streams import Streams
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import digest
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement


@dataclass(frozen=True, kw_only=True)
class StepPace:
    """How a loop goes through global batches.

    Attributes:
        position: returns the place to read next: epoch, and step within it.
        share: returns this rank's part of a range in the present world, in order.
        boundary: called before each step, where worlds change.
        ended: called at the end of an epoch of data with an index.
    """

    position: Callable[[], tuple[int, int]]
    share: Callable[[range], list[int]]
    boundary: Callable[[], None] = lambda: None
    ended: Callable[[], None] = lambda: None


class Steps(ABC):
    """The global batches of data epochs.

    Args:
        shape: composition of the steps.
        pace: of the loop.

    Attributes:
        shape: as above.
        varies: whether epochs may have different numbers of steps, known when they begin.
    """

    varies = False

    def __init__(self, shape: StepShape, pace: StepPace) -> None:
        self.shape = shape
        self._pace = pace

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Learn that Lightning begins an iteration, before it asks for its length."""

    def epoch(self) -> Iterator[GlobalBatch]:
        """Yield the rest of the present epoch."""
        while True:
            self._pace.boundary()
            batch = self._at(*self._pace.position())
            if batch is None:
                break
            yield batch
        self.end()

    @abstractmethod
    def is_last(self, batch: GlobalBatch) -> bool:
        """Whether no step follows in the epoch; of streams known when the step is committed."""

    def left_out(self, batch: GlobalBatch) -> None:  # noqa: B027
        """Learn, on all ranks, that a step is over without a commit."""

    @abstractmethod
    def length(self) -> int | None:
        """Return the number of steps in the present epoch; None if it is known only at the end."""

    @abstractmethod
    def _at(self, epoch: int, step: int) -> GlobalBatch | None:
        """Return the global batch of a place; None at the end of the epoch."""

    @abstractmethod
    def end(self) -> None:
        """End the epoch's reading."""

    @abstractmethod
    def close(self) -> None:
        """End the run, and its worker processes."""


class IndexedSteps(Steps):
    """The global batches of data with an index.

    Args:
        order: of the samples, and of their random state.
        fetcher: makes what fetches micro-batches.
        pace: of the loop.
        limit: returns the largest number of batches for each device in an epoch.
        whole: whether the last step within the limit is complete.
        shape: of the steps; None: that of the order.

    Attributes:
        fetcher: as made.
        last: number of steps in the last epoch that was asked for.
    """

    def __init__(
        self,
        order: EpochOrder,
        fetcher: MakeFetcher,
        pace: StepPace,
        limit: Callable[[], float] = lambda: math.inf,
        *,
        whole: bool = True,
        shape: StepShape | None = None,
    ) -> None:
        super().__init__(order.shape if shape is None else shape, pace)
        self.varies = order.varies
        self.last = 0
        self.fetcher = fetcher(self._ahead)
        self._order = order
        self._limit = limit
        self._whole = whole
        self._over = False

    def length(self) -> int:
        """Return the number of steps in the present epoch.

        Once the run is over, Lightning's counters are past its last epoch, or an error has ended it, perhaps of this
        very number: it is that of the last epoch.
        """
        return self.last if self._over else self.number(self._pace.position()[0])

    def number(self, epoch: int) -> int:
        """Return the number of steps in an epoch."""
        self.last = -(-self._size(epoch) // self.shape.of(epoch).micro_batches)
        return self.last

    def epoch(self) -> Iterator[GlobalBatch]:
        self.end()
        yield from super().epoch()
        self._pace.ended()

    def is_last(self, batch: GlobalBatch) -> bool:
        return batch.step + 1 == self.number(batch.epoch)

    def samples(self, step: int) -> list[list[Any]]:
        """Return the data set indices of the micro-batches of a step of the first epoch."""
        return [self._order.indices(*self._place(0, step, number)) for number in self._micro_batches(0, step)]

    def end(self) -> None:
        self.fetcher.end_epoch()

    def close(self) -> None:
        self._over = True
        self.fetcher.close()

    def _at(self, epoch: int, step: int) -> GlobalBatch | None:
        if step >= self.number(epoch):
            return None
        self.fetcher.drop_before(self._place(epoch, step, 0))
        return GlobalBatch(
            epoch,
            step,
            self._micro_batches(epoch, step),
            lambda m: self.fetcher.get(self._place(epoch, step, m)),
            lambda m: len(self._order.indices(*self._place(epoch, step, m))),
            self._pace.share,
        )

    def _size(self, epoch: int) -> int:
        """Number of micro-batches in an epoch."""
        most, shape = self._limit(), self.shape.of(epoch)
        if self._whole and not math.isinf(most):
            most = shape.steps(int(most)) * shape.accumulation
        return int(min(self._order.num_micro_batches(epoch), most * shape.devices))

    def _micro_batches(self, epoch: int, step: int) -> range:
        """Numbers of the micro-batches within a step: fewer than M only in the last one."""
        most = self.shape.of(epoch).micro_batches
        return range(max(0, min(most, self._size(epoch) - step * most)))

    def _place(self, epoch: int, step: int, micro_batch: int) -> MicroBatchId:
        """The place of a micro-batch in the order."""
        return self._order.place(epoch, step * self.shape.of(epoch).micro_batches + micro_batch)

    def _ahead(self, start: MicroBatchId) -> Iterator[MicroBatchId]:
        epoch, *within = start
        number = within[0] * self._order.shape.of(epoch).micro_batches + within[1]
        for step in range(number // self.shape.of(epoch).micro_batches, self.number(epoch)):
            places = (self._place(epoch, step, m) for m in self._pace.share(self._micro_batches(epoch, step)))
            yield from (place for place in places if place >= start)


class StreamSteps(Steps):
    """The global batches of streams, whose number is unknown until the streams end.

    Args:
        streams: reads them.
        pace: of the loop; its share is of the streams, as of the first micro-batches of a full step.
        limit: largest number of batches of each stream in an epoch; None: all.
        own: returns which micro-batches of a step are this rank's, given their numbers in a full step.
        agree: given a function of a rank's streams, calls it for this rank and returns the ends that any rank has found
            in it.
        reading: context in which streams are read ahead, for the detection of hangs.
        begins: called when an iteration begins.
    """

    def __init__(
        self,
        streams: Streams,
        pace: StepPace,
        *,
        own: Callable[[Sequence[int]], list[int]],
        agree: Callable[[Callable[[], dict[int, int]]], dict[int, int]],
        reading: Callable[[], AbstractContextManager[None]],
        limit: int | None = None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(streams.shape, pace)
        self._streams = streams
        self._ends = streams.ends
        self._most = limit
        self._own = own
        self._agree = agree
        self._reading = reading
        self._begins = begins
        self._checked = self._iterates = False

    def begin(self) -> None:
        self._iterates = True
        self._begins()

    def expected(self) -> float:
        """Return the steps of an epoch that stated length and limit let expect; `math.inf` without any."""
        numbers = [number for number in (self._most, self._streams.opener.expected()) if number is not None]
        return self.shape.of(self._pace.position()[0]).steps(min(numbers)) if numbers else math.inf

    def length(self) -> int | None:
        """Number of steps by the limit. Before an iteration, Lightning asks for a length without limits: none."""
        return self._limit(self._pace.position()[0]) if self._iterates else None

    def is_last(self, batch: GlobalBatch) -> bool:
        return not self._ends.places(batch.step + 1, self.shape.of(batch.epoch))

    def first(self) -> Any:
        """Return the first batch of the first stream, which is read to check that it repeats itself.

        Raises:
            ConfigError: it does not.
        """
        self._checked = True
        with self._reading():
            return self._streams.check()

    def left_out(self, batch: GlobalBatch) -> None:
        self._search(batch.epoch, batch.step + 1)

    def end(self) -> None:
        self._streams.end_epoch()

    close = end

    def _limit(self, epoch: int) -> int | None:
        """Largest number of steps in an epoch."""
        return None if self._most is None else self.shape.of(epoch).steps(self._most)

    def _at(self, epoch: int, step: int) -> GlobalBatch | None:
        if not self._checked:  # workers that are not compared
            self.first()
        limit = self._limit(epoch)
        if limit is not None and step >= limit:
            return None
        self._streams.begin_step(epoch, step)
        self._enter(epoch, step)
        batch = self._batch(epoch, step)
        return batch if batch.micro_batches else None

    def _enter(self, epoch: int, step: int) -> None:
        """Make known which micro-batches a step has: in later steps of an epoch, the commit before has done that.

        An epoch, or a part of it that is resumed, begins with a search for streams that end within the step.
        """
        if epoch != self._ends.epoch:
            self._ends.begin(epoch, {})
            self._search(epoch, step)

    def _search(self, epoch: int, step: int) -> None:
        """Make known which streams end within a step."""
        ends = self._ends

        def look() -> dict[int, int]:
            self._look(epoch, step, self._pace.share(range(self.shape.devices)))
            return ends.found

        ends.begin(epoch, {**ends.known, **self._agree(look)})

    def _batch(self, epoch: int, step: int) -> GlobalBatch:
        shape, streams = self.shape.of(epoch), self._streams
        places = self._ends.places(step, shape)
        first, size = step * shape.accumulation, streams.opener.loader.batch_size or 1
        in_full_step = [(number - first) * shape.devices + stream for stream, number in places]
        return GlobalBatch(
            epoch,
            step,
            range(len(places)),
            lambda m: streams.get(epoch, *places[m]),
            lambda m: size,
            lambda numbers: self._own(in_full_step),
            finished=lambda m: self._look(epoch, step + 1, places[m][:1]),
            in_full_step=in_full_step,
            stand_in=lambda m: streams.stand_in(epoch, *places[m]),
        )

    def _look(self, epoch: int, step: int, streams: Sequence[int], ahead: int = 0) -> None:
        with self._reading():
            self._streams.look(epoch, step, streams, ahead)


class SingleReading(StreamSteps):
    """The global batches of one stream in a process without an agent: no batch is read again.

    Batches are read as by Lightning with one device; each `GlobalBatch` holds its own, which may be used at any time.
    If the number of an epoch's batches is known, from the data's length or a limit, no batch is read before its step.
    Otherwise the batch after the step is read, too, to know whether the step is the last.

    Args:
        last: called before the last step of an epoch.
        given, named: of `StreamSteps`, in a world of one device.
    """

    def __init__(self, *given: Any, last: Callable[[], None], **named: Any) -> None:
        super().__init__(*given, **named)
        self._last = last
        self._checked = True

    @override
    def begin(self) -> None:
        self._ends.epoch = -1  # an earlier fit, broken off in the same epoch, may have known an end
        super().begin()

    @override
    def length(self) -> int | None:
        length = self._streams.opener.length()
        if length is None:
            return super().length()
        most = self._total() if self._iterates else length
        return self.shape.of(self._pace.position()[0]).steps(int(most))

    def _total(self) -> float:
        """Number of batches of an epoch; `math.inf` if it is known only at the end."""
        return min(math.inf if each is None else each for each in (self._most, self._streams.opener.length()))

    @override
    def _enter(self, epoch: int, step: int) -> None:
        self._ends.most = self._total()
        super()._enter(epoch, step)
        self._look(epoch, step, [0], ahead=int(math.isinf(self._ends.most)))
        self._ends.known |= self._ends.found

    @override
    def _batch(self, epoch: int, step: int) -> GlobalBatch:
        batch = super()._batch(epoch, step)
        read = [batch.fetch(number) for number in batch.micro_batches]
        batch.fetch = batch.stand_in = read.__getitem__
        batch.finished = lambda number: None
        if read and self.is_last(batch):
            self._last()
        return batch


class StreamPass(StreamSteps):
    """The global batches of streams in an evaluation, each read from its beginning in each pass.

    The streams' ends are exchanged with the results of each global batch.

    Args:
        streams, pace: as of `StreamSteps`.
        most: returns the largest number of batches of each stream; `math.inf` for no limit.
        takes_part: whether this worker runs batches; a joiner without state yields none.
        named: of `StreamSteps`.
    """

    def __init__(
        self,
        streams: Streams,
        pace: StepPace,
        *,
        most: Callable[[], float],
        takes_part: Callable[[], bool],
        **named: Any,
    ) -> None:
        super().__init__(streams, pace, **named)
        self._largest = most
        self._takes_part = takes_part

    @override
    def epoch(self) -> Iterator[GlobalBatch]:
        self.end()
        if not self._takes_part():
            return
        self._ends.epoch, self._ends.most = -1, self._largest()
        for batch in super().epoch():
            batch.ends = self._ends
            yield batch


class TrainingLoader(TrainedInPlace):
    """Yields the global batches of an epoch in training.

    Args:
        loader: the user's; one of them, if there are several.
        steps: the global batches.
    """

    def __init__(self, loader: DataLoader[Any], steps: Steps) -> None:
        super().__init__(loader)
        self.steps = self._fetcher = steps

    def __iter__(self) -> Iterator[GlobalBatch]:
        self.steps.begin()
        return super().__iter__()

    def _length(self) -> int | None:
        return self.steps.length()

    def _items(self) -> Iterator[GlobalBatch]:
        return self.steps.epoch()

    def end(self) -> None:
        """End an iteration."""
        self.steps.end()


class PassLoader(InPlace):
    """Yields an evaluation pass in global batches, for workers that hold the model together.

    Args:
        loader: the user's.
        steps: makes the global batches of a pace.
        share: as of `StepPace`.
        epoch: returns the present data epoch, for shuffled data and random state.
        length: returns the number of global batches in it; None if it is known only at the end.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        steps: Callable[[StepPace], Steps],
        share: Callable[[range], list[int]],
        epoch: Callable[[], int],
        length: Callable[[], int | None],
    ) -> None:
        super().__init__(loader)
        self._epoch = epoch
        self._number = length
        self._place = 0, 0
        self._steps = self._fetcher = steps(StepPace(position=self._next, share=share))

    def _length(self) -> int | None:
        return self._number()

    def _items(self) -> Iterator[GlobalBatch]:
        self._place = self._epoch(), -1
        return self._steps.epoch()

    def _next(self) -> tuple[int, int]:
        epoch, step = self._place
        self._place = epoch, step + 1
        return self._place

    def end(self) -> None:
        """End the pass."""
        self._steps.end()


def indexed_pass(
    loader: DataLoader[Any],
    shape: StepShape,
    seed: int,
    most: float,
    limit: Callable[[], float],
    share: Callable[[range], list[int]],
    epoch: Callable[[], int],
) -> PassLoader:
    """Return the loader of a pass over data with an index.

    Args:
        loader: the user's.
        shape: of training steps; a global batch here has as many of the loader's batches, the last one fewer.
        seed: of augmentation.
        most: largest number of batches for each of the shape's devices.
        limit: returns a further limit of this kind when a pass begins.
        share: as of `StepPace`.
        epoch: returns the present data epoch, for shuffled data and random state.
    """
    order = DataOrder(loader, StepShape(devices=shape.devices, accumulation=1), seed)
    fetcher = partial(Fetcher, loader, order, seed)
    steps = partial(IndexedSteps, order, fetcher, limit=lambda: min(most, limit()), whole=False, shape=shape)

    def length() -> int:
        return math.ceil(min(order.num_micro_batches(epoch()), most * shape.devices) / shape.micro_batches)

    return PassLoader(loader, steps, share, epoch, length)


def most_of(limit: int | float, length: int | None, shape: StepShape) -> float:
    """Return the largest number of batches of each stream in a pass; `math.inf` if there is none.

    Args:
        limit: Lightning's: a number of batches, or a fraction of the global batches.
        length: number of batches of a stream; None if it is known only at the end.
        shape: of the global batches.
    """
    known = math.inf if length is None else length
    if isinstance(limit, int):
        return min(limit, known)
    return known if length is None else min(length, int(shape.steps(length) * limit) * shape.accumulation)


def agree_on_ends(engine: Engine, look: Callable[[], dict[int, int]]) -> dict[int, int]:
    """Return the ends that any rank has found by a look into its streams."""
    parts = engine.run(Agreement("ends of streams", lambda rank: codec.encode(look())))
    return {stream: end for part in unpack_parts(parts) for stream, end in codec.decode(part).items()}


def describe_order(steps: Steps) -> str:
    """Describe the order of training data, by the first step and a later one that is equal on all workers; of a
    stream, by its first batch.
    """
    if isinstance(steps, StreamSteps):
        return f"digest of the first batch {digest([_content(steps.first())])}"
    assert isinstance(steps, IndexedSteps)
    number = steps.number(0)
    later = random.Random(number).randrange(number) if number else 0
    orders = [(step, steps.samples(step)) for step in dict.fromkeys((0, later)) if step < number]
    return f"digest of the samples of steps {[step for step, _ in orders]} {digest(orders)}"


def _content(batch: Any) -> object:
    try:
        return codec.encode(batch)
    except codec.NotPlainData:
        return batch
