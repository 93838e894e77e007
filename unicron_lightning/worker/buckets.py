"""Gradient buckets: local sums that survive a failed reduction, and hooks that detect complete buckets.

torch DDP reduces in place and can be neither re-bound nor interrupted, so this package has its own reducer. While
micro-batches accumulate, each parameter's ``.grad`` holds this rank's sum, as in plain training; autograd stores the
first gradient without a copy. For the reduction the gradients are copied into the bucket's flat buffer ``reduced``,
which is summed over the ranks; each ``.grad`` is a view into it while the optimizer steps. The local sums are unchanged
until the step is committed: a failed reduction loses no finished micro-batch. The cost is one additional buffer of the
gradients' size.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from unicron_lightning.copying import OfProcess
from unicron_lightning.errors import ConfigError

_FIRST_BUCKET_BYTES: Final = 1 << 20


class Bucket(ABC):
    """A flat buffer to be summed over the ranks: ``reduced``, loaded with this rank's part before each attempt."""

    def __init__(self, reduced: Tensor) -> None:
        self.reduced = reduced

    @abstractmethod
    def load(self) -> None:
        """Copy this rank's part into ``reduced``."""

    def renew(self) -> None:
        """Allocate a new buffer for the next attempt, since the library may still write to that of an aborted
        collective.
        """
        self.reduced = torch.empty_like(self.reduced)


class FlatBucket(Bucket):
    """A bucket for any sum of a step; this rank's part is in ``local``."""

    def __init__(self, local: Tensor) -> None:
        super().__init__(torch.empty_like(local))
        self.local = local

    def load(self) -> None:
        self.reduced.copy_(self.local)


class GradientBucket(Bucket):
    """The gradients of some parameters with the same dtype and device."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        size = sum(parameter.numel() for parameter in parameters)
        super().__init__(torch.empty(size, dtype=parameters[0].dtype, device=parameters[0].device))
        self._parameters = parameters
        self._views = _views_of(self.reduced, parameters)

    def load(self) -> None:
        targets, sources = [], []
        for view, parameter in zip(self._views, self._parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def renew(self) -> None:
        super().renew()
        self._views = _views_of(self.reduced, self._parameters)

    def yield_kept(self) -> None:
        """Use other memory if something, such as an optimizer, has kept gradients of the step before."""
        if max(_references(self._views), default=0) > _OWN_REFERENCES or is_kept(self.reduced, self._views):
            self.renew()

    def views(self) -> Iterable[tuple[Parameter, Tensor]]:
        """The parameters with their summed gradients, parts of ``reduced``."""
        return zip(self._parameters, self._views, strict=True)

    def bind(self) -> None:
        """Make the parameters' gradients views of ``reduced``."""
        for parameter, view in self.views():
            parameter.grad = view


def _references(views: Sequence[Tensor]) -> list[int]:
    return [sys.getrefcount(view) for view in views]


_OWN_REFERENCES: Final = max(_references([torch.empty(0)]))
"""To a view that only its list has; Python's versions count differently."""


def is_kept(flat: Tensor, views: Sequence[Tensor] = ()) -> bool:
    """Whether further tensors than these have the memory of one, as far as torch reports it."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(flat.untyped_storage()._cdata) > len(views) + 2


class GradientBuckets(OfProcess):
    """The buckets of a model's gradients, in the order in which backward is expected to finish them.

    Args:
        parameters: those that need gradients, in the model's order, without repeats.
        bucket_bytes: size at which a bucket is closed.
        overlap: whether reductions start during backward.

    Attributes:
        names, parameters: as above.
        kind: class of the buckets.
        buckets: of the parameters.
        refusal: message of the `ConfigError` that a backward raises now; empty: none is raised.
    """

    kind: ClassVar[type[GradientBucket]] = GradientBucket

    def __init__(self, parameters: Iterable[tuple[str, Parameter]], bucket_bytes: int, overlap: bool) -> None:
        named = list(parameters)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.refusal = ""
        self._overlap = overlap
        self._groups = _group(self.parameters[::-1], bucket_bytes)
        self.buckets = [self.kind(group) for group in self._groups]
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
        """Whether the buckets were made for these parameters."""
        return len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        )

    @property
    def used(self) -> list[bool]:
        """Between `begin` and `install`: whether each parameter has a gradient here, in the order of ``parameters``."""
        return [parameter.grad is not None for parameter in self.parameters]

    def begin(self) -> None:
        """Start a step: discard all gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self.buckets:
            bucket.yield_kept()

    def take(self) -> None:
        """End a micro-batch: add its gradients to the sums, unless autograd does."""

    @contextmanager
    def apart(self, *, adds: bool) -> Iterator[None]:
        """Inside, gradients begin without those before.

        Args:
            adds: whether they are added at the end, with the bits that autograd would have made, or discarded. After an
                exception they are discarded.
        """
        held = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            self._put_back(held, adds=False)
            raise
        self._put_back(held, adds=adds)

    def _put_back(self, held: Sequence[Tensor | None], *, adds: bool) -> None:
        for parameter, before in zip(self.parameters, held, strict=True):
            now = parameter.grad if adds else None
            if before is None or now is None:
                parameter.grad = now if before is None else before
            elif before.is_sparse:
                parameter.grad = now + before
            else:
                parameter.grad = before.add_(now)

    def present(self) -> dict[str, Tensor]:
        """Return the gradients that the parameters have at present, by name."""
        found = {name: p.grad for name, p in zip(self.names, self.parameters, strict=True) if p.grad is not None}
        return {name: each.to_dense() if each.is_sparse else each for name, each in found.items()}

    def arm(self, order: Sequence[int], launch: Callable[[int], None]) -> None:
        """Until `finish`, call ``launch(k)`` for the buckets of ``order``, in that order, as backward completes them.

        ``launch`` must not raise: an exception inside backward would leave the micro-batch half summed.
        """
        self._pending = [len(group) for group in self._groups]
        self._order, self._next, self._launch, self._late = order, 0, launch, None

    def finish(self) -> list[int]:
        """End `arm` and return the buckets of its order that were not launched.

        Raises:
            ConfigError: a gradient was added to after its bucket had been launched.
        """
        self._launch = None
        if self._late is not None:
            raise ConfigError(
                f"the gradient of parameter {self._late!r} was added to more than once in one backward pass (as "
                "reentrant activation checkpointing does); use UnicronStrategy(overlap=False)"
            )
        return list(self._order[self._next :])

    def install(self, used: Sequence[bool]) -> None:
        """Give the optimizer the summed gradients; parameters that no micro-batch used get None, as in torch."""
        for bucket in self.buckets:
            bucket.bind()
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if not is_used and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def summed(self, used: Sequence[bool]) -> dict[Parameter, Tensor]:
        """Return the summed gradients of the used parameters, as views that the next reduction overwrites."""
        views = {id(p): view for bucket in self.buckets for p, view in bucket.views()}
        found = [(p, views[id(p)], is_used) for p, is_used in zip(self.parameters, used, strict=True)]
        return {p: view for p, view, is_used in found if is_used or bool(view.any())}

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, index: int, bucket: int) -> Callable[[Tensor], None]:
        def accumulated(_: Tensor) -> None:
            if self.refusal:
                raise ConfigError(self.refusal)
            if self._launch is not None:
                self._complete(index, bucket, self._launch)

        return accumulated

    def _complete(self, index: int, bucket: int, launch: Callable[[int], None]) -> None:
        """Record that a parameter has its gradient; launch the buckets that are complete and next in order."""
        self._pending[bucket] -= 1
        if self._pending[bucket] < 0 and bucket in self._order[: self._next]:
            self._late = self.names[index]
            return
        while self._overlap and self._next < len(self._order) and self._pending[self._order[self._next]] == 0:
            launch(self._order[self._next])
            self._next += 1


class TrainedParameters:
    """The parameters of a model that need gradients.

    Modules are walked through again when the optimizers have other parameters, or on request. A change in whether a
    known parameter needs a gradient is always detected.
    """

    def __init__(self) -> None:
        self._named: list[tuple[str, Parameter]] = []
        self._optimized: list[int] = []

    def find(self, module: nn.Module, optimizers: Sequence[Optimizer], *, anew: bool) -> list[tuple[str, Parameter]]:
        """Return names and parameters, in the model's order, without repeats."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        optimized = [id(parameter) for group in groups for parameter in group["params"]]
        if anew or optimized != self._optimized:
            self._named, self._optimized = list(module.named_parameters()), optimized
        return [(name, parameter) for name, parameter in self._named if parameter.requires_grad]


def _views_of(flat: Tensor, group: Sequence[Parameter]) -> list[Tensor]:
    views, offset = [], 0
    for parameter in group:
        # Fused optimizers take gradients in the parameter's order of memory, e.g. channels last.
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(flat[offset : offset + parameter.numel()].as_strided(parameter.shape, strides))
        offset += parameter.numel()
    return views


def _group(parameters: Sequence[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Divide the parameters into runs of one dtype and device, each closed at ``bucket_bytes``.

    The first run is small, so that reductions start early in backward.
    """
    groups: list[list[Parameter]] = []
    size = 0
    for parameter in parameters:
        same = groups and (groups[-1][0].dtype, groups[-1][0].device) == (parameter.dtype, parameter.device)
        if not same or size >= (bucket_bytes if len(groups) > 1 else min(bucket_bytes, _FIRST_BUCKET_BYTES)):
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return groups
