"""Scenarios: a checkpoint is written in one layout and loaded in another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import plain
import theirs
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from unicron_lightning.checkpoints.files import digest_of
from unicron_lightning.checkpoints.messages import VersionWritten, WriteVersion
from unicron_lightning.checkpoints.pieces import part_writers, stage
from unicron_lightning.checkpoints.storage import storage_of
from unicron_lightning.checkpoints.writer import WritingVersion
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron import checkpoint, shim, toy
from unicron_lightning.megatron.sharded import ShardedOptimizer
from unicron_lightning.replica.mirror import ROWS, Holding, Stored
from unicron_lightning.shared_memory import MemoryPool

if TYPE_CHECKING:
    from pathlib import Path

MICRO_BATCHES = 8
ROUTER = {
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def _training(
    rank: int,
    world: int,
    folder: Path,
    tp: int,
    pp: int,
    zero1: bool,
    seed: int,
    bf16: bool,
    ep: int = 0,
) -> plain.Training:
    """Build the training; with ``ep`` the model has experts, which so many workers divide."""
    shim.install()
    torch.compiler.set_stance("force_eager")
    plain.start(rank, world, folder, tp=tp, pp=pp, ep=ep or 1)
    experts = {"experts": 4, "router": ROUTER, "sequence_parallel": tp > 1} if ep else {}
    # Of this size, a bucket is padded that the tied embedding's follows.
    return plain.build(toy.Toy(hidden=24, length=8, bf16=bf16, **experts), zero1=zero1, seed=seed)


def save(
    rank: int, world: int, folder: Path, *, path: str, tp: int, pp: int, zero1: bool, bf16: bool = False, ep: int = 0
) -> list[float]:
    """Train two steps, write a checkpoint as Megatron does, and train three more; return their gradients' norms."""
    training = _training(rank, world, folder, tp, pp, zero1, 1234, bf16, ep)
    for number in range(2):
        training.step(number, MICRO_BATCHES)
    theirs.save(path, training.ddp, training.optimizer, {"loops": {"steps": 2}, "text": "second"})
    norms = [training.step(number, MICRO_BATCHES) for number in (2, 3, 4)]
    dist.destroy_process_group()
    return norms


def load(
    rank: int, world: int, folder: Path, *, path: str, tp: int, pp: int, zero1: bool, bf16: bool = False, ep: int = 0
) -> dict[str, Any]:
    """Build a fresh model with other values, load the checkpoint, and train the same two steps."""
    training = _training(rank, world, folder, tp, pp, zero1, 99, bf16, ep)
    try:
        checkpoint.load_folder(f"{path}-elsewhere", [training.ddp], training.optimizer)
    except ConfigError as error:
        refused = str(error)
    checkpoint.load_folder(path, [training.ddp], training.optimizer)
    groups = [group for part in training.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    assert not any("step" in group for group in groups), "torch's Adam would leave that count as it is"
    norms = [training.step(number, MICRO_BATCHES) for number in (2, 3, 4)]
    dist.destroy_process_group()
    return {"norms": norms, "rest": checkpoint.rest(path), "refused": refused}


def load_refused(rank: int, world: int, folder: Path, *, path: str, zero1: bool = False) -> str:
    """Load a checkpoint that was changed, or is of another optimizer; return the error."""
    training = _training(rank, world, folder, 1, 1, zero1, 99, False)
    try:
        checkpoint.load_folder(path, [training.ddp], training.optimizer)
    except ConfigError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "loaded"


def save_beside(
    rank: int, world: int, folder: Path, *, path: str, tp: int, pp: int, zero1: bool, bf16: bool = False, ep: int = 0
) -> list[float]:
    """As `save`, and write the same checkpoint at PATH-beside without communication, as writer processes do."""
    training = _training(rank, world, folder, tp, pp, zero1, 1234, bf16, ep)
    for number in range(2):
        training.step(number, MICRO_BATCHES)
    rest = {"loops": {"steps": 2}, "text": "second"}
    theirs.save(path, training.ddp, training.optimizer, rest)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    lane = parallel_state.get_expert_model_parallel_rank()
    place = lane + max(ep, 1) * parallel_state.get_pipeline_model_parallel_rank()
    shard = str(parallel_state.get_tensor_model_parallel_rank() + tp * place)
    copies = None
    if zero1:
        optimizer = ShardedOptimizer([training.ddp], training.optimizer)
        pieces = optimizer.pieces
        data = torch.empty(ROWS, sum(map(len, pieces)))
        optimizer.read(data)
        stored = Stored(holding=Holding(version=2, pieces=pieces), data=data, layout=1)
        copies = {f"{shard} optimizer {replica}/{replicas}": stored}
    held = checkpoint.held_checkpoint([training.ddp], training.optimizer, rest, shard, copies)
    names = [*(copies or {}), shard]
    told: list[Any] = [None] * world
    dist.all_gather_object(told, names)
    writers = part_writers(told, [("", "")] * world, 0)
    order = WriteVersion(
        number=1, name="v", path=f"{path}-beside", rank=rank, holders=list(writers.values()), seconds=60.0
    )
    order, memories = stage(MemoryPool(), order, list(writers), held)
    version = WritingVersion(order, [each.content for each in memories], storage_of(order.path, order.name))
    while (outcome := version.advance()) is None:
        time.sleep(0.05)
    assert outcome == VersionWritten(number=1, digest=digest_of(order.path)), outcome
    norms = [training.step(number, MICRO_BATCHES) for number in (2, 3, 4)]
    dist.destroy_process_group()
    return norms
