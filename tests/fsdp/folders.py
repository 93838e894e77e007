"""Scenarios: states of some number of shards, as folders, files and in memory, that others read."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from unicron_lightning.checkpoints.files import digest_of
from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.checkpoints.saving import SaveFolder
from unicron_lightning.fsdp import folder
from unicron_lightning.fsdp.folder import (
    load_optimizer,
    load_parameters,
    shard_of,
    whole_optimizer,
    whole_parameters,
)
from unicron_lightning.fsdp.mesh import ShardGroup, local_shard, shard_mesh, with_local_shard
from unicron_lightning.fsdp.model import FsdpShard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CPU = torch.device("cpu")
SIZES = (1, 2, 3)
REST = {"global_step": 1, "lr_schedulers": [], "loops": {"a": 1}}


class Net(nn.Module):
    """Rows that two and three shards divide unequally, or not at all; tied, frozen, late and unused, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.inner, self.one = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 1)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.late, self.unused = nn.Linear(4, 3), nn.Linear(3, 2)
        self.inner.bias.requires_grad_(False)
        self.register_buffer("seen", torch.arange(3))


def groups_of(net: nn.Module) -> list[list[nn.Parameter]]:
    trained = [each for each in net.parameters() if each.requires_grad]
    return [[each for each in trained if each.dim() > 1], [each for each in trained if each.dim() == 1]]


def whole_run(net: nn.Module) -> torch.optim.AdamW:
    """Two steps of AdamW by known gradients, on whole parameters or this worker's shards; the first without `late`."""
    matrices, vectors = groups_of(net)
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))
    left = [list(net.unused.parameters()), list(net.late.parameters())]
    for step, without in enumerate(({*left[0], *left[1]}, {*left[0]})):
        for number, parameter in enumerate([*matrices, *vectors]):
            gradient = torch.sin(torch.arange(float(parameter.numel())) + number + step).view(parameter.shape)
            own = with_local_shard(parameter, shard_of(gradient, parameter))
            parameter.grad = None if parameter in without else own
        optimizer.step()
    return optimizer


def mesh_of(shard: int, shards: int) -> DeviceMesh:
    return shard_mesh(ShardGroup(shard, shards), CPU)


def sharded(mesh: DeviceMesh) -> Net:
    net = Net()
    fully_shard(net.inner, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def fresh(mesh: DeviceMesh) -> tuple[Net, torch.optim.AdamW]:
    """A sharded module of zeros, and its optimizer."""
    net = sharded(mesh)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            local_shard(tensor).zero_()
    return net, torch.optim.AdamW([{"params": group} for group in groups_of(net)], lr=9.0)


class Saving(SaveFolder):
    """Writes a folder with the ranks of torch's default group, or alone.

    Args:
        path: of the folder.
        shard: held by this rank; None: it is a spare.
        held: by this rank.
    """

    def __init__(self, path: Path, shard: int | None, held: HeldCheckpoint | None) -> None:
        self.done: list[str] = []
        names = [] if shard is None else [str(shard)]
        super().__init__(str(path), lambda: names, lambda: cast("HeldCheckpoint", held), self.done.append)

    def gather(self, engine: Any, data: bytes, about: str = "") -> list[bytes]:
        if not dist.is_initialized():
            return [data]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, data)
        return found

    def run(self, rank: int) -> str:
        world = SimpleNamespace(rank=rank, epoch=1)
        engine: Any = SimpleNamespace(world=world, position=1, step=0, fault=lambda *_: None)
        return self.attempt(engine).decode()


def alone(path: Path, net: nn.Module | None = None) -> None:
    """Write a folder as the only shard."""
    net = net or sharded(mesh_of(0, 1))
    saving = Saving(path, 0, folder.held_part(net, [whole_run(net)], 0, REST))
    assert saving.done == [saving.run(0)]


def check_shard(net: nn.Module, optimizer: torch.optim.Optimizer, *, plain: bool = False) -> None:
    """Compare this worker's shards with those of a step on whole parameters."""
    expected = Net()
    wanted, found = whole_run(expected).state_dict(), optimizer.state_dict()
    for (name, own), whole in zip(net.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(local_shard(own), shard_of(whole, own)), name
    assert found["param_groups"] == wanted["param_groups"]
    assert plain or found["state"].keys() == wanted["state"].keys()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, values in wanted["state"].items():
        own = {key: local_shard(value) for key, value in found["state"][number].items()}
        whole = {key: shard_of(value, parameters[number]) if value.dim() else value for key, value in values.items()}
        assert same(own, whole)


def same(values: dict[str, Any], expected: dict[str, Any]) -> bool:
    assert values.keys() == expected.keys()
    return all(
        torch.equal(value, expected[name]) if isinstance(value, Tensor) else value == expected[name]
        for name, value in values.items()
    )


def exchange(rank: int, world: int, root: Path) -> Any:
    """Each number of shards writes a folder and a file, each reads all; plain FSDP2 reads and writes a folder."""
    store = dist.FileStore(str(root / "plain"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    meshes = {size: mesh_of(rank, size) for size in SIZES if rank < size}
    for size in SIZES:
        held, path = None, root / f"by{size}"
        if rank < size:
            net = sharded(meshes[size])
            held = folder.held_part(net, [whole_run(net)], rank, REST)
        digest = Saving(path, rank if rank < size else None, held).run(rank)
        assert digest == digest_of(str(path))
        assert len(list(path.glob("__*.distcp"))) == size
    plain, trained = fresh(init_device_mesh("cpu", (world,)))
    state = {"state_dict": get_model_state_dict(plain), "optimizer_0": get_optimizer_state_dict(plain, trained)}
    partly = DefaultLoadPlanner(allow_partial_load=True)  # torch makes a state for parameters that are not used, too
    dcp.load(state, checkpoint_id=root / "by2", planner=partly)
    set_model_state_dict(plain, state["state_dict"])
    set_optimizer_state_dict(plain, trained, state["optimizer_0"])
    check_shard(plain, trained, plain=True)
    dcp.save(state, checkpoint_id=root / "plainly")
    for writer, size in product((*(f"by{size}" for size in SIZES), "plainly"), SIZES):
        if rank < size:
            net, optimizer = fresh(meshes[size])
            folder.load_module(root / writer, net)
            folder.load_optimizer_part(folder.read_optimizer_part(root / writer, net), net, optimizer)
            check_shard(net, optimizer, plain=writer == "plainly")
    for size in SIZES:
        exchange_states(rank, world, size, meshes)
    dist.destroy_process_group()


def exchange_states(rank: int, world: int, shards: int, meshes: Mapping[int, DeviceMesh]) -> None:
    """A number of shards makes a file's content, of which each takes its parts; a shard takes its own from memory."""
    states: list[Any] = [None] * world
    whole: list[Any] = [None]
    own: Any = None
    if rank < shards:
        net = sharded(meshes[shards])
        optimizer = whole_run(net)
        own = FsdpShard(net, ShardGroup(rank, shards), optimizer).plain_state()
        again, fresh_optimizer = fresh(meshes[shards])
        FsdpShard(again, ShardGroup(rank, shards), fresh_optimizer).load_plain(own)
        check_shard(again, fresh_optimizer)
    dist.all_gather_object(states, own)
    if rank == 0:
        tensors = whole_parameters(net, [each["tensors"] for each in states[:shards]])
        whole = [(tensors, whole_optimizer([each["optimizer"] for each in states[:shards]], optimizer))]
        expected = Net()
        assert same(whole[0][1]["state"][0], whole_run(expected).state_dict()["state"][0])
        assert same(tensors, expected.state_dict())
    dist.broadcast_object_list(whole)
    for mesh in meshes.values():
        net, optimizer = fresh(mesh)
        load_parameters(net, whole[0][0])
        load_optimizer(optimizer, whole[0][1], whole=True)
        check_shard(net, optimizer)
