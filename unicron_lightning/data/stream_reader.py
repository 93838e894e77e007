"""Opens a stream of an iterable data set: what one device of the declared world reads, in any process."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from unicron_lightning.data.order import is_stateful
from unicron_lightning.data.seeding import place_seed, preserved, random_states, restore_random_states, seed_all
from unicron_lightning.data.sources import name_of, same
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.worker import codec

STREAM: Final = 2
"""Distinguishes the random state of streams from that of fetching and computing."""
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
        return sized_len(self.loader) if self.once else None

    def expected(self) -> int | None:
        """Return the number of batches of the longest stream, if the data states it: nothing relies on that."""
        lengths: list[int | None] = []
        for device in range(self._devices):
            with self._seen_as(device):
                lengths.append(sized_len(self.loader))
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
        seed = place_seed(self._seed, STREAM, epoch)
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
