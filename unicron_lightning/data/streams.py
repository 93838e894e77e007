"""Streams: iterable data sets in training, as one stream for each device of the declared world.

Stream ``d`` of ``W`` yields what device ``d`` would read under Lightning's ``ddp``: while it is read,
`torch.distributed.get_rank` and ``get_world_size``, the trainer's properties and the variables RANK and WORLD_SIZE are
``d`` and ``W``, whichever worker reads it. Its random state belongs to it. So any worker can open a stream again and
skip to the batch that a dead rank was computing, if the data set repeats itself, which `Streams.check` examines.

Lengths are unknown. A worker reads one step ahead in the streams of its micro-batches, after it has computed them; an
end that it finds travels with the commit (`StreamEnds`), so that all ranks know the composition of the next step. If
the loader is torchdata's ``StatefulDataLoader``, its state travels in the same way every `STATE_STEPS` steps, and a
stream that is opened again begins there.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from unicron_lightning.data.order import StepShape, is_stateful
from unicron_lightning.data.seeding import place_seed, preserved, random_states, restore_random_states, seed_all
from unicron_lightning.data.sources import name_of, same
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.worker import codec

logger = logging.getLogger(__name__)

STREAM: Final = 2
"""Distinguishes the random state of streams from that of fetching and computing."""
STATE_STEPS = 50
"""Steps between two states of a stream that all ranks keep, and thus the most that is skipped when it is opened."""
_ANOTHER: Final = "another batch follows after load_state_dict"
SeenAs = Callable[[int], AbstractContextManager[None]]
"""A context in which this process has the rank of a device of the declared world."""


class StreamChanged(UnicronError):
    """A stream that was opened again has fewer batches than before."""


@dataclass(frozen=True)
class StreamState:
    """State of a stream before one of its batches.

    Attributes:
        number: of the batch.
        data: encoded state of loader and random numbers.
        digest: of the batch.
    """

    number: int
    data: bytes
    digest: str


class StreamEnds:
    """Lengths and states of the present epoch's streams, as far as they are known; equal on all ranks after each
    commit.

    Attributes:
        epoch: the epoch; -1 before the first.
        known: number of batches by stream, agreed.
        found: the same, seen by this worker, while the other ranks may not know it.
        states: the newest state by stream, agreed.
        taken: the same, of this worker's streams.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.known: dict[int, int] = {}
        self.found: dict[int, int] = {}
        self.states: dict[int, StreamState] = {}
        self.taken: dict[int, StreamState] = {}

    def begin(self, epoch: int, ends: Mapping[int, int]) -> None:
        """Begin an epoch with the ends that all ranks have found in its first step."""
        if epoch != self.epoch:
            self.states = {}
        self.epoch, self.known, self.found, self.taken = epoch, dict(ends), {}, {}

    def news(self) -> dict[str, Any] | None:
        """Return what this worker has to tell the other ranks, as plain data; None for nothing."""
        if not self.found and not self.taken:
            return None
        return {"ends": self.found, "states": _plain(self.taken)}

    def agree(self, news: Sequence[Mapping[str, Any]]) -> None:
        """Add what a commit has made known to all ranks."""
        for each in news:
            self.known.update(each["ends"])
            for stream, state in each["states"].items():
                if stream not in self.states or state[0] > self.states[stream].number:
                    self.states[stream] = StreamState(*state)
        self.found, self.taken = {}, {}

    def state(self) -> dict[str, Any]:
        """Return what a joiner has to know."""
        return {"epoch": self.epoch, "known": self.known, "states": _plain(self.states)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take the members' knowledge."""
        self.begin(state["epoch"], state["known"])
        states = state.get("states", {})  # not in checkpoints of earlier versions
        self.states = {stream: StreamState(*values) for stream, values in states.items()}

    def places(self, step: int, shape: StepShape) -> list[tuple[int, int]]:
        """Return (stream, number of the batch in it) of a step's micro-batches, by their numbers.

        In each round every stream has one, unless it has ended.
        """
        numbers = range(step * shape.accumulation, (step + 1) * shape.accumulation)
        return [
            (stream, number)
            for number in numbers
            for stream in range(shape.devices)
            if number < self.known.get(stream, number + 1)
        ]


class _AsDevice:
    """Starts a loader's worker process, which has a device's rank; picklable.

    Args:
        device, devices: rank and size of the declared world.
        init: the user's ``worker_init_fn``, or Lightning's.
    """

    def __init__(self, device: int, devices: int, init: Callable[[int], None] | None) -> None:
        self._device, self._devices = device, devices
        if isinstance(init, functools.partial) and init.func is pl_worker_init_function:
            init = functools.partial(pl_worker_init_function, rank=device)
        self._init = init

    def __call__(self, worker: int) -> None:
        os.environ.update(RANK=str(self._device), WORLD_SIZE=str(self._devices))
        if self._init is not None:
            self._init(worker)


class _Reader:
    """One open stream.

    Args:
        loader: made for this stream.
        seen_as: context with the stream's rank.
        seed: of the stream's random state.
        start: where to begin; by default at the stream's beginning.

    Attributes:
        next: number of the next batch.
        used: the last step that needed the stream.
    """

    def __init__(
        self,
        loader: Any,
        seen_as: Callable[[], AbstractContextManager[None]],
        seed: int,
        start: StreamState | None = None,
    ) -> None:
        self.next, state = (0, None) if start is None else (start.number, codec.decode(start.data))
        self.used = 0
        self._loader = loader
        self._seen_as = seen_as
        self._in_process = loader.num_workers == 0
        with preserved(), seen_as():
            seed_all(seed)
            if state is not None:
                self._loader.load_state_dict(state["loader"])
            self._iterator: Iterator[Any] | None = iter(self._loader)
            self._random = random_states(cuda=False) if state is None else state["random"]

    def read(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the stream has ended.
        """
        assert self._iterator is not None
        if not self._in_process:
            batch = next(self._iterator)
        else:
            with preserved(), self._seen_as():
                restore_random_states(self._random)
                batch = next(self._iterator)
                self._random = random_states(cuda=False)
        self.next += 1
        return batch

    def state(self) -> bytes:
        """Return the state before the next batch, of a ``StatefulDataLoader``.

        Raises:
            NotPlainData: the data set's state is none that can be sent.
        """
        with preserved(), self._seen_as():
            return codec.encode({"loader": self._loader.state_dict(), "random": self._random})

    def close(self) -> None:
        """End the stream's worker processes."""
        iterator, self._iterator = self._iterator, None
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


class Streams:
    """The streams of one data loader.

    Args:
        loader: the user's, over an iterable data set.
        shape: of the steps.
        seed: of the streams' random state: the same for all, as under ddp.
        ends: receives the ends that are found.
        seen_as: gives this process a device's rank.
    """

    def __init__(self, loader: DataLoader[Any], shape: StepShape, seed: int, ends: StreamEnds, seen_as: SeenAs) -> None:
        self._loader = loader
        self._declared = shape
        self._shape = shape.of(0)
        self._seed = seed
        self._ends = ends
        self._seen_as = seen_as
        self._epoch: int | None = None
        self._step = 0
        self._open: dict[int, _Reader] = {}
        self._held: dict[tuple[int, int], Any] = {}
        self._has_states = is_stateful(loader)

    def get(self, epoch: int, stream: int, number: int) -> Any:
        """Return a batch of a stream; it is kept to the end of the step.

        Raises:
            StreamChanged: the stream ends before it.
        """
        if not self._read_to(epoch, stream, number):
            raise StreamChanged(
                f"{name_of(self._loader)}: stream {stream} of {self._shape.devices} ends after "
                f"{self._ends.found.get(stream, number)} batches in epoch {epoch}, but batch {number} existed when it "
                "was read before: expected a data set that yields the same samples each time"
            )
        return self._held[stream, number]

    def look(self, epoch: int, step: int, streams: Sequence[int]) -> None:
        """Read all batches of a step that streams have, and note which of them end before."""
        for stream in streams:
            self._read_to(epoch, stream, (step + 1) * self._declared.of(epoch).accumulation - 1)

    def begin_step(self, epoch: int, step: int) -> None:
        """Drop batches of earlier steps, and streams that the last step did not need."""
        self._begin_epoch(epoch)
        self._step = step
        self._held = {place: batch for place, batch in self._held.items() if place[1] >= self._first}
        for stream in [stream for stream, reader in self._open.items() if reader.used < step - 1]:
            self._open.pop(stream).close()

    def end_epoch(self) -> None:
        """Close all streams, and end their worker processes."""
        for reader in self._open.values():
            reader.close()
        self._open, self._held, self._epoch = {}, {}, None

    close = end_epoch

    def check(self) -> Any:
        """Return the first batch of the first stream, after reading it twice at the same time.

        Raises:
            ConfigError: the data set does not repeat itself.
        """
        one, other = self._reader(0, 0, workers=0), self._reader(0, 0, workers=0)
        batches = [[_next(reader) for reader in (one, other)] for _ in range(2)]
        if not all(same(first, second) for first, second in batches):
            raise ConfigError(
                f"{name_of(self._loader)} does not repeat itself: two iterators yield different "
                "samples, so that a lost rank's could not be read again. Return a new, independent iterator from "
                "__iter__, and take random numbers from Python, NumPy or torch's default generators, or from one that "
                "is made and seeded in __iter__"
            )
        self._has_states = self._has_states and self._continues()
        return batches[0][0]

    def _continues(self) -> bool:
        """Whether the first stream continues with its second batch from the state before it."""
        workers = self._loader.num_workers
        opened = [self._reader(0, 0, workers)]
        reason = ""
        try:
            _next(opened[0])
            opened.append(self._reader(0, 0, workers, StreamState(1, opened[0].state(), "")))
            one, other = map(_next, opened)
            if _digest(one) != _digest(other):
                reason = _ANOTHER
        except (codec.NotPlainData, NotImplementedError) as error:
            reason = str(error)
        for reader in opened:
            reader.close()
        if reason:
            self._warn(reason)
        return not reason

    def _warn(self, reason: str) -> None:
        logger.warning("stream_states_unused dataset=%s reason=%s", name_of(self._loader), reason)

    @property
    def _first(self) -> int:
        """Number of the step's first batch in each stream."""
        return self._step * self._shape.accumulation

    def _begin_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self.end_epoch()
        self._epoch, self._step, self._shape = epoch, 0, self._declared.of(epoch)
        set_epoch = getattr(self._loader.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def _read_to(self, epoch: int, stream: int, number: int) -> bool:
        """Read a stream up to a batch; return whether it has it."""
        self._begin_epoch(epoch)
        reader = self._open.get(stream)
        if (stream, number) in self._held:
            if reader is not None:
                reader.used = self._step
            return True
        if number >= self._ends.known.get(stream, self._ends.found.get(stream, number + 1)):
            return False
        if reader is None or reader.next > number:
            if reader is not None:
                reader.close()
            reader = self._open[stream] = self._opened(epoch, stream, number)
        reader.used = self._step
        while reader.next <= number:
            place = stream, reader.next
            state = self._due_state(stream, reader)
            try:
                batch = reader.read()
            except StopIteration:
                self._ends.found[stream] = reader.next
                return False
            if state is not None:
                self._ends.taken[stream] = StreamState(place[1], state, _digest(batch))
            if place[1] >= self._first:
                self._held[place] = batch
        return (stream, number) in self._held

    def _opened(self, epoch: int, stream: int, number: int) -> _Reader:
        """Open a stream to read a batch: at the newest state before it, if the same batch follows as at first."""
        workers, state = self._loader.num_workers, self._ends.states.get(stream)
        if state is None or state.number > number or not self._has_states:
            return self._reader(epoch, stream, workers)
        reader = self._reader(epoch, stream, workers, state)
        batch = _next(reader)
        if _digest(batch) == state.digest:
            if state.number >= self._first:
                self._held[stream, state.number] = batch
            return reader
        reader.close()
        self._has_states = False
        self._warn(f"{_ANOTHER}, before batch {state.number} of stream {stream}")
        return self._reader(epoch, stream, workers)

    def _due_state(self, stream: int, reader: _Reader) -> bytes | None:
        """Return a reader's state if the ranks are to keep it."""
        number, known = reader.next, self._ends.states.get(stream)
        if not self._has_states or number == 0 or number % (STATE_STEPS * self._shape.accumulation):
            return None
        return reader.state() if known is None or number > known.number else None

    def _reader(self, epoch: int, stream: int, workers: int, start: StreamState | None = None) -> _Reader:
        own, devices = self._loader, self._shape.devices
        several: dict[str, Any] = {}
        make: Any = DataLoader
        dataset = own.dataset
        if self._has_states:
            make, dataset = type(own), copy.deepcopy(dataset)  # the data set holds the state of one iterator
            several["snapshot_every_n_steps"] = own.snapshot_every_n_steps  # type: ignore[attr-defined]
        if workers > 0:
            several |= {
                "timeout": own.timeout,
                "worker_init_fn": _AsDevice(stream, devices, own.worker_init_fn),
                "multiprocessing_context": own.multiprocessing_context,
                "prefetch_factor": own.prefetch_factor,
            }
        loader: DataLoader[Any] = make(
            dataset,
            batch_size=own.batch_size,
            drop_last=own.drop_last,
            collate_fn=own.collate_fn,
            num_workers=workers,
            pin_memory=own.pin_memory,
            **several,
        )
        seed = place_seed(self._seed, STREAM, epoch)
        return _Reader(loader, functools.partial(self._seen_as, stream), seed, start)


def _plain(states: Mapping[int, StreamState]) -> dict[int, tuple[int, bytes, str]]:
    return {stream: (state.number, state.data, state.digest) for stream, state in states.items()}


def _digest(batch: Any) -> str:
    """Return the digest of a batch.

    Raises:
        NotPlainData: it has anything else than plain data and tensors.
    """
    return hashlib.sha256(codec.encode(batch)).hexdigest()


def _next(reader: _Reader) -> Any:
    """Return the next batch, or None at the end."""
    try:
        return reader.read()
    except StopIteration:
        return None
