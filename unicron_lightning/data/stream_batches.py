"""Streams in evaluations: each batch is evaluated by one rank, and all ranks together find the streams' ends.

Batch ``n`` of a pass is batch ``n // W`` of stream ``n % W``, in the declared world of ``W`` devices. Ranks read whole
streams as long as each rank can have one. All ranks read each remaining stream, and its batches are dealt out to them.
In the declared world each rank reads the stream of its device. The same rule distributes a lost rank's batches.

Nothing is exchanged during a pass. The end of a stream is one more number in the report of each rank that has found it,
so that members know which streams are complete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count, islice, takewhile
from typing import Any

from unicron_lightning.data.pass_loaders import ENDS
from unicron_lightning.data.stream_reader import StreamChanged, StreamOpener, StreamReader
from unicron_lightning.worker.report_sum import ReportSum


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
        known = reports.finished
        ends = ends_of(known, self.devices) | ends_of(finished, self.devices)
        for stream, first, step in deal(missing(known, self.devices, self.most), rank, reports.world):
            most = min(self.most, ends.get(stream, math.inf))
            left = (number for number in count() if number * self.devices + stream not in known)
            own = islice(takewhile(most.__gt__, left), first, None, step)
            yield from self._rest(stream, own, known, finished)
        self.end()

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

    def _rest(self, stream: int, own: Iterator[int], known: Collection[int], finished: set[int]) -> Iterator[int]:
        """Yield the unfinished ones of a stream's batches, up to its end, which is added to ``finished``."""
        for wanted in own:
            number = wanted * self.devices + stream
            if number in finished:
                continue
            if not self.read(number, known, finished):
                return
            yield number

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


def deal(streams: Sequence[int], rank: int, world: int) -> Iterator[tuple[int, int, int]]:
    """Yield a rank's streams, each with the place of the rank's first batch among the unfinished ones, and the step to
    its next: each rank has as many whole streams, and a part of each remaining one.
    """
    whole = len(streams) // world * world
    for place, stream in enumerate(streams):
        if place >= whole:
            yield stream, rank, world
        elif place % world == rank:
            yield stream, 0, 1
