"""Scenarios: data-parallel worlds with the distributed optimizer and mirrors, in which ranks die."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import plain
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from unicron_lightning.megatron import shim, toy
from unicron_lightning.megatron.sharded import ShardedOptimizer
from unicron_lightning.replica.mirror import Mirror, Redundancy, ShardsLost
from unicron_lightning.worker.communication.communicator import CommunicatorAborted, SoloCommunicator
from unicron_lightning.worker.communication.gloo import GlooCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MICRO_BATCHES = 6


def exchange(folder: Path, name: str, rank: int, world: int) -> Any:
    """A communicator over a file."""
    if world == 1:
        return SoloCommunicator()
    store = dist.FileStore(str(folder / name), world)
    return GlooCommunicator(store, rank, world, "127.0.0.1", timeout=timedelta(seconds=60))


class Rank:
    """One rank that trains, may die, and recovers with the surviving ones.

    Args:
        dying: original ranks.
    """

    def __init__(self, rank: int, world: int, folder: Path, dying: list[int], **options: Any) -> None:
        self.rank, self.world, self.folder, self.dying = rank, world, folder, dying
        shim.install()
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        pp, self.ep = options.pop("pp", 1), options.pop("ep", 1)
        plain.start(rank, world, folder, pp=pp, ep=self.ep, name="groups0")
        redundancy = Redundancy(**options.pop("redundancy", {}))
        experts = {"experts": 4, "router": {"moe_token_dispatcher_type": "alltoall"}} if self.ep > 1 else {}
        self.training = plain.build(toy.Toy(bf16=options.pop("bf16", False), **experts), zero1=True, **options)
        self.optimizer = ShardedOptimizer([self.training.ddp], self.training.optimizer)
        self.mirror = Mirror(self.optimizer, redundancy)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        place, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.mirror.join(exchange(folder, f"mirror0-{stage}", place, size))

    def step(self, number: int) -> None:
        """Run one step as a strategy does; the commit is a barrier here."""
        self.training.accumulate(number, MICRO_BATCHES)
        self.update()
        self.save(number + 1)
        dist.barrier()
        self.mirror.keep(number + 1)

    def update(self) -> None:
        """Run from the gradients of all to the parameters of all."""
        dist.barrier()
        plain.finalize_model_grads([self.training.ddp])
        self.training.optimizer.step()

    def save(self, version: int, prefix: str = "before") -> None:
        """Save this rank's part of the state, for `assembled`, and its parameters."""
        keep(self.optimizer, self.training, self.folder / f"{prefix}-{version}-{self.rank}.pt")

    def die(self) -> None:
        """Die as if killed from outside."""
        if self.rank in self.dying:
            os.kill(os.getpid(), signal.SIGKILL)

    def survivors(self) -> list[int]:
        """Wait until the planned deaths have happened; return the survivors."""
        for dying in self.dying:
            while not gone(int((self.folder / f"{dying}.pid").read_text())):
                time.sleep(0.01)
        return [rank for rank in range(self.world) if rank not in self.dying]

    def recover(self) -> tuple[int, ...]:
        """Make new groups without the dead ranks; return the versions that can be restored in them."""
        alive = self.survivors()
        self.mirror._exchange.abort("a rank has died")
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        plain.start(alive.index(self.rank), len(alive), self.folder, ep=self.ep, name="groups1")
        return self.mirror.survey(exchange(self.folder, "mirror1", alive.index(self.rank), len(alive)))

    def close(self) -> None:
        self.mirror.close()
        dist.destroy_process_group()


def keep(optimizer: ShardedOptimizer, training: plain.Training, path: Path) -> None:
    """Write a rank's shard and parameters, by their numbers."""
    data = torch.empty(3, sum(map(len, optimizer.pieces)))
    optimizer.read(data)
    numbers = optimizer._numbers
    parameters = {numbers[each]: each.detach().clone() for each in training.ddp.module.parameters()}
    pieces = [(piece.parameter, piece.start, piece.stop) for piece in optimizer.pieces]
    torch.save({"pieces": pieces, "data": data, "parameters": parameters, "steps": optimizer.counts}, path)


def gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assembled(folder: Path, prefix: str, version: int, ranks: list[int]) -> dict[str, Tensor]:
    """The whole state from the ranks' parts, with the check that each element comes from one rank only."""
    saved = [torch.load(folder / f"{prefix}-{version}-{rank}.pt") for rank in ranks]
    parameters: dict[int, Tensor] = {}
    for part in saved:
        for number, parameter in part["parameters"].items():
            assert torch.equal(parameter, parameters.setdefault(number, parameter)), "parameters differ between ranks"
    state: dict[str, Tensor] = {}
    for part in saved:
        position = 0
        for number, start, stop in part["pieces"]:
            size = parameters[number].numel()
            whole = state.setdefault(f"state{number}", torch.full((3, size), float("nan")))
            assert whole[:, start:stop].isnan().all()
            whole[:, start:stop] = part["data"][:, position : position + stop - start]
            position += stop - start
    assert not any(whole.isnan().any() for whole in state.values())
    return state | {f"parameter{n}": p for n, p in parameters.items()} | {"steps": saved[0]["steps"]}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states are bitwise equal."""
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one
    )


def killed(rank: int, world: int, folder: Path, *, when: str, dying: list[int], **options: Any) -> dict[str, Any]:
    """Scenario: two steps, then ranks die at some moment; the others restore the state and continue training."""
    me = Rank(rank, world, folder, dying, **options)
    me.mirror.keep(0)
    me.step(0)
    me.step(1)
    kept = MOMENTS[when](me)
    found = me.recover()
    if not found:
        try:
            me.mirror.restore(2)
        except ShardsLost as error:
            return {"versions": found, "lost": str(error)}
    me.mirror.restore(found[0])
    me.save(found[0], "after")
    dist.barrier()
    alive = me.survivors()
    exact = equal(
        assembled(folder, "before", found[0], list(range(world))), assembled(folder, "after", found[0], alive)
    )
    gradients = kept is None or all(
        torch.equal(old, p.main_grad) for old, p in zip(kept, me.training.ddp.module.parameters(), strict=True)
    )
    me.mirror.keep(found[0])
    norms = [me.training.step(number, MICRO_BATCHES) for number in range(found[0], found[0] + 2)]
    me.close()
    return {"versions": found, "exact": exact, "gradients": gradients, "norms": norms}


def grown(rank: int, world: int, folder: Path, *, founders: int) -> dict[str, Any]:
    """Scenario: some ranks train; the others have built their model separately, and join without any state."""
    shim.install()
    joins = rank >= founders
    alone = f"-{rank}" if joins else ""
    size = 1 if joins else founders
    plain.start(0 if joins else rank, size, folder, name=f"groups0{alone}")
    training = plain.build(toy.Toy(), zero1=True, seed=99 if joins else 1234)
    mirror = Mirror(optimizer := ShardedOptimizer([training.ddp], training.optimizer), Redundancy(copies=0))
    if not joins:
        mirror.join(exchange(folder, "mirror0", rank, founders))
        mirror.keep(0)
        for number in range(2):
            training.step(number, MICRO_BATCHES)
            mirror.keep(number + 1)
        keep(optimizer, training, folder / f"before-2-{rank}.pt")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    plain.start(rank, world, folder, name="groups1")
    found = mirror.survey(exchange(folder, "mirror1", rank, world))
    mirror.restore(found[0])
    keep(optimizer, training, folder / f"after-2-{rank}.pt")
    dist.barrier()
    exact = equal(
        assembled(folder, "before", 2, list(range(founders))), assembled(folder, "after", 2, list(range(world)))
    )
    mirror.keep(found[0])
    for bucket in [bucket for group in training.ddp.bucket_groups for bucket in group.buckets]:
        bucket.gradient_scaling_factor = 1 / world  # kept from before; the caller adapts it to a group's size
    norms = [training.step(number, MICRO_BATCHES) for number in (2, 3)]
    mirror.close()
    dist.destroy_process_group()
    return {"versions": found, "exact": exact, "norms": norms}


def laid_out(rank: int, world: int, folder: Path, **ddp_options: Any) -> bool:
    """Scenario: the layout changes while the graph of an interrupted step is alive; whether gradients are as before."""
    shim.install()
    plain.start(rank, world, folder)
    training = plain.build(toy.Toy(), zero1=True, **ddp_options)
    optimizer = ShardedOptimizer([training.ddp], training.optimizer)
    gradients = []
    interrupted = toy.forward(training.ddp, next(training.batches(range(1))))
    for _ in range(3):
        training.accumulate(0, MICRO_BATCHES)
        plain.finalize_model_grads([training.ddp])
        gradients.append([parameter.main_grad.clone() for parameter in training.ddp.module.parameters()])
        optimizer.lay_out(optimizer.groups)
    del interrupted
    dist.destroy_process_group()
    return all(torch.equal(one, other) for each in gradients[1:] for one, other in zip(gradients[0], each, strict=True))


def staged(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Scenario: two stages on two replicas; one replica dies, and its last copies have arrived in one stage only."""
    me = Rank(rank, world, folder, [], pp=2)
    replica = parallel_state.get_data_parallel_rank()
    me.mirror.keep(0)
    me.step(0)
    me.step(1)
    dist.barrier()
    if rank in (0, 1):  # the first stage
        me.mirror.keep(3)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    if replica == 1:
        return {}
    plain.start(rank // 2, 2, folder, pp=2, name="groups1")
    survey = me.mirror.survey(SoloCommunicator())
    told: list[Any] = [None, None]
    dist.all_gather_object(told, survey)
    version = max(set.intersection(*map(set, told)))
    me.mirror.restore(version)
    me.save(version, "after")
    stage = [rank, rank + 1]
    exact = equal(assembled(folder, "before", version, stage), assembled(folder, "after", version, [rank]))
    me.close()
    return {"surveys": told, "version": version, "exact": exact}


def _in_backward(me: Rank) -> list[Tensor]:
    """During the accumulation of gradients."""
    me.training.accumulate(2, MICRO_BATCHES)
    me.die()
    return [parameter.main_grad.clone() for parameter in me.training.ddp.module.parameters()]


def _in_optimizer(me: Rank) -> None:
    """After its own part of the optimizer step, before parameters are gathered; other ranks have stepped as well."""
    me.training.accumulate(2, MICRO_BATCHES)
    adam = me.training.optimizer.chained_optimizers[0].optimizer
    hook = adam.register_step_post_hook(lambda *_: me.die())
    with contextlib.suppress(RuntimeError):
        me.update()
    hook.remove()


def _in_reduce_scatter(me: Rank) -> None:
    """The backward pass has started the reductions of several buckets; one is done."""
    me.training.accumulate(2, MICRO_BATCHES)
    groups = me.training.ddp.bucket_groups
    assert len(groups) > 2
    with contextlib.suppress(RuntimeError):
        groups[0].grad_reduce_handle.wait()
        me.die()
        for group in groups[1:]:
            group.grad_reduce_handle.wait()
    me.survivors()


def _before_the_copies(me: Rank) -> None:
    """A third step is committed; its copies never leave the dying rank."""
    me.training.accumulate(2, MICRO_BATCHES)
    me.update()
    me.save(3)
    dist.barrier()
    me.die()
    me.survivors()
    with contextlib.suppress(CommunicatorAborted):
        me.mirror.keep(3)


MOMENTS: dict[str, Callable[[Rank], list[Tensor] | None]] = {
    "backward": _in_backward,
    "reduce-scatter": _in_reduce_scatter,
    "optimizer": _in_optimizer,
    "before the copies": _before_the_copies,
}
