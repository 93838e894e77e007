"""Streams: iterable data sets in training, as one stream for each device of the declared world.

Stream ``d`` of ``W`` yields what device ``d`` would read under Lightning's ``ddp``: while it is read,
`torch.distributed.get_rank` and ``get_world_size``, the trainer's properties and the variables RANK and WORLD_SIZE are
``d`` and ``W``, whichever worker reads it. With Megatron's parallelism a device is a replica here. The stream's random
state belongs to it. So any worker can open a stream again and skip to the batch that a dead rank was computing, if the
data set repeats itself, which `Streams.check` examines.

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
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from unicron_lightning.data.order import StepShape, is_stateful
from unicron_lightning.data.seeding import (
    RandomPurpose,
    place_seed,
    preserved,
    random_states,
    restore_random_states,
    seed_all,
)
from unicron_lightning.data.sources import name_of, same
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.worker import codec

logger = logging.getLogger(__name__)

ENDS: Final = 1 << 39
"""Numbers from here on report ends of streams in evaluations, those below report batches."""
STATE_STEPS = 50
"""Steps between two states of a stream that all ranks keep, and thus the most that is skipped when it is opened."""
_ANOTHER: Final = "another batch follows after load_state_dict"
SeenAs = Callable[[int], AbstractContextManager[None]]
"""A context in which this process has the rank of a device of the declared world."""


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Inside, the variables of torchrun have another rank and world, also for processes that are started there."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{size}")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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


class _AsDevice:
    """Starts a loader's worker process, which has a device's rank; picklable.

    Args:
        device, devices: rank and size of the declared world.
        init: the user's ``worker_init_fn``, or Lightning's.
    """

    def __init__(self, device: int, devices: int, init: Callable[[int], None] | None) -> None:
        self._device, self._devices = device, devices
        lightnings = getattr(sys.modules.get("lightning.fabric.utilities.seed"), "pl_worker_init_function", None)
        if lightnings is not None and isinstance(init, functools.partial) and init.func is lightnings:
            init = functools.partial(lightnings, rank=device)
        self._init = init

    def __call__(self, worker: int) -> None:
        os.environ.update(RANK=str(self._device), WORLD_SIZE=str(self._devices))
        if self._init is not None:
            self._init(worker)


class StreamReader:
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

    def read_or_none(self) -> Any:
        """Return the next batch, or None at the end."""
        try:
            return self.read()
        except StopIteration:
            return None

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
        end_workers(iterator)


def end_workers(iterator: object) -> None:
    """End the worker processes of a loader's iterator, if it has some."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


class StreamOpener:
    """Opens the streams of one data loader.

    Args:
        loader: the user's, over an iterable data set.
        devices: of the declared world: the number of streams.
        seed: of the streams' random state: the same for all, as under ddp.
        seen_as: gives this process a device's rank.
        once: whether no stream is opened twice, so that it need not repeat itself.

    Attributes:
        name: of the class that the user gave.
        loader, once: as above.
        stateful: whether streams are opened with torchdata's loader, so that they have states.
    """

    def __init__(
        self, loader: DataLoader[Any], devices: int, seed: int, seen_as: SeenAs, *, once: bool = False
    ) -> None:
        self.name = name_of(loader)
        self.loader = loader
        self.once = once
        self.stateful = is_stateful(loader)
        self._devices = devices
        self._seed = seed
        self._seen_as = seen_as

    def parts(self, batch: Any) -> dict[str, Any]:
        """Return the batches of the loaders that a batch consists of, by name: of one loader, the batch itself."""
        return {self.name: batch}

    def length(self) -> int | None:
        """Return the number of batches of a stream; None if it is known only at the end, as that of several devices."""
        return _length_of(self.loader) if self.once else None

    def expected(self) -> int | None:
        """Return the number of batches of the longest stream, if the data states it: nothing relies on that."""
        lengths: list[int | None] = []
        for device in range(self._devices):
            with self._seen_as(device):
                lengths.append(_length_of(self.loader))
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def check(self) -> Any:
        """Return the first batch of the first stream, after reading it twice at the same time; None if there is none.

        Streams that are read once are not checked: None.

        Raises:
            ConfigError: the data set does not repeat itself.
        """
        if self.once:
            return None
        one, other = self.open(0, 0, workers=0), self.open(0, 0, workers=0)
        batches = [[reader.read_or_none() for reader in (one, other)] for _ in range(2)]
        if not all(same(first, second) for first, second in batches):
            raise ConfigError(
                f"{self.name} does not repeat itself: two iterators yield different "
                "samples, so that a lost rank's could not be read again. Return a new, independent iterator from "
                "__iter__, and take random numbers from Python, NumPy or torch's default generators, or from one that "
                "is made and seeded in __iter__"
            )
        return batches[0][0]

    def open(
        self, epoch: int, stream: int, start: StreamState | None = None, *, workers: int | None = None
    ) -> StreamReader:
        """Open a stream.

        Args:
            epoch: of its random state.
            stream: its number.
            start: where to begin; by default at the stream's beginning.
            workers: number of worker processes, if not the loader's.
        """
        seed = place_seed(self._seed, RandomPurpose.STREAM, epoch)
        return StreamReader(
            self.loader_of(epoch, stream, workers), functools.partial(self._seen_as, stream), seed, start
        )

    def loader_of(self, epoch: int, stream: int, workers: int | None = None) -> Any:
        """Return what a stream is read with: an iterable with ``num_workers``."""
        own, several = self.loader, dict[str, Any]()
        make: Any = DataLoader
        dataset = copy.deepcopy(own.dataset) if is_stateful(own) else own.dataset  # it may hold an iterator's state
        if self.stateful:
            make = type(own)
            several["snapshot_every_n_steps"] = own.snapshot_every_n_steps  # type: ignore[attr-defined]
        several |= settings_of(own, stream, self._devices, workers)
        return make(dataset, batch_size=own.batch_size, drop_last=own.drop_last, **several)


def settings_of(loader: DataLoader[Any], device: int, devices: int, workers: int | None = None) -> dict[str, Any]:
    """Return a loader's settings other than those of batches, for a loader that reads as a device.

    Args:
        loader: the user's.
        device: its rank in the declared world.
        devices: of the declared world.
        workers: number of worker processes, if not the loader's.
    """
    workers = loader.num_workers if workers is None else workers
    settings: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": workers,
        "pin_memory": loader.pin_memory,
    }
    if workers > 0:
        settings |= {
            "timeout": loader.timeout,
            "worker_init_fn": _AsDevice(device, devices, loader.worker_init_fn),
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
        }
    return settings


class StreamEnds:
    """Lengths and states of the present epoch's streams, as far as they are known; equal on all ranks after each
    commit.

    Attributes:
        epoch: the epoch; -1 before the first.
        most: largest number of batches of each stream, beside the known ends.
        known: number of batches by stream, agreed.
        found: the same, seen by this worker, while the other ranks may not know it.
        states: the newest state by stream, agreed.
        taken: the same, of this worker's streams.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.most = math.inf
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
        """Return this worker's report to the other ranks, as plain data; None for nothing."""
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
            if number < min(self.most, self.known.get(stream, math.inf))
        ]


class Streams:
    """The streams of one data loader in training.

    Args:
        opener: opens them.
        shape: of the steps.
        ends: receives the ends that are found.
        one_size: refuse batches that differ from the first one in their number of samples.
        sets_epoch: set the epoch of the data set when one begins.

    Attributes:
        opener, shape, ends: as above.
    """

    def __init__(
        self,
        opener: StreamOpener,
        shape: StepShape,
        ends: StreamEnds,
        *,
        one_size: bool = False,
        sets_epoch: bool = True,
    ) -> None:
        self.opener = opener
        self._one_size = one_size
        self._sets_epoch = sets_epoch
        self.shape = shape
        self._shape = shape.of(0)
        self.ends = ends
        self._epoch: int | None = None
        self._step = 0
        self._open: dict[int, StreamReader] = {}
        self._held: dict[tuple[int, int], Any] = {}
        self._first_batch: Any = None
        """As read by `check`; training uses copies of it."""

    def get(self, epoch: int, stream: int, number: int) -> Any:
        """Return a batch of a stream; it is kept to the end of the step.

        Raises:
            StreamChanged: the stream ends before it.
            ConfigError: it has another size than the first batch.
        """
        if not self._read_to(epoch, stream, number):
            raise StreamChanged(
                f"{self.opener.name}: stream {stream} of {self._shape.devices} ends after "
                f"{self.ends.found.get(stream, number)} batches in epoch {epoch}, but batch {number} existed when it "
                "was read before: expected a data set that yields the same samples each time"
            )
        return self._held[stream, number]

    def stand_in(self, epoch: int, stream: int, number: int) -> Any:
        """Return a batch for a computation that does not count: a copy of the one that `check` has read, so that no
        stream is opened for it; without one, the batch of a place.
        """
        if self._first_batch is None:
            return self.get(epoch, stream, number)
        return copy.deepcopy(self._first_batch)

    def look(self, epoch: int, step: int, streams: Sequence[int], ahead: int = 0) -> None:
        """Read all batches of a step that streams have, and ``ahead`` ones after it; note which streams end before."""
        rounds = self.shape.of(epoch).accumulation
        last = int(min((step + 1) * rounds + ahead, self.ends.most)) - 1
        for stream in streams if last >= step * rounds else ():
            self._read_to(epoch, stream, last)

    def begin_step(self, epoch: int, step: int) -> None:
        """Drop batches of earlier steps, and streams that the last step did not need."""
        self._begin_epoch(epoch)
        self._step = step
        self._held = {place: batch for place, batch in self._held.items() if place[1] >= self._start}
        for stream in [stream for stream, reader in self._open.items() if reader.used < step - 1]:
            self._open.pop(stream).close()

    def end_epoch(self) -> None:
        """Close all streams, and end their worker processes."""
        for reader in self._open.values():
            reader.close()
        self._open, self._held, self._epoch = {}, {}, None

    close = end_epoch

    def check(self) -> Any:
        """Return `StreamOpener.check`, and examine the states, if there are any."""
        self._first_batch = first = self.opener.check()
        self.opener.stateful = self.opener.stateful and (self.opener.once or self._continues())
        return first

    def _continues(self) -> bool:
        """Whether the first stream continues with its second batch from the state before it."""
        opened = [self.opener.open(0, 0)]
        reason = ""
        try:
            opened[0].read_or_none()
            opened.append(self.opener.open(0, 0, StreamState(1, opened[0].state(), "")))
            one, other = (reader.read_or_none() for reader in opened)
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
        logger.warning("stream_states_unused dataset=%s reason=%s", self.opener.name, reason)

    @property
    def _start(self) -> int:
        """Number of the step's first batch in each stream."""
        return self._step * self._shape.accumulation

    def _begin_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self.end_epoch()
        self._epoch, self._step, self._shape = epoch, 0, self.shape.of(epoch)
        set_epoch = getattr(self.opener.loader.dataset, "set_epoch", None)
        if set_epoch is not None and self._sets_epoch:
            set_epoch(epoch)

    def _read_to(self, epoch: int, stream: int, number: int) -> bool:
        """Read a stream up to a batch; return whether it has it."""
        self._begin_epoch(epoch)
        reader = self._open.get(stream)
        if (stream, number) in self._held:
            if reader is not None:
                reader.used = self._step
            return True
        if number >= self.ends.known.get(stream, self.ends.found.get(stream, number + 1)):
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
                self.ends.found[stream] = reader.next
                return False
            self._check_size(batch, *place)
            if state is not None:
                self.ends.taken[stream] = StreamState(place[1], state, _digest(batch))
            if place[1] >= self._start:
                self._held[place] = batch
        return (stream, number) in self._held

    def _check_size(self, batch: Any, stream: int, number: int) -> None:
        if not self._one_size or self._first_batch is None:
            return
        first = self.opener.parts(self._first_batch)
        for name, part in self.opener.parts(batch).items():
            size, wanted = size_of(part), size_of(first.get(name))
            if wanted is not None and size != wanted:
                raise ConfigError(
                    f"{name}: batch {number} of stream {stream} has {size} samples, the first batch has "
                    f"{wanted}; pipeline stages exchange tensors of one shape: expected batches of one size, as with "
                    "DataLoader(batch_size=..., drop_last=True)"
                )

    def _opened(self, epoch: int, stream: int, number: int) -> StreamReader:
        """Open a stream to read a batch: at the newest state before it, if the same batch follows as at first."""
        state = self.ends.states.get(stream)
        if state is None or state.number > number or not self.opener.stateful:
            return self.opener.open(epoch, stream)
        reader = self.opener.open(epoch, stream, state)
        batch = reader.read_or_none()
        if _digest(batch) == state.digest:
            if state.number >= self._start:
                self._held[stream, state.number] = batch
            return reader
        reader.close()
        self.opener.stateful = False
        self._warn(f"{_ANOTHER}, before batch {state.number} of stream {stream}")
        return self.opener.open(epoch, stream)

    def _due_state(self, stream: int, reader: StreamReader) -> bytes | None:
        """Return a reader's state if the ranks are to keep it."""
        number, known = reader.next, self.ends.states.get(stream)
        if not self.opener.stateful or number == 0 or number % (STATE_STEPS * self._shape.accumulation):
            return None
        if known is not None and number <= known.number:
            return None
        try:
            return reader.state()
        except (codec.NotPlainData, NotImplementedError) as error:  # known from `check`, unless streams are read once
            self.opener.stateful = False
            self._warn(str(error))
            return None


def _plain(states: Mapping[int, StreamState]) -> dict[int, tuple[int, bytes, str]]:
    return {stream: (state.number, state.data, state.digest) for stream, state in states.items()}


def size_of(batch: Any) -> int | None:
    """Return the size of a batch's first tensor along its first dimension; None without one."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next((len(tensor) for tensor in tensors), None)


def _digest(batch: Any) -> str:
    """Return the digest of a batch.

    Raises:
        NotPlainData: it has anything else than plain data and tensors.
    """
    return hashlib.sha256(codec.encode(batch)).hexdigest()


def _length_of(loader: DataLoader[Any]) -> int | None:
    """Return the length of a loader; None if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
