"""Evaluations over streams in global batches, for workers that hold the model together.

The streams are read as in training, from their beginning in each pass. Their ends are exchanged with the results of
each global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from unicron_lightning.data.loader import GlobalBatch, InPlace, Items
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.pass_loaders import ENDS
from unicron_lightning.data.sources import name_of
from unicron_lightning.data.stream_loader import StreamLoader
from unicron_lightning.data.streams import StreamEnds, Streams


class StreamPass(InPlace):
    """Yields the global batches of a pass.

    Args:
        loader: the user's, over an iterable data set.
        shape: of the global batches, without a schedule.
        streams: reads it.
        ends: the streams' lengths, as far as they are known.
        most: returns the largest number of batches of each stream; `math.inf` for no limit.
        epoch: returns the present data epoch, for random state.
        takes_part: whether this worker runs batches; a joiner without state yields none.
        share, own, agree, reading: as for `StreamLoader`.
        length: returns the number of batches of a stream; None if it is known only at the end.

    Attributes:
        iterates, unbounded: as of `EvaluationLoader`.
    """

    _fetcher: Streams

    def __init__(
        self,
        loader: DataLoader[Any],
        shape: StepShape,
        streams: Streams,
        ends: StreamEnds,
        *,
        most: Callable[[], float],
        epoch: Callable[[], int],
        takes_part: Callable[[], bool],
        share: Callable[[range], list[int]],
        own: Callable[[Sequence[int]], list[int]],
        agree: Callable[[Callable[[], dict[int, int]]], dict[int, int]],
        reading: Callable[[], AbstractContextManager[None]],
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(loader)
        self.iterates: Callable[[], None] = lambda: None
        self.unbounded = False
        self._fetcher = streams
        self._shape = shape
        self._ends = ends
        self._limit = most
        self._length = length
        self._epoch = epoch
        self._takes_part = takes_part
        self._place = 0, 0
        self._steps = StreamLoader(
            loader,
            shape,
            streams,
            ends,
            limit=None,
            position=self._next,
            share=share,
            own=own,
            boundary=lambda: None,
            agree=agree,
            begins=lambda: None,
            reading=reading,
        )

    def __len__(self) -> int:
        self.taken()
        if (length := self._length()) is not None:
            return self._shape.steps(length)
        if not self.unbounded:
            raise TypeError(f"{name_of(self._loader)} is a stream, which has no length")
        return ENDS

    def __iter__(self) -> Iterator[GlobalBatch]:
        self.taken()
        self.iterates()
        return Items(self._pass())

    def _pass(self) -> Iterator[GlobalBatch]:
        self.end()
        if not self._takes_part():
            return
        self._place = self._epoch(), -1
        self._ends.epoch, self._ends.most = -1, self._limit()
        for batch in self._steps:
            batch.ends = self._ends
            yield batch

    def _next(self) -> tuple[int, int]:
        epoch, step = self._place
        self._place = epoch, step + 1
        return self._place

    def end(self) -> None:
        """End the pass."""
        self._fetcher.end_epoch()


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
