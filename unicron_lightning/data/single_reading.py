"""Training over an iterable data set in a process without an agent, which never reads a batch again.

Batches are read as by Lightning with one device. If the number of an epoch's batches is known, from the data's length
or a limit, no batch is read before its step. Otherwise the batch after the step is read, too, to know whether the step
is the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.stream_loader import StreamLoader


class SingleReading(StreamLoader):
    """Yields the `GlobalBatch` es of an epoch of one stream. Each holds its batches, which may be used at any time.

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
