"""The gradients that Megatron's data parallelism accumulates, kept through failures.

Megatron sums micro-batches in ``main_grad``, which lives in the buckets' flat buffers, and scales and reduces those in
place. Therefore this worker's sums are copied before a bucket is reduced, and copied back if the step is planned again.
The same copy holds the sums so far while a further call of the schedule accumulates from zero. Inside such a call a
row whose gradients are compared alone (`worker.witness`) needs a second copy for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from unicron_lightning.worker.communication.communicator import CommunicatorAborted

_SumsState = Literal["local", "held", "reduced"]


class MainGradients:
    """Sums of one model's gradients.

    Args:
        ddps: Megatron's `DistributedDataParallel` of each part of the model on this worker; only the attribute
            ``start_grad_sync`` of its bucket groups is set.
        lanes: declared number over all replicas, and over the parts of a sequence, whose inverse scales each gradient,
            whatever the present number is.
        beside: sums something else over the replicas, after the gradients.
    """

    reduced = 0
    """Each bucket's sums over the replicas are in the memory to which further calls would add."""

    def __init__(self, ddps: Sequence[Any], lanes: int, beside: Callable[[], None] = lambda: None) -> None:
        self._ddps = ddps
        self._lanes = lanes
        self._beside = beside
        # Replicas may begin the buckets of several parts in different orders: in the backward from the last part on, or
        # all after it, as in a worker's first step. Hence those of several parts are reduced after the calls.
        self._overlap = bool(ddps[0].ddp_config.overlap_grad_reduce) and len(ddps) == 1
        self._state: _SumsState = "local"
        self._armed = False
        self._failure: str | None = None
        self.rebind()

    def rebind(self) -> None:
        """Use the present buckets of Megatron's data parallelism; call `recover` before they are replaced."""
        self._groups: list[Any] = [
            group for each in self._ddps for group in (*each.bucket_groups, *each.expert_parallel_bucket_groups)
        ]
        self._copies: list[list[Tensor] | None] = [None] * len(self._groups)
        self._copied: set[int] = set()
        self._launched: set[int] = set()
        for place, group in enumerate(self._groups):
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0 / self._lanes
            group.start_grad_sync = self._starter(place, group.start_grad_sync)

    @property
    def parameters(self) -> list[Tensor]:
        """Those that are trained."""
        return [parameter for group in self._groups for parameter in group.params]

    def present(self) -> dict[str, Tensor]:
        """Return the buckets' gradients, by their numbers."""
        return {f"{number}": bucket.grad_data for number, bucket in enumerate(self._buckets())}

    def begin(self) -> None:
        """Reset all gradients to zero."""
        for group in self._groups:
            if group.is_first_batch and len(group.per_param_grad_ready_counts) != len(group.params):
                # left by an interrupted call; later calls must not be compared with it
                group.per_param_grad_ready_counts = {}
            group.grad_reduce_handle = None
        for each in self._ddps:
            each.zero_grad_buffer()
        self._state, self._copied, self._launched, self._failure = "local", set(), set(), None

    def recover(self) -> None:
        """After a failure: restore this worker's sums over its completed calls."""
        with torch.no_grad():
            for place in self._copied:
                for bucket, copy in zip(self._groups[place].buckets, self._copies[place] or (), strict=True):
                    bucket.grad_data.copy_(copy)
        for group in self._groups:
            group.grad_reduce_handle = None
            group.is_last_microbatch = True
        self._state, self._copied, self._launched, self._failure = "local", set(), set(), None

    @contextmanager
    def apart(self, *, adds: bool = True) -> Iterator[None]:
        """Inside, gradients accumulate from zero; at the end the earlier sums are added, or come back.

        After an exception inside, `recover` restores the sums over the completed calls.
        """
        within = self._state == "held"  # then the copies are those of the completed calls
        if within:
            earlier = [bucket.grad_data.clone() for bucket in self._buckets()]
        else:
            for place in range(len(self._groups)):
                self._copy(place)
            earlier = [copy for copies in self._copies for copy in copies or ()]
            self._state = "held"
        with torch.no_grad():
            for bucket in self._buckets():
                bucket.grad_data.zero_()
        yield
        with torch.no_grad():
            for bucket, copy in zip(self._buckets(), earlier, strict=True):
                bucket.grad_data.add_(copy) if adds else bucket.grad_data.copy_(copy)
        if not within:
            self._state, self._copied = "local", set()

    @contextmanager
    def calling(self, *, last: bool) -> Iterator[Any]:
        """Surround a call of the schedule and yield its ``no_sync_func``. Reductions start only in the ``last``
        call.
        """
        if self._overlap and last:
            self._armed = True
            try:
                yield self._ddps[0].no_sync
            finally:
                self._armed = False
        else:
            with ExitStack() as stack:
                for each in self._ddps:
                    stack.enter_context(each.no_sync())
                yield None

    def reduce(self) -> None:
        """Sum the buckets over the replicas, unless this has been started in the last call.

        Raises:
            CommunicatorAborted: a reduction started there has failed.
            RuntimeError: a reduction has failed here.
        """
        self._state = "reduced"
        self._armed = True
        try:
            for place, group in enumerate(self._groups):
                if place not in self._launched:
                    group.start_grad_sync()
            if self._failure is not None:
                raise CommunicatorAborted(self._failure)
            for group in self._groups:
                if group.grad_reduce_handle is not None:
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = None
            self._beside()
        finally:
            self._armed = False

    def settle(self) -> None:
        """Wait until the library has released the buffers, after the connections were cut."""
        for group in self._groups:
            handle, group.grad_reduce_handle = group.grad_reduce_handle, None
            for work in getattr(handle, "works", None) or ([] if handle is None else [handle]):
                try:
                    work.wait()
                except RuntimeError:
                    continue

    def _buckets(self) -> list[Any]:
        return [bucket for group in self._groups for bucket in group.buckets]

    def _copy(self, place: int) -> None:
        group = self._groups[place]
        copies = self._copies[place]
        if copies is None:
            copies = self._copies[place] = [torch.empty_like(bucket.grad_data) for bucket in group.buckets]
        with torch.no_grad():
            for bucket, copy in zip(group.buckets, copies, strict=True):
                copy.copy_(bucket.grad_data)
        self._copied.add(place)

    def _starter(self, place: int, start: Any) -> Any:
        """Return the function that the backward hooks call for a complete bucket group; it never raises inside
        backward.
        """

        def start_grad_sync(*args: Any, **kwargs: Any) -> None:
            if not self._armed or self._failure is not None or place in self._launched:
                return
            self._copy(place)
            self._launched.add(place)
            try:
                start(*args, **kwargs)
            except RuntimeError as error:
                self._failure = str(error).splitlines()[0][:200]

        return start_grad_sync
