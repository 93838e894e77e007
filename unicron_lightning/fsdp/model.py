"""One worker's shard of an FSDP2 model, as the operations of a replica use it, and its groups on CUDA devices.

One of NCCL's groups is of the workers of the replica, for FSDP2, and one of the workers of this shard in all replicas,
for the gradients; with tensor parallelism there are two more, of the workers of a lane and of those of a slice. A
kernel that waits for a dead worker ends by the abort of its group only, and then looks complete, so a call counts only
after `ReplicaFabric.arrive` (decision 18).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unicron_lightning.fsdp.folder import load_optimizer, optimizer_shard
from unicron_lightning.fsdp.gradients import ExactShardedGradients, ShardedGradients
from unicron_lightning.fsdp.mesh import (
    ShardGroup,
    holds_first,
    is_sharded,
    is_sliced,
    local_shard,
    local_shards,
    reset_after_exception,
    reshard,
)
from unicron_lightning.fsdp.whole_updates import WholeUpdates
from unicron_lightning.replica.channels import AcceleratedGroup, AcceleratedGroups, Channels, PeerGroup
from unicron_lightning.worker.communication.nccl import make_group
from unicron_lightning.worker.delivery import divided_shard
from unicron_lightning.worker.model_state import group_names, regroup
from unicron_lightning.worker.state_parts import DividedState

Make = Callable[[dist.Store, int, int, torch.device], tuple[Any, Any]]
"""Makes a group: (store, rank, world, device); returns torch's process group and the library's back-end."""


def nccl_group(store: dist.Store, rank: int, world: int, device: torch.device) -> tuple[Any, Any]:
    """Make an unconnected group of NCCL for tensors on ``device``."""
    backend = make_group(store, rank, world, device)
    holder = dist.ProcessGroup(dist.HashStore(), rank, world)
    holder._register_backend(torch.device(device.type), dist.ProcessGroup.BackendType.NCCL, backend)
    return holder, backend


class ShardAccelerator:
    """Makes and leaves the groups of each epoch.

    Args:
        device: of the model.
        check: raises if the present epoch has ended.
        groups: aborts and destroys groups.
        make: makes one.
    """

    def __init__(
        self,
        device: torch.device,
        check: Callable[[], None],
        groups: AcceleratedGroups | None = None,
        make: Make = nccl_group,
    ) -> None:
        self._device = device
        self._check = check
        self._groups = groups or AcceleratedGroups()
        self._make = make

    def leave(self) -> None:
        """Let helper threads abort and destroy the groups, to which the caller must not refer any more."""
        self._groups.leave()

    def settle(self) -> None:
        """Wait until no kernel of groups that were left writes to a tensor."""
        self._groups.wait_retired(self._check)

    def enter(self, channels: Channels) -> tuple[dict[tuple[int, ...], Any], Any]:
        """Make and connect an epoch's groups.

        Returns:
            Torch's process groups of the sets of this replica's workers, by their shards, and that of the workers of
            this shard; the latter is None for the only replica.

        Raises:
            CommunicatorAborted: a group could not be connected.
        """
        grid = channels.grid
        inner = {}
        sets = grid.within() if grid.shape.slices > 1 else [tuple(range(grid.shards))]
        for shards in dict.fromkeys(sets):  # in the same order on all workers, and each kind divides the replica
            name = f"inner/{'-'.join(map(str, (grid.place, *shards)))}"
            inner[shards] = self._group(channels, name, shards.index(grid.shard), len(shards), inside=True)
        groups = [*inner.values()]
        if grid.replicas > 1:
            groups.append(self._group(channels, f"outer/{grid.shard}", grid.place, grid.replicas, inside=False))
        self._groups.connect(channels, groups, self._device, self._check)
        found = {shards: group.holder for shards, group in inner.items()}
        return found, groups[-1].holder if grid.replicas > 1 else None

    def _group(self, channels: Channels, name: str, rank: int, size: int, *, inside: bool) -> AcceleratedGroup:
        store = dist.PrefixStore(f"accelerated/{name}", channels.store)
        holder, backend = self._make(store, rank, size, self._device)
        return AcceleratedGroup(holder=holder, backend=backend, size=size, inside=inside)


def accelerator_for(device: torch.device, check: Callable[[], None]) -> ShardAccelerator | None:
    """Return what a model on this device needs beside gloo: nothing on the CPU."""
    return ShardAccelerator(device, check) if device.type == "cuda" else None


_CPU = torch.device("cpu")


class FsdpShard:
    """Implements `replica.member.ReplicaModel`.

    Args:
        root: module that `torch.distributed.fsdp.fully_shard` shards on the mesh of ``group``; each lane has all of the
            parameters that it does not.
        group: of the replica's workers.
        device: of the model, also if its shards are kept in host memory.
        accelerator: makes the groups of an accelerator; None on the CPU.
        exact: sum gradients over rows and replicas as `worker.exact_sums` does.

    Attributes:
        optimizer: steps the sharded parameters; None before the first ``fit``.
        accelerator: as above.
        loaded: called when the state of another worker has been loaded, as in the middle of a step.
        fits: number of the script's ``fit`` calls so far, each with a new optimizer.
        grad_norm: of the last finalized gradients of the optimizer's parameters over all shards, before clipping.
        updates: of whole matrices before the commit, by name; those of the optimizers that do not work on each element.
    """

    keeper = None

    def __init__(
        self,
        root: nn.Module,
        group: ShardGroup,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device = _CPU,
        accelerator: ShardAccelerator | None = None,
        exact: bool = False,
    ) -> None:
        self.root = root
        self.group = group
        self.optimizer = optimizer
        self.fits = 0
        self.device = device
        self.grad_norm = 0.0
        self.updates: dict[str, WholeUpdates] = {}
        self.loaded: Callable[[], None] = lambda: None
        self.gradients = (ExactShardedGradients if exact else ShardedGradients)(list(root.parameters()), device)
        self.accelerator = accelerator
        self._alone: PeerGroup | None = None

    def adopt(self, channels: Channels) -> None:
        """Use an epoch's connections.

        Raises:
            CommunicatorAborted: a group on the accelerator could not be connected.
        """
        self.leave()
        self.group.enter(lambda shards: channels.inner[shards] if len(shards) > 1 else self._by_itself())
        if channels.grid.replicas > 1:
            self.gradients.peers = channels.same_shard
        if self.accelerator is not None:
            inner, self.gradients.accelerated = self.accelerator.enter(channels)
            self.group.accelerate(inner)

    def leave(self) -> None:
        """Use no connections, and hold the shards alone: this worker has become a spare, or another epoch begins.

        Raises:
            CommunicatorAborted, EpochChanged: the epoch ended before an accelerator had finished.
        """
        self._let_go()
        if self.accelerator is not None:
            self.accelerator.settle()
        reset_after_exception(self.root)

    def close(self) -> None:
        """Release the connections that this object has made."""
        self._let_go()
        if self._alone is not None:
            self._alone.close()
            self._alone = None

    def _by_itself(self) -> PeerGroup:
        """Return the connections of a group of this worker alone."""
        if self._alone is None:
            self._alone = PeerGroup(dist.HashStore(), 0, 1, "127.0.0.1")
        return self._alone

    def _let_go(self) -> None:
        self.gradients.peers = None
        self.group.accelerate({})
        self.gradients.accelerated = None
        if self.accelerator is not None:
            self.accelerator.leave()

    # ---- a step

    def begin_fit(self, optimizer: Optimizer, *, whole: bool = False) -> None:
        """Begin a ``fit`` with a new optimizer, which may need whole parameters."""
        self.optimizer, self.fits = optimizer, self.fits + 1
        self.updates = {"optimizer": WholeUpdates(optimizer, self.group)} if whole else {}

    def shard(self) -> dict[str, torch.Tensor]:
        """Return this worker's parts of the parameters, by name."""
        reshard(self.root)
        named = dict(self.root.named_parameters())
        return dict(zip(named, local_shards(named.values()), strict=True))

    def begin(self) -> None:
        """Reset the gradients; a replica without a row in this step must not keep gathered parameters."""
        reshard(self.root)
        self.gradients.begin()

    def recover(self, reduced: int) -> None:
        """After a failure: restore the gradients of this worker's completed calls, and keep ``reduced`` buckets."""
        self.gradients.recover(reduced)

    def finalize(self) -> None:
        """Sum what lanes have in common, and compute the norm of the optimizer's gradients over all shards."""
        self.gradients.join(self.group.same_slice)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        own = [each for group in groups for each in group["params"]] or self.gradients.parameters
        present = [each.grad for each in own if each.grad is not None]
        first = self.group.rank() == 0
        grads = local_shards([each for each in present if (holds_first(each) if isinstance(each, DTensor) else first)])
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        squares = torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)
        self.group.sum(squares)
        self.grad_norm = float(squares.sqrt())

    @property
    def stages(self) -> bool:
        """Whether the update communicates, and so is staged before the commit."""
        return bool(self.updates)

    def stage(self) -> None:
        """Compute updates that communicate; parameters and states stay as they are."""
        for each in self.updates.values():
            each.stage()

    def update(self) -> None:
        """Step the optimizer on this worker's shards, or take what was staged, without communication."""
        assert self.optimizer is not None
        if not self.updates:
            self.optimizer.step()
        for each in self.updates.values():
            each.apply()

    # ---- state

    def unify(self) -> None:
        """Give all replicas the first one's parameters and buffers, and its workers what they have in common."""
        peers, lane = self.gradients.peers, self.group.lane
        with torch.no_grad():
            for tensor in (*self.root.parameters(), *self.root.buffers()):
                part = local_shard(tensor)
                host = part.detach().cpu()
                if peers is not None:
                    peers.broadcast(host, 0)
                if not is_sharded(tensor):
                    self.group.same_slice.copy_first(host)
                if lane is not None and not (isinstance(tensor, DTensor) and is_sliced(tensor)):
                    lane.copy_first(host)
                part.copy_(host)

    def state(self, *, whole: bool = False) -> DividedState:
        """Divide `plain_state`."""
        return divided_shard(self.plain_state(), len(list(self.root.parameters())))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the `plain_state` of another worker of this shard.

        If only one of them has begun the next ``fit``, its optimizer is new, and the other's is not used any more.
        """
        self.load_plain(state if state["fits"] == self.fits else {**state, "optimizer": {}})

    def plain_state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer of this shard, as plain data that shares their memory."""
        reshard(self.root)
        tensors = local_shards([*self.root.parameters(), *self.root.buffers()])
        return {
            "shard": self.group.rank(),
            "fits": self.fits,
            "tensors": [each.detach() for each in tensors],
            "requires_grad": [parameter.requires_grad for parameter in self.root.parameters()],
            "optimizer": self._optimizer_state(),
        }

    def load_plain(self, state: Mapping[str, Any]) -> None:
        """Load the `plain_state` of a worker of this shard in an earlier life."""
        for each in self.updates.values():
            each.discard()
        with torch.no_grad():
            own = local_shards([*self.root.parameters(), *self.root.buffers()])
            for tensor, value in zip(own, state["tensors"], strict=True):
                tensor.copy_(value)
        for parameter, needed in zip(self.root.parameters(), state["requires_grad"], strict=True):
            parameter.requires_grad_(needed)
        self._load_optimizer(state["optimizer"])
        self.loaded()

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load an `_optimizer_state`; nothing of an empty one."""
        if self.optimizer is not None and state:
            self._load_shard(self.optimizer, state)

    def _optimizer_state(self) -> dict[str, Any]:
        return {} if self.optimizer is None else self._shard_of(self.optimizer)

    def _shard_of(self, optimizer: Optimizer) -> dict[str, Any]:
        return {**optimizer_shard(optimizer), "groups": group_names(optimizer, self.root)}

    def _load_shard(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        regroup(optimizer, self.root, state["groups"])
        load_optimizer(optimizer, state, whole=False)
