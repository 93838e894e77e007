"""torch's default process group, backed by the strategy's collectives, with rank and size of the present epoch.

One object serves for the whole life of the process, so references to it stay valid when members change. Its collectives
are operations of the engine: a failure interrupts them, and the members of the next epoch complete them.
"""

# mypy: disable-error-code="assignment, override, misc"

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from unicron_lightning.errors import UnicronError
from unicron_lightning.strategies.collectives.operations import Collectives
from unicron_lightning.worker import codec

NAME: Final = "unicron"
"""Name of the backend, as `torch.distributed.get_backend` returns it."""

RankAndSize = Callable[[], tuple[int, int]]
"""Returns this worker's rank and the number of members, as of the present epoch."""


class CollectiveRefused(UnicronError):
    """A function of `torch.distributed` is not supported by the default process group, or not in this place."""


class MembersChanged(UnicronError):
    """Members changed during a collective whose result has one part per member of the epoch in which it was called."""


class Done(dist.Work):
    """A collective that has completed.

    Args:
        outputs: its results.
    """

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(outputs)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._future.value()


class DefaultGroup(dist.ProcessGroup):
    """All members of the present epoch.

    Args:
        place: of this worker.

    Attributes:
        collectives: of the strategy that runs; replaced when another trainer of the script begins.
    """

    def __init__(self, place: RankAndSize) -> None:
        super().__init__(*place())  # type: ignore[arg-type, call-arg]
        self.collectives: Collectives | None = None
        self.place = place
        self._owner = os.getpid(), threading.get_ident()

    # ---- identity

    def rank(self) -> int:
        return self.place()[0]

    def size(self) -> int:
        return self.place()[1]

    def name(self) -> str:
        return NAME

    getBackendName, getRank, getSize = name, rank, size  # noqa: N815 - asked for by C++

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch, from 2.14 on, asks whether it sends messages in one batch: this does not."""
        return self

    @property
    def bound_device_id(self) -> None:
        return None

    @property
    def group_name(self) -> str:
        return NAME

    @property
    def group_desc(self) -> str:
        return "default_pg"

    def shutdown(self) -> None:
        """Nothing to release: connections belong to the engine."""

    # ---- collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        operation = _operation(opts)
        for tensor in tensors:
            parts = self._gather("all_reduce", lambda rank, sent=tensor: codec.encode(sent))
            tensor.copy_(_reduce([codec.decode(part) for part in parts], operation))
        return Done(list(tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        operation = _operation(opts)
        for tensor in tensors:
            parts = self._gather("reduce", lambda rank, sent=tensor: codec.encode(sent))
            if self.rank() == opts.rootRank:
                tensor.copy_(_reduce([codec.decode(part) for part in parts], operation))
        return Done(list(tensors))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Done:
        root = int(opts.rootRank)
        for tensor in tensors:
            tensor.copy_(self._from_root("broadcast", root, tensor))
        return Done(list(tensors))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Done:
        for received, sent in zip(outputs, inputs, strict=True):
            parts = self._parts("all_gather", sent, len(received))
            for output, part in zip(received, parts, strict=True):
                output.copy_(part)
        return Done(list(outputs))

    def _allgather_base(self, output: Tensor, sent: Tensor, opts: Any = None) -> Done:
        number = output.numel() // max(1, sent.numel())
        parts = self._parts("all_gather_into_tensor", sent, number)
        output.copy_(torch.cat([part.reshape(-1) for part in parts]).reshape(output.shape))
        return Done([output])

    all_gather_single = _allgather_base

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Done:
        is_root = self.rank() == opts.rootRank
        number = len(outputs[0]) if outputs else self.size()
        parts = self._parts("gather", inputs[0], number)
        if is_root:
            for output, part in zip(outputs[0], parts, strict=True):
                output.copy_(part)
        return Done(list(outputs))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Done:
        given = list(inputs[0]) if inputs else []
        parts = self._from_root("scatter", int(opts.rootRank), given)
        if len(parts) != self.size():
            raise MembersChanged(f"scatter() got {len(parts)} tensors for the {self.size()} members of this epoch")
        outputs[0].copy_(parts[self.rank()])
        return Done(list(outputs))

    def barrier(self, opts: Any = None) -> Done:
        self._gather("barrier", lambda rank: b"")
        return Done([])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier()

    # ---- parts of them

    def _gather(self, name: str, payload: Callable[[int], bytes], number: int | None = None) -> list[bytes]:
        if self.collectives is None or self._owner != (os.getpid(), threading.get_ident()):
            raise CollectiveRefused(
                f"torch.distributed.{name}() was called in process {os.getpid()}, thread "
                f"{threading.current_thread().name!r}; the unicron strategy runs collectives only where it trains"
            )
        return self.collectives.gather(f"torch.distributed.{name}", payload, number)

    def _parts(self, name: str, sent: Tensor, number: int) -> list[Tensor]:
        """Each member's tensor, where the caller has room for ``number``."""
        parts = self._gather(name, lambda rank: codec.encode(sent), number)
        if len(parts) != number:
            raise MembersChanged(
                f"torch.distributed.{name}() was called with room for {number} members, but {len(parts)} have "
                "completed it: members changed meanwhile; trainer.strategy.all_gather gives one part per member"
            )
        return [codec.decode(part) for part in parts]

    def _from_root(self, name: str, root: int, value: Any) -> Any:
        """Rank ``root``'s value; this one's, if no member was asked."""
        parts = self._gather(name, lambda rank: codec.encode(value) if rank == root else b"")
        part = parts[root] if root < len(parts) else b""
        if part:
            return codec.decode(part)
        if self.collectives is not None and not self.collectives.live:
            return value
        raise MembersChanged(f"torch.distributed.{name}(src={root}): no member of this epoch has that rank any more")


def _operation(opts: Any) -> str:
    operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    name = str(getattr(operation, "op", operation)).rsplit(".", 1)[-1]
    if name not in _REDUCTIONS:
        raise CollectiveRefused(
            f"ReduceOp.{name} is not supported under the unicron strategy; expected {sorted(_REDUCTIONS)}"
        )
    return name


_REDUCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "SUM": lambda parts: parts.sum(0, dtype=parts.dtype),
    "AVG": lambda parts: (parts.double().mean(0)).to(parts.dtype),
    "PRODUCT": lambda parts: parts.prod(0, dtype=parts.dtype),
    "MIN": lambda parts: parts.amin(0),
    "MAX": lambda parts: parts.amax(0),
}


def _reduce(parts: Sequence[Tensor], operation: str) -> Tensor:
    """In rank order, so that all members have the same bits."""
    return _REDUCTIONS[operation](torch.stack(list(parts)))


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise CollectiveRefused(
            f"torch.distributed: {name} is not supported by the default process group of the unicron strategy; it has "
            "all_reduce, all_gather, all_gather_object, broadcast, reduce, gather, scatter and barrier over all members"
        )

    return refused


UNSUPPORTED: Final = (
    *("send", "recv", "recv_anysource", "alltoall", "alltoall_base", "all_to_all_single", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "allgather_coalesced"),
    *("reduce_scatter_single_coalesced", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("new_group", "split_group", "merge_remote_group", "abort"),
)
for _name in UNSUPPORTED:
    setattr(DefaultGroup, _name, _refuse(_name))


class NoStore(dist.Store):
    """The default group has no store; `torch.distributed.new_group` asks for it."""

    @override
    def set(self, *args: Any) -> Any:
        raise CollectiveRefused(
            "torch.distributed.new_group() is not supported by the default process group of the unicron strategy: a "
            "group of its own would not survive the loss of a member"
        )


for _name in ("get", "add", "wait", "check", "set_timeout", "compare_set", "delete_key", "num_keys"):
    setattr(NoStore, _name, NoStore.set)
