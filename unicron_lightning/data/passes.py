"""Batches of evaluations and predictions: each is run by one worker, or by those that hold the model together.

Batch ``n`` of a pass is that of device ``n % W`` in round ``n // W``, in the declared world of ``W`` devices. Of
streams it is batch ``n // W`` of stream ``n % W``. Replicas read whole streams as long as each replica can have one.
All replicas read each remaining stream, and its batches are dealt out to them (`worker.rows.share_streams`). In the
declared world each worker reads the stream of its device. The same rule distributes a lost worker's batches. The end of
a stream is one more number in the report of each worker that has found it, so that members know which streams are
complete.

If several workers hold a model together, they compute rows of batches, each its own: row ``n`` of group ``g`` has batch
``n`` of the streams ``g S`` to ``g S + S - 1``, one for each shard, and replicas share groups. The workers of a replica
must run the same rows, but a worker finds the end of its own stream only. So they exchange a word about each row before
they run it. All choices follow from the members' reports and from these words; replicas do not wait for each other.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Any, Final

from torch.utils.data import DataLoader

from unicron_lightning.data.fetch import MakeFetcher
from unicron_lightning.data.loader import InPlace
from unicron_lightning.data.order import EpochOrder, MicroBatchId
from unicron_lightning.data.streams import ENDS, StreamChanged, StreamOpener, StreamReader
from unicron_lightning.worker.rows import ReportSum, plan_rows, share_streams

NOTHING: Final = 0
"""Word of a worker that has no batch to run in a row: a member has run it, or its stream ended earlier."""
BATCH: Final = 1
"""Word of a worker that has one."""
END: Final = 2
"""Word of a worker that has found the end of its stream."""


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """This worker's part of each row.

    Attributes:
        size: batches of a row; 1 if each worker holds the whole model.
        shard: place of this worker's batch in a row.
        together: whether other workers run a row with this one.
        speaks: whether the results of this worker's batch count, and not those of another one with the same batch.
        exchange: sends this worker's word to the workers of its replica; returns theirs, by shard.
    """

    size: int = 1
    shard: int = 0
    together: bool = False
    speaks: bool = True
    exchange: Callable[[int], Sequence[int]] = lambda word: [word]

    def own(self, row: int, number: int) -> tuple[int, bool]:
        """Return this worker's batch of a row, given the number of all batches, and whether the row has one for it;
        otherwise it is the last one.
        """
        batch = row * self.size + self.shard
        return min(batch, number - 1), batch < number


class IndexedBatches:
    """The batches of data with an index in a pass, by number.

    Args:
        order: of the samples, divided as with ddp.
        fetcher: makes what fetches batches.

    Attributes:
        number: of batches in the present pass.
        part: this worker's part of each row.
    """

    part = RowPart()

    def __init__(self, order: EpochOrder, fetcher: MakeFetcher) -> None:
        self.number = 0
        self._order = order
        self._epoch = 0
        self._planned: list[tuple[int, bool]] = []
        self._fetcher = fetcher(self._ahead)

    def rounds(self) -> int:
        """Return the number of rounds, each of a batch for each device of the declared world."""
        return self._order.num_steps(self._epoch)

    def begin(self, epoch: int, most: float) -> None:
        """Begin a pass.

        Args:
            epoch: for shuffled data and random state.
            most: largest number of rounds; `math.inf` for no limit.
        """
        self._epoch = epoch
        self.number = int(min(self._order.num_micro_batches(epoch), most * self._order.devices))

    def plan(self, known: frozenset[int], replica: int | None, replicas: int, finished: set[int]) -> bool:
        """Divide the rows with batches that no member has run, and request the samples ahead, instead of any requested
        before.

        Args:
            known: numbers in the members' reports.
            replica: place of this worker's replica; None for a spare.
            replicas: number of replicas.
            finished: numbers that this worker is to report.

        Returns:
            Whether this worker may have rows.
        """
        self.expect(own_batches(self.number, known, finished, replica, replicas, self.part))
        return bool(self._planned)

    def expect(self, planned: list[tuple[int, bool]]) -> None:
        """Request the samples of `rows` ahead, instead of any requested before."""
        self._fetcher.end_epoch()
        self._planned = planned

    def rows(self) -> Iterator[tuple[int, bool]]:
        """Yield the number of this worker's batch in each of its rows, and whether its result is kept; otherwise the
        batch only lets the partners compute theirs.
        """
        yield from self._planned

    def get(self, number: int) -> Any:
        """Return the batch that `rows` has yielded, or the samples in its place if the result is not kept."""
        return self._fetcher.get(self._order.place(self._epoch, number))

    stand_in = get

    def indices(self, number: int) -> list[Any]:
        """Return the data set indices of a batch."""
        return self._order.indices(*self._order.place(self._epoch, number))

    def end(self) -> None:
        """End the pass."""
        self._fetcher.end_epoch()

    def close(self) -> None:
        """Stop the worker processes."""
        self._fetcher.close()

    def _ahead(self, start: MicroBatchId) -> Iterator[MicroBatchId]:
        places = (self._order.place(self._epoch, number) for number, _ in self._planned)
        return (place for place in places if place >= start)


def own_batches(
    number: int, known: frozenset[int], finished: set[int], replica: int | None, replicas: int, part: RowPart
) -> list[tuple[int, bool]]:
    """Return a shard's batch of each row of its replica, and whether it counts.

    It is the last batch of a row with fewer batches than shards, and does not count then.

    Args:
        number: of all batches.
        known: numbers in the members' reports.
        finished: numbers that this worker is to report.
        replica: place of this worker's replica; None for a spare.
        replicas: number of replicas.
        part: of the shard.
    """
    found = []
    for row in plan_rows(range(number), known, replica, replicas, width=part.size).rows:
        batch, is_there = part.own(row, number)
        found.append((batch, is_there and batch not in known and batch not in finished))
    return [each for each in found if part.together or each[1]]


class StreamBatches:
    """The batches of streams in a pass, by number; the methods are those of `IndexedBatches`.

    Args:
        opener: opens the streams.
        devices: number of streams.
        reading: context in which streams are read, for the detection of hangs.
    """

    part = RowPart()

    def __init__(self, opener: StreamOpener, devices: int, reading: Callable[[], AbstractContextManager[None]]) -> None:
        self._devices = devices
        self._most = math.inf
        self._opener = opener
        self._reading = reading
        self._epoch = 0
        self._checked = False
        self._reader: StreamReader | None = None
        self._stream = -1
        self._batch: tuple[int, Any] = -1, None
        self._known: frozenset[int] = frozenset()
        self._finished: set[int] = set()
        self._groups: list[tuple[int, int, int]] = []
        self._ends: dict[int, int] = {}
        self._found: dict[int, int] = {}
        """Ends that this worker has found in an earlier part of the pass, since the members' reports."""
        self._spare: list[Any] = []

    def rounds(self) -> int | None:
        """Return the number of rounds; None if it is known only at the end."""
        return self._opener.length()

    def begin(self, epoch: int, most: float) -> None:
        """Begin a pass.

        Raises:
            ConfigError: in the first pass, for a data set that does not repeat itself.
        """
        self.end()
        self._epoch, self._most, self._spare = epoch, most, []
        if not self._checked:
            self._checked = True
            with self._reading():
                self._opener.check()

    def plan(self, known: frozenset[int], replica: int | None, replicas: int, finished: set[int]) -> bool:
        """Divide the rows; ends of streams are added to what this worker is to report."""
        groups = sorted({stream // self.part.size for stream in missing(known, self._devices, self._most)})
        self._known, self._ends, self._finished = known, ends_of(known, self._devices), finished
        self._groups = share_streams(groups, replica, replicas)
        return bool(self._groups)

    def rows(self) -> Iterator[tuple[int, bool]]:
        """Yield the rows, whose batches are read then.

        Raises:
            StreamChanged: a stream ends before a batch that a member has run.
        """
        self._found = ends_of(self._finished, self._devices)
        for group, first, step in self._groups:
            yield from self._rows_of(group, first, step)
        self.end()

    def get(self, number: int) -> Any:
        assert self._batch[0] == number, "a batch is read when `rows` yields its number"
        return self._batch[1]

    def stand_in(self, number: int) -> Any:
        """Return a copy of the first batch of the first stream that needed a stand-in."""
        if not self._spare:
            with self._reading():
                reader = self._opener.open(self._epoch, number % self._devices, workers=0)
                self._spare.append(reader.read())
                reader.close()
        return copy.deepcopy(self._spare[0])

    def indices(self, number: int) -> None:
        """Return None: there are none."""

    def end(self) -> None:
        """Close the open stream, and end its worker processes."""
        if self._reader is not None:
            self._reader.close()
        self._reader, self._batch = None, (-1, None)

    close = end

    def _rows_of(self, group: int, first: int, step: int) -> Iterator[tuple[int, bool]]:
        """Yield the rows of a group, or a part of them, up to the end of its longest stream."""
        devices, size, shard = self._devices, self.part.size, self.part.shard
        streams = range(devices)[group * size : (group + 1) * size]
        ends = dict(self._ends)
        for row in islice(self._left(streams, ends), first, None, step):
            words = self.part.exchange(self._word(row, streams, ends))
            # A stream with an end is empty from this row on, wherever its end is. Replicas that share a group learn of
            # ends in different rows, so `_left` skips by the reported ones only.
            ends.update((stream, row) for stream, word in zip(streams, words, strict=False) if word == END)
            present = [row * devices + stream for stream, word in zip(streams, words, strict=False) if word == BATCH]
            if present:
                counts = words[shard] == BATCH
                yield (row * devices + streams[shard] if counts else present[0]), counts

    def _left(self, streams: Sequence[int], ends: Mapping[int, int]) -> Iterator[int]:
        """Yield the rows of a group with batches that no member has run, as far as their ends are known.

        Args:
            streams: of the group.
            ends: their numbers of batches, as far as they are known; those that are added end the iteration.
        """
        devices, reported = self._devices, dict(ends)

        def has_row(row: int) -> bool:
            return row < min(self._most, max(ends.get(stream, math.inf) for stream in streams))

        for row in takewhile(has_row, count()):
            if any(row < reported.get(s, math.inf) and row * devices + s not in self._known for s in streams):
                yield row

    def _word(self, row: int, streams: Sequence[int], ends: Mapping[int, int]) -> int:
        if self.part.shard >= len(streams):
            return NOTHING
        stream = streams[self.part.shard]
        number = row * self._devices + stream
        if row >= ends.get(stream, math.inf) or number in self._known or number in self._finished:
            return NOTHING
        if row >= self._found.get(stream, math.inf):
            return END
        return BATCH if self._read(row, stream) else END

    def _read(self, row: int, stream: int) -> bool:
        """Read a batch for `get`; return whether its stream has it. An end is added to what this worker reports."""
        with self._reading():
            if self._reader is None or self._stream != stream or self._reader.next > row:
                self.end()
                self._reader, self._stream = self._opener.open(self._epoch, stream), stream
            try:
                while self._reader.next <= row:
                    self._batch = row * self._devices + stream, self._reader.read()
            except StopIteration:
                self._finished.add(self._end(stream, self._reader.next))
                return False
        return True

    def _end(self, stream: int, end: int) -> int:
        """Return the number that reports the end of a stream, after its last batch.

        Raises:
            StreamChanged: a member has run a batch that is not before it.
        """
        devices = self._devices
        run = [number // devices for number in self._known if number < ENDS and number % devices == stream]
        if max(run, default=-1) >= end:
            raise StreamChanged(
                f"{self._opener.name}: stream {stream} of {devices} ends after {end} batches, but batch "
                f"{max(run)} existed when it was read before: expected a data set that yields the same samples again"
            )
        return ENDS + end * devices + stream


def ends_of(finished: Collection[int], devices: int) -> dict[int, int]:
    """Return the number of batches of each stream whose end has been reported."""
    ends = (number - ENDS for number in finished if number >= ENDS)
    return {end % devices: end // devices for end in ends}


def missing(finished: Collection[int], devices: int, most: float) -> list[int]:
    """Return the streams that may have batches that no member has run.

    Args:
        finished: numbers in the members' reports.
        devices: number of streams.
        most: largest number of batches of each.
    """
    ends = ends_of(finished, devices)
    run = Counter(number % devices for number in finished if number < ENDS)
    return [stream for stream in range(devices) if run[stream] < min(most, ends.get(stream, math.inf))]


PassBatches = IndexedBatches | StreamBatches


class EvaluationLoader(InPlace):
    """Yields this rank's batches of an evaluation pass; a lost rank's batches are run at the pass's end.

    Args:
        loader: the user's.
        batches: its batches; the number of their rounds is the length.
        begin: called with this loader when iteration starts; returns the batches to run.
        start: called with each batch's number before it is yielded.

    Attributes:
        batches: as above.
        finished: numbers that this rank reports of the pass; for streams, with their ends.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: PassBatches,
        begin: Callable[[Any], Iterable[int]],
        start: Callable[[int], None],
    ) -> None:
        super().__init__(loader)
        self.batches = self._fetcher = batches
        self.finished: set[int] = set()
        self._begin = begin
        self._start = start

    def begin(self, epoch: int, most: float) -> None:
        """Begin a pass.

        Args:
            epoch: for shuffled data and random state.
            most: Lightning's limit for each device of the declared world.
        """
        self.finished = set()
        self.batches.begin(epoch, most)

    def todo(self, reports: ReportSum, rank: int) -> Iterable[int]:
        """Return this rank's share of the batches that are missing in the members' reports, without those that it has
        run since.
        """
        self.batches.plan(reports.finished, rank, reports.world, self.finished)
        return (number for number, _ in self.batches.rows())

    def end(self) -> None:
        """End the pass."""
        self.batches.end()

    def _length(self) -> int | None:
        return self.batches.rounds()

    def _items(self) -> Iterator[Any]:
        self.end()
        for number in self._begin(self):
            batch = self.batches.get(number)
            self._start(number)
            yield batch
