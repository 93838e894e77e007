"""Scenarios: worlds of replicas of an FSDP2 model, without Lightning and without a coordinator."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from unicron_lightning.fsdp.grid import ShardedShape
from unicron_lightning.fsdp.mesh import ShardGroup, local_shards, shard_mesh, sum_gradients
from unicron_lightning.fsdp.model import FsdpShard
from unicron_lightning.replica.channels import Channels

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
DEATH = 9
ROWS = 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Linear(15, 16), nn.GELU(), nn.Linear(16, 4))


def samples(micro_batch: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(micro_batch))


def loss_of(net: nn.Module, micro_batch: int) -> Tensor:
    value: Tensor = net(samples(micro_batch)).square().mean()
    return value


class Replica:
    """A worker with its shard, in epochs that the test makes."""

    def __init__(self, folder: Path, shards: int, shard: int) -> None:
        self.folder, self.shards, self.shard = folder, shards, shard
        self.group = ShardGroup(shard, shards)
        net = model()
        mesh = shard_mesh(self.group, CPU)
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        sum_gradients(net)
        self.net = net
        self.shard_model = FsdpShard(net, self.group, torch.optim.AdamW(net.parameters(), lr=1e-2))
        self.channels: Channels | None = None

    def enter(self, epoch: int, replicas: int, place: int, *, carried: bool = False) -> None:
        """Connect to the members of an epoch."""
        shape = ShardedShape(shards=self.shards, replicas=replicas)
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


def two_steps(rank: int, world: int, folder: Path, shards: int) -> Any:
    """Undisturbed; each replica runs a part of the rows in two calls."""
    place, shard = divmod(rank, shards)
    replicas = world // shards
    replica = Replica(folder, shards, shard)
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
    data = replica.shard_model.state() if place == 0 else None
    if place == 1:
        replica.shard_model.begin()
    received = _send(replica, data)
    if place == 1:
        replica.shard_model.load_state(received)
    replica.shard_model.begin()
    replica.rows(list(range(ROWS))[place::2], ROWS * 2)
    replica.step()
    found = difference(replica, 3)
    result = [found, error, replica.parameters()]
    replica.close()
    return result


def _send(replica: Replica, data: bytes | None) -> bytes:
    assert replica.channels is not None
    peers = replica.channels.same_shard
    size = torch.tensor([0 if data is None else len(data)])
    peers.broadcast(size, 0)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if data is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    peers.broadcast(buffer, 0)
    return buffer.numpy().tobytes()


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
        replica.shard_model.recover()
        same = [torch.equal(a, b.grad.to_local()) for a, b in zip(own, replica.net.parameters(), strict=True)]  # type: ignore[union-attr]
        assert all(same)
    time.sleep(0.1)
    replica.close()
    return found
