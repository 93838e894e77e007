"""Streams in a prediction of a model that several workers hold together: rows of batches that a replica's workers
compute together, each its own.

Row ``n`` of group ``g`` has batch ``n`` of the streams ``g S`` to ``g S + S - 1``, one for each shard. Replicas get
groups as ranks get streams in `stream_batches`: whole ones as long as each replica can have one, and the rows of each
remaining group are dealt out. In the declared world each worker reads the stream of its device.

The workers of a replica must run the same rows, but a worker finds the end of its own stream only. So they exchange a
word about each row before they run it. All choices follow from the members' reports and from these words.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count, islice, takewhile
from typing import Any, Final

from unicron_lightning.data.stream_batches import StreamBatches, deal, ends_of, missing

NOTHING: Final = 0
"""Word of a worker that has no batch to run in a row: a member has run it, or its stream ended earlier."""
BATCH: Final = 1
"""Word of a worker that has one."""
END: Final = 2
"""Word of a worker that has found the end of its stream."""


class StreamRows:
    """This worker's batches of the rows of streams; implements `RowSource`.

    Args:
        batches: reads the streams.
        size: batches of a row.
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
        self._spare: list[Any] = []

    def plan(self, known: frozenset[int], replica: int | None, replicas: int) -> bool:
        devices, most = self._batches.devices, self._batches.most
        groups = sorted({stream // self._size for stream in missing(known, devices, most)})
        self._known = known
        self._groups = [] if replica is None else list(deal(groups, replica, replicas))
        return bool(self._groups)

    def rows(self) -> Iterator[tuple[int, bool]]:
        """See `RowSource.rows`.

        Raises:
            StreamChanged: a stream ends before a batch that a member has run.
        """
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
        ends = dict(ends_of(self._known, devices))
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
        done: tuple[Collection[int], ...] = self._known, self._finished
        if row >= ends.get(stream, math.inf) or any(number in numbers for numbers in done):
            return NOTHING
        return BATCH if self._batches.read(number, self._known, self._finished) else END
