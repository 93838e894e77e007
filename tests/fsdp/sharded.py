"""Scenarios: worlds of replicas of an FSDP2 model, without Lightning and without a coordinator."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from unicron_lightning.fsdp.folder import whole_parameters
from unicron_lightning.fsdp.mesh import ShardGroup, local_shards, shard_mesh, sum_gradients
from unicron_lightning.fsdp.model import FsdpShard
from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.layout import Shape
from unicron_lightning.strategies.fsdp.parallel import PolicyPrecision, Sharding, shard_module
from unicron_lightning.worker import codec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")
DEATH = 9
ROWS = 6
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Linear(15, 16), nn.GELU(), nn.Linear(16, 4))


def samples(micro_batch: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(micro_batch))


def loss_of(net: nn.Module, micro_batch: int) -> Tensor:
    value: Tensor = net(samples(micro_batch)).square().mean()
    return value


def by_layer(net: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> None:
    """Shard layer by layer; with a policy, the whole returns float32."""
    policy = policy or MixedPrecisionPolicy()
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=replace(policy, output_dtype=policy.reduce_dtype))


class Replica:
    """A worker with its shard, in epochs that the test makes."""

    def __init__(
        self, folder: Path, shards: int, shard: int, divide: Callable[[nn.Module, DeviceMesh], None] | None = None
    ) -> None:
        self.folder, self.shards, self.shard = folder, shards, shard
        self.group = ShardGroup(shard, shards)
        net = model()
        mesh = shard_mesh(self.group, CPU)
        (divide or by_layer)(net, mesh)
        sum_gradients(net)
        self.net = net
        self.shard_model = FsdpShard(net, self.group, torch.optim.AdamW(net.parameters(), lr=1e-2))
        self.channels: Channels | None = None

    def enter(self, epoch: int, replicas: int, place: int, *, carried: bool = False) -> None:
        """Connect to the members of an epoch."""
        shape = Shape(tensor=self.shards, replicas=replicas, sharded=True)
        store = dist.FileStore(str(self.folder / f"epoch{epoch}"), -1)
        old = self.channels
        kept = old.inner if carried and old is not None else None
        self.channels = Channels(shape.grid(replicas=replicas, place=place, shard=self.shard), store, "127.0.0.1", kept)
        self.channels.adopted = True
        if old is not None:
            old.close()
        self.shard_model.adopt(self.channels)

    def rows(self, rows: range | list[int], total: int, die_at: int | None = None) -> None:
        """Run forward and backward of this shard's micro-batch of each row."""
        for row in rows:
            if row == die_at:
                inner: Any = self.net[2]
                inner.register_full_backward_pre_hook(lambda *_: os._exit(DEATH))
            (loss_of(self.net, row * self.shards + self.shard) / total).backward()

    def step(self) -> None:
        self.shard_model.gradients.reduce()
        self.shard_model.finalize()
        self.shard_model.update()

    def parameters(self) -> list[list[float]]:
        return [each.detach().flatten().tolist() for each in local_shards(self.net.parameters())]

    def close(self) -> None:
        self.shard_model.close()
        if self.channels is not None:
            self.channels.close()
            for group in self.channels.inner.values():
                group.close()


def reference(shards: int, shard: int, steps: int) -> tuple[list[Tensor], list[float]]:
    """This shard's parts of the parameters after some steps in one process, and the norms of the gradients."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(ROWS * shards):
            (loss_of(net, micro_batch) / (ROWS * shards)).backward()
        norms.append(
            float(torch.stack([each.grad.norm() for each in net.parameters() if each.grad is not None]).norm())
        )
        optimizer.step()
    chunks = [each.detach().chunk(shards, 0) for each in net.parameters()]
    return [parts[shard] if shard < len(parts) else parts[0][:0] for parts in chunks], norms


def difference(replica: Replica, steps: int) -> float:
    expected, norms = reference(replica.shards, replica.shard, steps)
    assert abs(norms[-1] - replica.shard_model.grad_norm) < 1e-5
    pairs = zip(local_shards(replica.net.parameters()), expected, strict=True)
    return max([float((own.detach() - part).abs().max()) for own, part in pairs if own.numel()], default=0.0)


def offloaded(net: nn.Module, mesh: DeviceMesh) -> None:
    """Shard with an offload policy, which has nothing to do on a CPU."""
    for module in (*net.children(), net):
        if next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def two_steps(rank: int, world: int, folder: Path, shards: int, *, offloads: bool = False) -> Any:
    """Undisturbed; each replica runs a part of the rows in two calls."""
    place, shard = divmod(rank, shards)
    replicas = world // shards
    replica = Replica(folder, shards, shard, offloaded if offloads else None)
    replica.enter(1, replicas, place)
    replica.shard_model.unify()
    for _ in range(2):
        replica.shard_model.begin()
        mine = list(range(ROWS))[place::replicas]
        replica.rows(mine[:1], ROWS * shards)
        with replica.shard_model.gradients.apart():
            replica.rows(mine[1:], ROWS * shards)
        replica.step()
    found = difference(replica, 2)
    replica.close()
    return [found, replica.parameters()]


def partner_dies(rank: int, world: int, folder: Path) -> Any:
    """Two replicas of two: in the second step rank 3 dies in a backward. Its row is run by the other replica, and later
    rank 4 takes its place in memory, and all do a third step.
    """
    born_later = rank == 4
    place, shard = divmod(3 if born_later else rank, 2)
    replica = Replica(folder, 2, shard)
    error = None
    if not born_later:
        replica.enter(1, 2, place)
        replica.shard_model.unify()
        replica.shard_model.begin()
        replica.rows(list(range(ROWS))[place::2], ROWS * 2)
        replica.step()
        replica.shard_model.begin()
        try:
            replica.rows(list(range(ROWS))[place::2], ROWS * 2, die_at=3 if rank == 3 else None)
        except RuntimeError as caught:
            error = type(caught).__name__
        if place == 0:
            with replica.shard_model.gradients.apart():
                replica.enter(2, 1, 0, carried=True)
                replica.rows([1, 3, 5], ROWS * 2)
            replica.step()
    # The third epoch has all four again; the broken replica's survivor has the parameters of the first step.
    replica.enter(3, 2, place, carried=place == 0)
    own = codec.encode(replica.shard_model.plain_state())
    if place == 1:
        replica.shard_model.begin()
    assert replica.channels is not None
    size = torch.tensor(len(own))
    replica.channels.same_shard.broadcast(size, 0)
    sent = torch.frombuffer(bytearray(own.ljust(int(size))[: int(size)]), dtype=torch.uint8)
    replica.channels.same_shard.broadcast(sent, 0)
    if place == 1:
        replica.shard_model.load_state(codec.decode(sent.numpy().tobytes()))
    replica.shard_model.begin()
    replica.rows(list(range(ROWS))[place::2], ROWS * 2)
    replica.step()
    found = difference(replica, 3)
    result = [found, error, replica.parameters()]
    replica.close()
    return result


def recovered_sums(rank: int, world: int, folder: Path) -> Any:
    """A reduction over two replicas is repeated from the kept sums."""
    replica = Replica(folder, 1, 0)
    replica.enter(1, 2, rank)
    replica.shard_model.begin()
    replica.rows([rank], 2)
    own = [each.grad.to_local().clone() for each in replica.net.parameters()]  # type: ignore[union-attr]
    found = []
    for _ in range(2):
        replica.shard_model.gradients.reduce()
        found.append([each.grad.to_local().flatten().tolist() for each in replica.net.parameters()])  # type: ignore[union-attr]
        replica.shard_model.recover(0)
        same = [torch.equal(a, b.grad.to_local()) for a, b in zip(own, replica.net.parameters(), strict=True)]  # type: ignore[union-attr]
        assert all(same)
    time.sleep(0.1)
    replica.close()
    return found


def another_fit(rank: int, world: int, folder: Path) -> Any:
    """A state is loaded in its fit and in the next one: difference of parameters, entries and rate of the optimizer."""
    replica, found = Replica(folder, 1, 0), []
    shard = replica.shard_model
    replica.enter(1, 1, 0)
    shard.begin()
    replica.rows(range(ROWS), ROWS)
    replica.step()
    earlier = codec.decode(codec.encode(shard.plain_state()))
    for optimizer in (None, torch.optim.AdamW(replica.net.parameters(), lr=1.0)):
        if optimizer is not None:
            shard.begin_fit(optimizer)
        for each in replica.net.parameters():
            nn.init.zeros_(each)
        shard.load_state(earlier)
        assert shard.optimizer is not None
        found.append([difference(replica, 1), len(shard.optimizer.state), shard.optimizer.param_groups[0]["lr"]])
    replica.close()
    return found


def idle_after_validation(rank: int, world: int, folder: Path, *, reshards: bool) -> Any:
    """Two replicas of two: after a validation one of them has no row in a step; all run rows of the next one."""

    def divide(net: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(net.get_submodule("0"), mesh=mesh, reshard_after_forward=reshards)
        fully_shard(net, mesh=mesh, reshard_after_forward=reshards)  # FSDP2's root, with the other layers

    place, shard = divmod(rank, 2)
    replica = Replica(folder, 2, shard, divide)
    replica.enter(1, 2, place)
    replica.shard_model.unify()
    with torch.no_grad():
        loss_of(replica.net, 0)
    for shares in ([list(range(ROWS)), []], [[0, 1, 2], [3, 4, 5]]):
        replica.shard_model.begin()
        replica.rows(shares[place], ROWS * 2)
        replica.step()
    found = difference(replica, 2)
    replica.close()
    return found


def beside_plain_fsdp(rank: int, world: int, folder: Path) -> Any:
    """One replica in mixed precision, sharded by the strategy's own rules, beside FSDP2 alone with the default group;
    then a plain model takes the replica's whole tensors.
    """
    module = pl.LightningModule()

    def divide(net: nn.Module, mesh: DeviceMesh) -> None:
        module.net = net
        plugin = shard_module(module, mesh, Sharding(blocks=("Linear",)), MixedPrecision("bf16-mixed", "cpu"))
        assert isinstance(plugin, PolicyPrecision)

    replica = Replica(folder, world, rank, divide)
    replica.enter(1, 1, 0)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "plain"), world), rank=rank, world_size=world)
    nets = [model() for _ in range(2)]
    for net, policy in zip(nets, (BF16, None), strict=True):
        by_layer(net, init_device_mesh("cpu", (world,)), policy)
    plain, other = nets
    sum_gradients(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(2):
        replica.shard_model.begin()
        replica.rows(range(ROWS), ROWS * world)
        replica.step()
        optimizer.zero_grad()
        for row in range(ROWS):
            (loss_of(plain, row * world + rank) / (ROWS * world)).backward()
        optimizer.step()
    own = codec.encode(replica.shard_model.plain_state())
    shards = [codec.decode(part)["tensors"] for part in replica.group.collect(own)]
    whole = whole_parameters(replica.net, shards) if shards else {}
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    found = [replica.parameters()]
    found += [[each.detach().flatten().tolist() for each in local_shards(net.parameters())] for net in nets]
    dist.destroy_process_group()
    replica.close()
    return found
