"""Streams in evaluations and predictions: each batch is run by one worker, and all together find the streams' ends.

Batch ``n`` of a pass is batch ``n // W`` of stream ``n % W``, in the declared world of ``W`` devices. Replicas read
whole streams as long as each replica can have one. All replicas read each remaining stream, and its batches are dealt
out to them (`worker.rows.share_streams`). In the declared world each worker reads the stream of its device. The same
rule distributes a lost worker's batches. The end of a stream is one more number in the report of each worker that has
found it, so that members know which streams are complete.

If several workers hold a model together, they compute rows of batches, each its own: row ``n`` of group ``g`` has batch
``n`` of the streams ``g S`` to ``g S + S - 1``, one for each shard, and replicas share groups. The workers of a replica
must run the same rows, but a worker finds the end of its own stream only. So they exchange a word about each row before
they run it. All choices follow from the members' reports and from these words; replicas do not wait for each other.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count, islice, takewhile
from typing import Any, Final

from unicron_lightning.data.pass_loaders import ENDS
from unicron_lightning.data.stream_reader import StreamChanged, StreamOpener, StreamReader
from unicron_lightning.worker.report_sum import ReportSum
from unicron_lightning.worker.rows import share_streams

NOTHING: Final = 0
"""Word of a worker that has no batch to run in a row: a member has run it, or its stream ended earlier."""
BATCH: Final = 1
"""Word of a worker that has one."""
END: Final = 2
"""Word of a worker that has found the end of its stream."""


class StreamBatches:
    """The batches of streams in an evaluation; implements `PassBatches`.

    Args:
        opener: opens the streams.
        devices: number of streams.
        reading: context in which streams are read, for the detection of hangs.

    Attributes:
        devices: as above.
        most: largest number of batches of each stream in the present pass.
    """

    def __init__(self, opener: StreamOpener, devices: int, reading: Callable[[], AbstractContextManager[None]]) -> None:
        self.devices = devices
        self.most = math.inf
        self._opener = opener
        self._reading = reading
        self._epoch = 0
        self._checked = False
        self._reader: StreamReader | None = None
        self._stream = -1
        self._batch: tuple[int, Any] = -1, None

    def rounds(self) -> int | None:
        return self._opener.length()

    def begin(self, epoch: int, most: float) -> None:
        """Begin a pass.

        Raises:
            ConfigError: in the first pass, for a data set that does not repeat itself.
        """
        self.end()
        self._epoch, self.most = epoch, most
        if not self._checked:
            self._checked = True
            with self._reading():
                self._opener.check()

    def todo(self, reports: ReportSum, rank: int, finished: set[int]) -> Iterator[int]:
        """Yield the numbers of batches, each of which is read then.

        Raises:
            StreamChanged: a stream ends before a batch that a member has run.
        """
        rows = StreamRows(self, 1, 0, lambda word: [word], finished)
        rows.plan(reports.finished, rank, reports.world)
        yield from (number for number, _ in rows.rows())

    def read(self, number: int, known: Collection[int], finished: set[int]) -> bool:
        """Read a batch for `get`, unless its stream ends before it.

        Args:
            number: of the batch.
            known: numbers in the members' reports.
            finished: as of `todo`; the end is added.

        Returns:
            Whether there is such a batch.

        Raises:
            StreamChanged: the stream ends before a batch that a member has run.
        """
        wanted, stream = divmod(number, self.devices)
        with self._reading():
            if self._reader is None or self._stream != stream or self._reader.next > wanted:
                self.end()
                self._reader, self._stream = self._opener.open(self._epoch, stream), stream
            try:
                while self._reader.next <= wanted:
                    self._batch = number, self._reader.read()
            except StopIteration:
                finished.add(self._end(stream, self._reader.next, known))
                return False
        return True

    def first(self, stream: int) -> Any:
        """Return the first batch of a stream that has one."""
        with self._reading():
            reader = self._opener.open(self._epoch, stream, workers=0)
            batch = reader.read()
            reader.close()
        return batch

    def get(self, number: int) -> Any:
        assert self._batch[0] == number, "a batch is read when `todo` yields its number"
        return self._batch[1]

    def indices(self, number: int) -> None:
        return None

    def end(self) -> None:
        """Close the open stream, and end its worker processes."""
        if self._reader is not None:
            self._reader.close()
        self._reader, self._batch = None, (-1, None)

    close = end

    def _end(self, stream: int, end: int, known: Collection[int]) -> int:
        """Return the number that reports the end of a stream, after its last batch.

        Raises:
            StreamChanged: a member has run a batch that is not before it.
        """
        run = [number // self.devices for number in known if number < ENDS and number % self.devices == stream]
        if max(run, default=-1) >= end:
            raise StreamChanged(
                f"{self._opener.name}: stream {stream} of {self.devices} ends after {end} batches, but batch "
                f"{max(run)} existed when it was read before: expected a data set that yields the same samples again"
            )
        return ENDS + end * self.devices + stream


class StreamRows:
    """This worker's batches of the rows of streams; implements `RowSource`.

    Args:
        batches: reads the streams.
        size: batches of a row; 1 if each worker holds the whole model.
        shard: place of this worker's batch in a row.
        exchange: sends this worker's word to the workers of its replica; returns theirs, by shard.
        finished: numbers that this worker reports; ends of streams are added.
    """

    def __init__(
        self,
        batches: StreamBatches,
        size: int,
        shard: int,
        exchange: Callable[[int], Sequence[int]],
        finished: set[int],
    ) -> None:
        self._batches = batches
        self._size = size
        self._shard = shard
        self._exchange = exchange
        self._finished = finished
        self._known: frozenset[int] = frozenset()
        self._groups: list[tuple[int, int, int]] = []
        self._ends: dict[int, int] = {}
        self._found: dict[int, int] = {}
        """Ends that this worker has found in an earlier part of the pass, since the members' reports."""
        self._spare: list[Any] = []

    def plan(self, known: frozenset[int], replica: int | None, replicas: int) -> bool:
        devices, most = self._batches.devices, self._batches.most
        groups = sorted({stream // self._size for stream in missing(known, devices, most)})
        self._known, self._ends = known, ends_of(known, devices)
        self._groups = share_streams(groups, replica, replicas)
        return bool(self._groups)

    def rows(self) -> Iterator[tuple[int, bool]]:
        """See `RowSource.rows`.

        Raises:
            StreamChanged: a stream ends before a batch that a member has run.
        """
        self._found = ends_of(self._finished, self._batches.devices)
        for group, first, step in self._groups:
            yield from self._rows_of(group, first, step)
        self._batches.end()

    def stand_in(self, number: int) -> Any:
        """Return a copy of the first batch of the first stream that needed a stand-in."""
        if not self._spare:
            self._spare.append(self._batches.first(number % self._batches.devices))
        return copy.deepcopy(self._spare[0])

    def _rows_of(self, group: int, first: int, step: int) -> Iterator[tuple[int, bool]]:
        """Yield the rows of a group, or a part of them, up to the end of its longest stream."""
        devices = self._batches.devices
        streams = range(devices)[group * self._size : (group + 1) * self._size]
        ends = dict(self._ends)
        for row in islice(self._left(streams, ends), first, None, step):
            words = self._exchange(self._word(row, streams, ends))
            # A stream with an end is empty from this row on, wherever its end is. Replicas that share a group learn of
            # ends in different rows, so `_left` skips by the reported ones only.
            ends.update((stream, row) for stream, word in zip(streams, words, strict=False) if word == END)
            present = [row * devices + stream for stream, word in zip(streams, words, strict=False) if word == BATCH]
            if present:
                counts = words[self._shard] == BATCH
                yield (row * devices + streams[self._shard] if counts else present[0]), counts

    def _left(self, streams: Sequence[int], ends: Mapping[int, int]) -> Iterator[int]:
        """Yield the rows of a group with batches that no member has run, as far as their ends are known.

        Args:
            streams: of the group.
            ends: their numbers of batches, as far as they are known; those that are added end the iteration.
        """
        devices, most, reported = self._batches.devices, self._batches.most, dict(ends)

        def has_row(row: int) -> bool:
            return row < min(most, max(ends.get(stream, math.inf) for stream in streams))

        for row in takewhile(has_row, count()):
            if any(row < reported.get(s, math.inf) and row * devices + s not in self._known for s in streams):
                yield row

    def _word(self, row: int, streams: Sequence[int], ends: Mapping[int, int]) -> int:
        if self._shard >= len(streams):
            return NOTHING
        stream = streams[self._shard]
        number = row * self._batches.devices + stream
        if row >= ends.get(stream, math.inf) or number in self._known or number in self._finished:
            return NOTHING
        if row >= self._found.get(stream, math.inf):
            return END
        return BATCH if self._batches.read(number, self._known, self._finished) else END


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
