"""Fetches micro-batches by number, with the settings of the user's data loader.

With worker processes, the micro-batches that this rank expects to compute are requested ahead, in order, over as many
steps as the loader prefetches. When the world changes, the expectation changes: already requested micro-batches that
are still needed are used, others are dropped, and unexpected ones are fetched in the training process at once. The
worker processes are not restarted for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.data import DataLoader, Dataset, get_worker_info

from unicron_lightning.data.order import DataOrder, MicroBatchId, PartOrder
from unicron_lightning.data.seeding import place_seed, preserved, seed_all
from unicron_lightning.data.sources import as_it_is

Ahead = Callable[[MicroBatchId], Iterator[MicroBatchId]]
"""Yields the places that this rank expects to need, from a given place on, in order."""


class _MicroBatchItems(Dataset[Any]):
    """The user's data set, ``users``, with whole micro-batches as items; picklable, for worker processes."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool, seed: int) -> None:
        self.users, self._collate, self._batched, self._seed = dataset, collate, batched, seed

    def __getitem__(self, request: tuple[MicroBatchId, list[int]]) -> tuple[MicroBatchId, Any]:
        place, indices = request
        seed_all(place_seed(self._seed, *place))  # makes augmentation independent of the process that performs it
        if not self._batched:
            return place, self._collate(self.users[indices[0]])
        fetch_many = getattr(self.users, "__getitems__", None)
        samples = fetch_many(indices) if fetch_many else [self.users[index] for index in indices]
        return place, self._collate(samples)


class _InitWorker:
    """Starts a worker process of a loader, which sees the user's data set, as in an ordinary loader.

    Args:
        init: the user's ``worker_init_fn``, if any.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, _MicroBatchItems)
        object.__setattr__(info, "dataset", info.dataset.users)  # it refuses assignments
        if self._init is not None:
            self._init(worker)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch has one thread, as in a loader's process: some kernels' bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Fetcher:
    """Micro-batches of one data loader.

    Args:
        loader: the user's; its workers, pinning, collate function and so on are used.
        order: of its samples.
        seed: of random augmentation.
        ahead: yields the places that this rank expects to need.
    """

    def __init__(self, loader: DataLoader[Any], order: DataOrder | PartOrder, seed: int, ahead: Ahead) -> None:
        self._order = order
        self._ahead = ahead
        self._items = _MicroBatchItems(
            loader.dataset, loader.collate_fn, batched=loader.batch_sampler is not None, seed=seed
        )
        self._start: MicroBatchId = (0, 0, 0)
        self._requested: set[MicroBatchId] = set()
        self._ready: dict[MicroBatchId, Any] = {}
        self._iterator: Iterator[tuple[MicroBatchId, Any]] | None = None
        self._loader: DataLoader[Any] | None = None
        self._threads: Callable[[], AbstractContextManager[None]] = one_thread if loader.num_workers else nullcontext
        if loader.num_workers > 0:
            self._loader = DataLoader(
                self._items,
                batch_size=None,
                sampler=_Requests(self._requests),
                collate_fn=as_it_is,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=_InitWorker(loader.worker_init_fn),
                multiprocessing_context=loader.multiprocessing_context,
                prefetch_factor=loader.prefetch_factor,
                persistent_workers=loader.persistent_workers,
            )

    def get(self, place: MicroBatchId) -> Any:
        """The collated micro-batch at ``place``."""
        if self._loader is None:
            return self._fetch_here(place)
        if self._iterator is None:
            self._start = place
            self._requested, self._ready = set(), {}
            with preserved():  # torch draws a seed for the worker processes
                self._iterator = iter(self._loader)
        while place in self._requested and place not in self._ready:
            arrived, batch = next(self._iterator)
            if arrived >= (place[0], place[1], 0):
                self._ready[arrived] = batch
            else:
                self._requested.discard(arrived)  # it is not delivered again, but may be needed after another failure
        self._requested.discard(place)
        if place in self._ready:
            return self._ready.pop(place)
        return self._fetch_here(place)

    def end_epoch(self) -> None:
        """End this epoch's requests, and the worker processes unless they are persistent."""
        self._iterator = None
        self._ready = {}

    def drop_before(self, place: MicroBatchId) -> None:
        """Drop micro-batches before ``place``, which other ranks have computed."""
        self._ready = {p: batch for p, batch in self._ready.items() if p >= place}

    def close(self) -> None:
        """Stop the worker processes."""
        self.end_epoch()
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        self._loader = None

    def _fetch_here(self, place: MicroBatchId) -> Any:
        with preserved(), self._threads():
            return self._items[(place, self._order.indices(*place))][1]

    def _requests(self) -> Iterator[tuple[MicroBatchId, list[int]]]:
        for place in self._ahead(self._start):
            self._requested.add(place)
            yield place, self._order.indices(*place)


class CombinedFetcher:
    """Micro-batches of several loaders.

    Args:
        orders: of the loaders' parts.
        fetchers: of the loaders.
        structure: of the loaders, and thus of a batch.
    """

    def __init__(self, orders: Sequence[PartOrder], fetchers: Sequence[Fetcher], structure: TreeSpec) -> None:
        self._orders = orders
        self._fetchers = fetchers
        self._structure = structure

    def get(self, place: MicroBatchId) -> Any:
        """The collated micro-batch at ``place``; None for a loader that has ended."""
        pairs = zip(self._orders, self._fetchers, strict=True)
        batches = [fetcher.get(place) if own.has(place) else None for own, fetcher in pairs]
        return tree_unflatten(batches, self._structure)

    def drop_before(self, place: MicroBatchId) -> None:
        """Drop micro-batches before ``place``."""
        for fetcher in self._fetchers:
            fetcher.drop_before(place)

    def end_epoch(self) -> None:
        """End this epoch's requests."""
        for fetcher in self._fetchers:
            fetcher.end_epoch()

    def close(self) -> None:
        """Stop the worker processes."""
        for fetcher in self._fetchers:
            fetcher.close()


MakeFetcher = Callable[[Ahead], Fetcher | CombinedFetcher]
"""Given the places that this rank expects to need, makes what fetches micro-batches."""


class _Requests:
    """A sampler that determines the next request when the loader asks for it, and thus follows the present world."""

    def __init__(self, requests: Callable[[], Iterator[Any]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        return self._requests()
