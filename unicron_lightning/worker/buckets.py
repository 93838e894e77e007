"""Flat gradient buckets: local sums that survive a failed reduction, and the hooks that tell when a bucket is whole.

torch DDP reduces in place and can be neither re-bound nor interrupted, so the reducer is our own. Each bucket has two
buffers: ``local``, to which the parameters' ``.grad`` are views while micro-batches accumulate, and ``reduced``, a copy
that is summed over the ranks and to which the ``.grad`` are views while the optimizer steps. ``local`` is untouched
until the step is committed: whatever happens to the reduction, no finished micro-batch is lost. The price is one more
buffer of the gradients' size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from unicron_lightning.errors import ConfigError


class Bucket:
    """A flat buffer to be summed over the ranks; the gradients of some parameters, or anything else per step."""

    def __init__(self, local: Tensor) -> None:
        self.local = local
        self.reduced = torch.empty_like(local)

    def renew(self) -> None:
        """Takes a new buffer for the next attempt: the library may go on writing to that of an aborted collective."""
        self.reduced = torch.empty_like(self.local)


class GradientBuckets:
    """The buckets of a model's gradients, in the order in which backward is expected to finish them.

    Args:
        parameters: those that need gradients, in the model's order, without repeats.
        bucket_bytes: size at which a bucket is closed.
        overlap: whether reductions start during backward.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], bucket_bytes: int, overlap: bool) -> None:
        named = list(parameters)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.used = [False] * len(self.parameters)
        self._overlap = overlap
        self._groups = _group(self.parameters[::-1], bucket_bytes)
        self.buckets = [_bucket_of(group) for group in self._groups]
        self._views: dict[tuple[int, bool], tuple[Tensor, list[Tensor]]] = {}
        self._pending: list[int] = []
        self._launch: Callable[[int], None] | None = None
        self._order: Sequence[int] = ()
        self._next = 0
        self._late: str | None = None
        bucket_of = {id(p): k for k, group in enumerate(self._groups) for p in group}
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(index, bucket_of[id(p)]))
            for index, p in enumerate(self.parameters)
        ]

    def matches(self, parameters: Sequence[Parameter]) -> bool:
        """Whether these are the parameters the buckets were made for."""
        return len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        )

    def begin(self) -> None:
        """Starts a step: gradients accumulate in the local buffers from zero."""
        for bucket in self.buckets:
            bucket.local.zero_()
        self.used = [False] * len(self.parameters)
        self._bind(local=True)

    def arm(self, order: Sequence[int], launch: Callable[[int], None]) -> None:
        """Until `finish`, calls ``launch(k)`` for the buckets of ``order``, in that order, as backward completes them.

        ``launch`` must not raise: an exception inside backward would leave the micro-batch half summed.
        """
        self._pending = [len(group) for group in self._groups]
        self._order, self._next, self._launch, self._late = order, 0, launch, None

    def finish(self) -> list[int]:
        """Ends `arm`. Returns the buckets of its order that were not launched.

        Raises:
            ConfigError: if a gradient was added to after its bucket had been launched.
        """
        self._launch = None
        if self._late is not None:
            raise ConfigError(
                f"the gradient of parameter {self._late!r} was added to more than once in one backward pass (reentrant "
                "activation checkpointing does that); use UnicronStrategy(overlap=False)"
            )
        return list(self._order[self._next :])

    def install(self, used: Sequence[bool], reduced: bool = True) -> None:
        """Gives the optimizer the summed gradients; parameters that no micro-batch used get None, as torch would."""
        self._bind(local=not reduced)
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if not is_used and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _bind(self, local: bool) -> None:
        for index, (group, bucket) in enumerate(zip(self._groups, self.buckets, strict=True)):
            flat = bucket.local if local else bucket.reduced
            cached = self._views.get((index, local))
            if cached is None or cached[0] is not flat:  # a buffer is renewed after an abort
                cached = self._views[index, local] = (flat, _views_of(flat, group))
            for parameter, view in zip(group, cached[1], strict=True):
                parameter.grad = view

    def _hook(self, index: int, bucket: int) -> Callable[[Tensor], None]:
        def accumulated(_: Tensor) -> None:
            self.used[index] = True
            if self._launch is not None:
                self._complete(index, bucket, self._launch)

        return accumulated

    def _complete(self, index: int, bucket: int, launch: Callable[[int], None]) -> None:
        """A parameter has its gradient: launches the buckets that are whole and next in order."""
        self._pending[bucket] -= 1
        if self._pending[bucket] < 0 and bucket in self._order[: self._next]:
            self._late = self.names[index]
            return
        while self._overlap and self._next < len(self._order) and self._pending[self._order[self._next]] == 0:
            launch(self._order[self._next])
            self._next += 1


def _bucket_of(group: Sequence[Parameter]) -> Bucket:
    size = sum(parameter.numel() for parameter in group)
    return Bucket(torch.zeros(size, dtype=group[0].dtype, device=group[0].device))


def _views_of(flat: Tensor, group: Sequence[Parameter]) -> list[Tensor]:
    views, offset = [], 0
    for parameter in group:
        views.append(flat[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
    return views


def _group(parameters: Sequence[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Cuts the parameters into runs of one dtype and device, each closed at ``bucket_bytes``."""
    groups: list[list[Parameter]] = []
    size = 0
    for parameter in parameters:
        same = groups and (groups[-1][0].dtype, groups[-1][0].device) == (parameter.dtype, parameter.device)
        if not same or size >= bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return groups
