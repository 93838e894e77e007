"""Sums of a shard's gradients over the rows of a step, and their reduction over the replicas.

FSDP2 adds each row's gradients, summed over the replica's shards, to the sharded ``grad`` of the parameters. This
worker's sums are kept until the step is committed: one more copy of the shard's gradients. A bucket's sums over the
replicas are in memory of their own, so those of an interrupted reduction can be kept, too. Parameters that FSDP2 does
not divide have gradients of this worker's own micro-batches, which are summed over the lanes at last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from unicron_lightning.fsdp.mesh import ShardGroup, is_sharded, local_shard, local_shards, with_local_shard
from unicron_lightning.replica.channels import PeerGroup
from unicron_lightning.worker.exact_sums import CLASS, MARKS, ExactSum, magnitudes, reduce_apart

BUCKET_BYTES = 25 << 20
"""Size above which a bucket gets no further parameter."""


class ShardedGradients:
    """Gradients of the parameters' shards on this worker.

    Args:
        parameters: of the sharded model; frozen ones may be unfrozen later.

    Attributes:
        parameters: those.
        peers: workers of this shard in all replicas; None for the only replica.
        device: of the model; offloaded shards are in host memory.
        accelerated: torch's process group of these workers for tensors on that device; None on the CPU.
        reduced: number of buckets whose sums over the replicas are known to be complete.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.peers: PeerGroup | None = None
        self.device = device
        self.accelerated: Any = None
        self.parameters = list(parameters)
        self._own: list[Tensor | None] | None = None
        self._present: list[nn.Parameter] = []
        """Parameters that micro-batches of the step have used, as agreed by the replicas."""
        self._kept: list[list[Tensor | None]] = []
        """Sums over the replicas of the first buckets of an interrupted reduction."""
        self._of_lane: list[tuple[nn.Parameter, Tensor | None]] = []
        """Sums over the replicas, before those over the lanes."""
        self.reduced = 0

    def begin(self) -> None:
        """Forget all gradients."""
        self._own = None
        self._kept, self.reduced, self._of_lane = [], 0, []
        for parameter in self.parameters:
            parameter.grad = None

    def recover(self, reduced: int) -> None:
        """After a failure: restore this worker's sums over its completed calls, and keep ``reduced`` buckets."""
        for parameter, grad in self._of_lane:
            parameter.grad = grad
        self._of_lane = []
        if self._own is not None:
            found = _buckets(self._present)[:reduced]
            self._kept = [[parameter.grad for parameter in members] for members in found]
        self._kept, self.reduced = self._kept[:reduced], reduced
        if self._own is None:
            return
        for parameter, own in zip(self.parameters, self._own, strict=True):
            parameter.grad = own
        self._own = None

    def take(self) -> None:
        """End a row: add its gradients to the sums, unless FSDP2 does."""

    def present(self) -> dict[str, Tensor]:
        """Return the shards of the gradients that there are at present, by the numbers of the parameters."""
        return {f"{n}": _local(each) for n, each in enumerate(self.parameters) if each.grad is not None}

    @contextmanager
    def apart(self, *, adds: bool = True) -> Iterator[None]:
        """Accumulate from zero inside; at the end the earlier sums are added, or come back, as after an exception."""
        earlier = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, grad in zip(self.parameters, earlier, strict=True):
                parameter.grad = grad
            raise
        for parameter, grad in zip(self.parameters, earlier, strict=True):
            if not adds:
                parameter.grad = grad
            if grad is None or not adds:
                continue
            if parameter.grad is not None:
                local_shard(grad).add_(_local(parameter))
            parameter.grad = grad

    def reduce(self) -> None:
        """Sum over the replicas, keeping this worker's own sums.

        A parameter that no micro-batch of the step has used keeps no gradient.

        Raises:
            RuntimeError: a reduction has failed.
        """
        self._own = [parameter.grad for parameter in self.parameters]
        if not self._kept:
            if self.peers is None:
                return
            used = torch.tensor([own is not None for own in self._own], dtype=torch.float32)
            self.peers.sum(used)
            self._present = [each for each, is_used in zip(self.parameters, used.tolist(), strict=True) if is_used]
        for number, members in enumerate(_buckets(self._present)):
            if number < len(self._kept):
                for each, summed in zip(members, self._kept[number], strict=True):
                    each.grad = summed
                continue
            self._sum(members, self._add)
            if self.accelerated is None:
                self.reduced += 1

    def join(self, lanes: ShardGroup) -> None:
        """Sum gradients over the lanes of the replica, after the replicas, of parameters that FSDP2 does not divide.

        Raises:
            RuntimeError: the connections are closed.
        """
        common = [each for each in self.parameters if not is_sharded(each)]
        if not common or lanes.size() == 1:
            return
        self._of_lane = [(each, each.grad) for each in common]
        used = torch.tensor([each.grad is not None for each in common], dtype=torch.float32)
        lanes.sum(used)

        def add(flat: Tensor) -> None:
            host = flat.cpu()
            lanes.sum(host)
            flat.copy_(host)

        for members in _buckets([each for each, is_used in zip(common, used.tolist(), strict=True) if is_used]):
            self._sum(members, add)

    def settle(self) -> None:
        """Do nothing: what the library may still write to after a cut is used by nothing else."""

    def _sum(self, members: Sequence[nn.Parameter], add: Callable[[Tensor], None]) -> None:
        """Sum the gradients of a bucket; ``add`` does so in place."""
        parts = [local_shard(torch.zeros_like(each) if each.grad is None else each.grad) for each in members]
        flat = torch.cat([part.reshape(-1) for part in parts])
        add(flat)
        for each, part, summed in zip(members, parts, flat.split([part.numel() for part in parts]), strict=True):
            each.grad = with_local_shard(each, summed.view_as(part))

    def _add(self, flat: Tensor) -> None:
        """Sum a tensor over the replicas, in place."""
        if self.accelerated is not None and flat.device.type == self.device.type:
            self.accelerated.allreduce([flat]).wait()
        elif self.peers is not None:
            self.peers.sum(flat)


def clip_factor(norm: float, most: float) -> float:
    """Return the factor by which gradients of a norm are clipped to at most another one."""
    return min(1.0, most / (norm + 1e-6))


def clip_shards(parameters: Iterable[nn.Parameter], most: float, norm: float) -> float:
    """Clip gradients by a norm that the shards have agreed on before the commit; no communication may follow it.

    Args:
        parameters: this worker's shards; those of a spare have no gradients.
        most: largest norm.
        norm: of the present gradients over the whole model.

    Returns:
        The factor.
    """
    factor = clip_factor(norm, most)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads:
        torch._foreach_mul_(local_shards(grads), factor)
    return factor


_BITS: Final = 46
"""Bits of a row's integers, for steps of up to 2**16 rows."""
_LEAST, _MOST = -68, 65
"""Range of the classes of values that are added apart, in float64."""


class ExactShardedGradients(ShardedGradients):
    """Gradients whose sums over rows have the same bits on any number of replicas; see `worker.exact_sums`.

    Each row is on the grid of its own largest value: the reduction follows the last backward, so there is time to agree
    on the grids. All reductions are repeated after a failure.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        super().__init__(parameters, device)
        self._sums_of: dict[int, ExactSum] = {}
        """By the identities of parameters, of which a step may train some only."""
        self._sums: list[ExactSum] = []

    @override
    def begin(self) -> None:
        super().begin()
        self._sums = [self._sum_of(each) for each in self.parameters]
        for each in self._sums:
            each.begin(None, _BITS)

    def _sum_of(self, parameter: nn.Parameter) -> ExactSum:
        """Return the sum of a parameter's gradients."""
        if id(parameter) not in self._sums_of:
            part = local_shard(parameter)
            integers = torch.zeros(1, dtype=torch.int64, device=part.device).expand(part.numel())
            self._sums_of[id(parameter)] = ExactSum(integers)
        return self._sums_of[id(parameter)]

    @override
    def take(self) -> None:
        pairs = zip(self._sums, self.parameters, strict=True)
        found = [(each, p, local_shard(p.grad)) for each, p in pairs if p.grad is not None]
        sizes = magnitudes([part for _, _, part in found])
        for (each, parameter, part), largest in zip(found, sizes, strict=True):
            each.add(part, largest)
            parameter.grad = None

    @override
    def recover(self, reduced: int) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @override
    def reduce(self) -> None:
        width = 2 + _MOST - _LEAST
        table = torch.zeros(len(self._sums), width, dtype=torch.int64)
        for row, each in zip(table, self._sums, strict=True):
            row[0] = each.used
            for top in each.apart:
                row[1 if top == MARKS else 2 + top // CLASS - _LEAST] = 1
        if self.peers is not None:
            self.peers.sum(table)
        tops = [MARKS, *(CLASS * number for number in range(_LEAST, _MOST))]
        found = [
            (each, tops[place])
            for each, row in zip(self._sums, table.tolist(), strict=True)
            for place, number in enumerate(row[1:])
            if number
        ]
        reduce_apart(self._sums, found, self._add)
        for parameter, each, row in zip(self.parameters, self._sums, table.tolist(), strict=True):
            part = local_shard(parameter)
            out = torch.empty(part.numel() if row[0] else 0, dtype=part.dtype, device=part.device)
            if row[0]:
                each.write(None, out)
            parameter.grad = with_local_shard(parameter, out.view_as(part)) if row[0] else None


def _local(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    return local_shard(grad)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters, in reverse order, as backward finishes them, into groups of one type."""
    buckets: list[list[nn.Parameter]] = []
    size, dtype = 0, None
    for parameter in reversed(parameters):
        if not buckets or parameter.dtype != dtype or size >= BUCKET_BYTES:
            buckets.append([])
            size, dtype = 0, parameter.dtype
        buckets[-1].append(parameter)
        size += local_shard(parameter).numel() * parameter.element_size()
    return buckets
