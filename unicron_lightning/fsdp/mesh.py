"""Device mesh of a replica's shards whose connections are replaced in each epoch, and FSDP2's state after an exception.

FSDP2 keeps the mesh's process group in many places. Here that group stays the same object for the life of the process,
and forwards to the connections of the present epoch. All private names of torch on which this package depends are in
this module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.channels import PeerGroup, ProcessGroup

SHARDS = "data_parallel"
"""Name of the mesh's dimension, as in Lightning's ModelParallelStrategy."""
SLICES = "tensor_parallel"
"""Name of its other dimension there, the last one."""
_numbers = itertools.count()
"""Numbers of the process groups that were made in this process."""


class ShardGroup(ProcessGroup):
    """Process group of a replica's workers; `bind` gives it the connections of an epoch.

    With tensor parallelism it has two more: that of the workers that have the same slice, among which FSDP2 divides
    tensors, and that of the workers of a lane, among which tensor parallelism does.

    Args:
        shard: of this worker.
        shards: workers of a replica.
        slices: workers of a lane.

    Attributes:
        key: name by which torch finds the group.
        slices: as above.
        refusal: message of the `ConfigError` that torch's collectives raise now; empty: none is raised.
    """

    refusal = ""

    def __init__(self, shard: int, shards: int, slices: int = 1) -> None:
        dist.ProcessGroup.__init__(self, shard, shards)  # type: ignore[call-arg]
        self.key = cast("Any", f"unicron_shards_{next(_numbers)}")
        self._set_group_name(self.key)
        torch._C._distributed_c10d._register_process_group(self.key, self)
        self.slices = slices
        divided = slices > 1
        self._same_slice = type(self)(shard // slices, shards // slices) if divided else None
        self._lane = type(self)(shard % slices, slices) if divided else None

    @property
    def same_slice(self) -> ShardGroup:
        """The group among which FSDP2 divides tensors."""
        return self._same_slice or self

    @property
    def lane(self) -> ShardGroup | None:
        """The group of tensor parallelism; None without it."""
        return self._lane

    def enter(self, connections: Callable[[tuple[int, ...]], PeerGroup]) -> None:
        """Bind this group and those within it.

        Args:
            connections: returns those of some workers of the replica, by their shards.
        """
        for group, shards in self._sets():
            group.bind(connections(shards))

    def accelerate(self, groups: Mapping[tuple[int, ...], Any]) -> None:
        """Let this group and those within it use an accelerator's groups, by their shards; none: use no accelerator."""
        for group, shards in self._sets():
            group.accelerated = groups.get(shards)

    def _sets(self) -> Iterator[tuple[ShardGroup, tuple[int, ...]]]:
        """Yield this group and those within it with the shards of their workers."""
        yield self, tuple(range(self.size()))
        if self._lane is not None and self._same_slice is not None:
            shard, slices = self.rank(), self.slices
            first = shard - shard % slices
            yield self._lane, tuple(range(first, first + slices))
            yield self._same_slice, tuple(range(shard % slices, self.size(), slices))

    def refuse(self, message: str) -> None:
        """Set the `refusal` of this group and those within it."""
        for group, _ in self._sets():
            group.refusal = message

    def admit(self) -> None:
        """Refuse a collective.

        Raises:
            ConfigError: if `refusal` has its message.
        """
        if self.refusal:
            raise ConfigError(self.refusal)

    def name(self) -> str:
        return "unicron_fsdp"

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor in host memory over the shards, in place.

        Raises:
            RuntimeError: the connections are closed.
        """
        self._peers.sum(tensor)

    def exchange(self, word: int) -> list[int]:
        """Return the numbers of the workers of this replica, by shard, given this worker's.

        Raises:
            RuntimeError: the connections are closed.
        """
        words = torch.zeros(self.size(), dtype=torch.int64)
        words[self.rank()] = word
        self.sum(words)
        return words.tolist()

    def share(self, data: bytes) -> list[bytes]:
        """Return the bytes of all shards, by shard.

        Raises:
            RuntimeError: the connections are closed.
        """
        sizes = self.exchange(len(data))
        found = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = found.split(sizes)
        parts[self.rank()].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.sum(found)
        return [part.numpy().tobytes() for part in parts]

    def copy_first(self, tensor: torch.Tensor) -> None:
        """Copy the first worker's tensor, in host memory, to all.

        Raises:
            RuntimeError: the connections are closed.
        """
        self._peers.broadcast(tensor, 0)

    def collect(self, data: bytes) -> list[bytes]:
        """Send the bytes of all shards to the first one; return them there, by shard, and nothing elsewhere.

        Raises:
            RuntimeError: the connections are closed.
        """
        sizes = self.exchange(len(data))
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = [torch.empty_like(own) for _ in sizes] if self.rank() == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._peers.start(self._inner.gather([received] if received else [], [own], options)).wait()
        return [part[:size].numpy().tobytes() for part, size in zip(received, sizes, strict=False)]


class _GroupsMesh(DeviceMesh):
    """A mesh of this worker's groups of a replica, which needs no default process group.

    Args:
        device: of the model.
        groups: of each dimension, by its name.
        slices: workers of a lane.

    Attributes:
        slices: as above.
        lane, slice: place of this worker's lane in the replica, and of this worker in its lane.
        whole: the mesh of both dimensions; None without tensor parallelism.
    """

    whole: _GroupsMesh | None = None

    def __init__(self, device: torch.device, groups: Mapping[str, ShardGroup], slices: int, shard: int) -> None:
        self.slices = slices
        self.lane, self.slice = divmod(shard, slices)
        sizes = [each.size() for each in groups.values()]
        place = 0
        for each in groups.values():
            place = place * each.size() + each.rank()
        super().__init__(
            device.type,
            torch.arange(math.prod(sizes)).view(sizes),
            mesh_dim_names=tuple(groups),
            _init_backend=False,
            _rank=place,
        )
        self._dim_group_names = [each.key for each in groups.values()]
        self._pg_registry.update((each.key, each) for each in groups.values())

    @override
    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        coordinate, names = self.get_coordinate(), self.mesh_dim_names
        assert coordinate is not None and names is not None, "this worker is in its replica's mesh"
        return coordinate[names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0]


def shard_mesh(group: ShardGroup, device: torch.device) -> DeviceMesh:
    """Return the mesh of the shards of a replica, with one dimension named `SHARDS`."""
    return _GroupsMesh(device, {SHARDS: group.same_slice}, group.slices, group.rank())


_concatenate = DeviceMesh._concatenate


def _concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Torch's function of this name, which FSDP2 calls for a parameter that tensor parallelism divides.

    Torch's own result would look for a default process group.
    """
    first = meshes[0]
    if isinstance(first, _GroupsMesh) and first.whole is not None and len(meshes) == first.whole.ndim:
        return first.whole
    return _concatenate(meshes)


_scatter, _broadcast = placement_types.mesh_scatter, placement_types.mesh_broadcast


def _scattered(
    output: torch.Tensor, parts: list[torch.Tensor], mesh: DeviceMesh, mesh_dim: int = 0, **rest: Any
) -> Any:
    """Torch's function of this name, with which a tensor is divided: here each worker takes its part of its own.

    A model is built before its workers are connected, and all of them make the same one.
    """
    if not isinstance(mesh, _GroupsMesh):
        return _scatter(output, parts, mesh, mesh_dim, **rest)
    output.copy_(parts[mesh.get_local_rank(mesh_dim)])
    return None


def _broadcasted(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int = 0, **rest: Any) -> Any:
    """Likewise for a tensor of which each worker has all: each keeps its own."""
    return None if isinstance(mesh, _GroupsMesh) else _broadcast(tensor, mesh, mesh_dim, **rest)


def build_unconnected() -> None:
    """Let torch divide tensors on the meshes of this module without connections; other meshes are as before."""
    replaced: Any = DeviceMesh
    replaced._concatenate = staticmethod(_concatenated)
    replaced = placement_types
    replaced.mesh_scatter, replaced.mesh_broadcast = _scattered, _broadcasted


class ReplicaMesh:
    """The meshes of a replica by their names, as ``LightningModule.device_mesh`` has them under ModelParallelStrategy.

    Args:
        group: of the replica's workers.
        device: of the model.

    Attributes:
        shards: the mesh for `torch.distributed.fsdp.fully_shard`.
    """

    def __init__(self, group: ShardGroup, device: torch.device) -> None:
        slices = group.slices
        self.shards = shard_mesh(group, device)
        lane = group.lane or ShardGroup(0, 1)
        self._slices = _GroupsMesh(device, {SLICES: lane}, slices, group.rank())
        if slices > 1:
            build_unconnected()
            groups = {SHARDS: group.same_slice, SLICES: lane}
            whole = _GroupsMesh(device, groups, slices, group.rank())
            self.shards.whole = self._slices.whole = whole  # type: ignore[attr-defined]

    def __getitem__(self, name: str) -> DeviceMesh:
        if name not in (SHARDS, SLICES):
            raise KeyError(f"device_mesh[{name!r}]: expected {SHARDS!r} or {SLICES!r}")
        return self.shards if name == SHARDS else self._slices


def check_norms(module: nn.Module) -> None:
    """Refuse layers whose sums a reproducible run does not make exact.

    Raises:
        ConfigError: there is one.
    """
    if any(isinstance(each, _NormBase) for each in module.modules()):
        raise ConfigError(
            "reproducible=True with batch norm: the statistics of sharded models are added in the order of replicas; "
            "expected another norm"
        )


def reset_after_exception(module: nn.Module) -> None:
    """Give sharded modules their sharded parameters back after an exception in a forward or backward.

    The gradients of the interrupted micro-batch may have been added in part to the sharded ones, which stay as they
    are. Those of whole parameters, which torch's reset keeps for the next backward up to 2.14, are dropped.
    """
    sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
    found = [each for one in sharded for group in _groups_of(one._get_fsdp_state()) for each in group.fsdp_params]
    earlier = [each.sharded_param.grad for each in found]  # torch's reset drops them from 2.15 on
    for one in sharded:
        if one._get_fsdp_state()._is_root:  # known from the first forward on
            _reset(one)
    for each, grad in zip(found, earlier, strict=True):
        each.sharded_param.grad = grad
        if (whole := getattr(each, "_unsharded_param", None)) is not None:  # from the first gather on
            whole.grad = None
        if "unsharded_accumulated_grad" in vars(each):  # up to torch 2.14
            each.unsharded_accumulated_grad = None
        each.grad_offload_event = None


def _groups_of(state: Any) -> Sequence[Any]:
    """FSDP2's groups of a module's parameters; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reset_iter_state(module: FSDPModule) -> None:
    """Do what torch's method of this name does from 2.13 on; for torch 2.11 and 2.12.

    Args:
        module: the outermost sharded one, which has run.
    """
    state: Any = module._get_fsdp_state()
    context, shared, idle = state._comm_ctx, state._state_ctx, type(state._training_state).IDLE
    stream = state._device_handle.current_stream()
    events = [] if context.all_gather_state is None else [context.all_gather_state.event]
    context.all_gather_state = None
    if hasattr(context, "reduce_scatter_states"):
        events += [each.event for each in context.reduce_scatter_states]
        context.reduce_scatter_states.clear()
    elif context.reduce_scatter_state is not None:  # torch 2.11
        events.append(context.reduce_scatter_state.event)
        context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for each in shared.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = idle
        for group in _groups_of(each):
            events += _reset_group(group)
            group._training_state = idle
            group._to_sharded()
    for event in events:
        if event is not None:
            stream.wait_event(event)
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False


def _reset_group(group: Any) -> list[Any]:
    """Forget a group's collectives of an interrupted micro-batch; return the events that they end with."""
    events, gathered, summed = [group._post_reduce_event], group._all_gather_result, group._all_reduce_state
    if gathered is not None:
        events.append(gathered.all_gather_event)
        if isinstance(gathered.all_gather_work, dist.Work):
            gathered.all_gather_work.wait()
    if summed is not None:
        events.append(summed.event)
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    return events


_reset: Callable[[FSDPModule], None] = getattr(FSDPModule, "reset_iter_state", reset_iter_state)


def reshard(module: nn.Module) -> None:
    """Give modules their sharded parameters back that a forward without a backward has left gathered.

    FSDP2 leaves those of its root, which a next forward would use again without a look at the shards.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def sum_gradients(root: nn.Module) -> None:
    """Make FSDP2 add gradients over the shards without dividing them."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def region(tensor: DTensor, shard: int | None = None) -> tuple[slice, ...]:
    """Return the place in the whole of a worker's part of a tensor.

    Tensor parallelism divides first, and FSDP2 then divides each part; both do so as `torch.chunk`.

    Args:
        tensor: divided.
        shard: of the worker; None: this one.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if shard is not None:
        lane, part = divmod(shard, mesh.slices if isinstance(mesh, _GroupsMesh) else 1)
        place = tuple(part if name == SLICES else lane for name in mesh.mesh_dim_names or (SHARDS,))
    assert place is not None, "this worker is in its replica's mesh"
    found = [slice(0, size) for size in tensor.shape]
    for dimension in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[dimension]
        if placement.is_replicate():
            continue
        own = found[placement.dim]
        most = -(-(own.stop - own.start) // mesh.size(dimension))
        first = own.start + most * place[dimension]
        found[placement.dim] = slice(min(first, own.stop), min(first + most, own.stop))
    return tuple(found)


def is_divided_as_expected(tensor: DTensor) -> bool:
    """Whether FSDP2 divides a parameter along the first axis, on a mesh of this module, and tensor parallelism evenly
    along any axis, or not at all.
    """
    mesh, (first, *others) = tensor.device_mesh, tensor.placements
    is_first = isinstance(first, Shard | placement_types._StridedShard) and first.dim == 0
    known = isinstance(mesh, _GroupsMesh) and (mesh.mesh_dim_names or ())[:1] == (SHARDS,)
    return known and is_first and all(isinstance(each, Shard | Replicate) for each in others)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 divides a tensor; all lanes of a replica have the others."""
    if not isinstance(tensor, DTensor):
        return False
    names = zip(tensor.device_mesh.mesh_dim_names or (SHARDS,), tensor.placements, strict=True)
    return any(name == SHARDS and not placement.is_replicate() for name, placement in names)


def is_sliced(tensor: DTensor) -> bool:
    """Whether tensor parallelism divides a tensor."""
    names = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return any(name == SLICES and not placement.is_replicate() for name, placement in names)


def holds_first(tensor: DTensor, shard: int | None = None) -> bool:
    """Whether a worker is the first one of its replica that holds its part of a tensor; ``shard`` as of `region`."""
    mesh = tensor.device_mesh
    if not isinstance(mesh, _GroupsMesh):
        return True
    lane, part = (mesh.lane, mesh.slice) if shard is None else divmod(shard, mesh.slices)
    return (is_sharded(tensor) or lane == 0) and (is_sliced(tensor) or part == 0)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this worker holds; it shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_shard(tensor: torch.Tensor, part: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor that is divided as another one is, of which this worker holds ``part``.

    Args:
        tensor: the other one.
        part: this worker's.
        shape: of the whole, e.g. of an optimizer's state. If it is another one, the lanes have some rows each.
    """
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements, stride = tensor.device_mesh, tensor.placements, tensor.stride()
    if shape is not None and torch.Size(shape) != tensor.shape:
        names = mesh.mesh_dim_names or (SHARDS,)
        placements = tuple(Shard(0) if name == SHARDS else Replicate() for name in names)
        stride = torch.empty(shape, device="meta").stride()
    size = tensor.shape if shape is None else torch.Size(shape)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


def local_shards(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The `local_shard` of each tensor."""
    return [local_shard(tensor) for tensor in tensors]
