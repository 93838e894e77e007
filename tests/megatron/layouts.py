"""Scenarios: a checkpoint is written in one layout and loaded in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import plain
import torch.distributed as dist

from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron import checkpoint, shim, toy

if TYPE_CHECKING:
    from pathlib import Path

MICRO_BATCHES = 8


def _training(
    rank: int, world: int, folder: Path, tp: int, pp: int, zero1: bool, seed: int, bf16: bool
) -> plain.Training:
    shim.install()
    plain.start(rank, world, folder, tp=tp, pp=pp)
    return plain.build(toy.Toy(bf16=bf16), zero1=zero1, seed=seed)


def save(
    rank: int, world: int, folder: Path, *, path: str, tp: int, pp: int, zero1: bool, bf16: bool = False
) -> list[float]:
    """Train two steps, write a checkpoint (twice), and train two more steps; return the latter's gradient norms."""
    training = _training(rank, world, folder, tp, pp, zero1, 1234, bf16)
    for number in range(2):
        training.step(number, MICRO_BATCHES)
    for text in ("first", "second"):
        checkpoint.save(path, [training.ddp], training.optimizer, {"loops": {"steps": 2}, "text": text})
    norms = [training.step(number, MICRO_BATCHES) for number in (2, 3, 4)]
    dist.destroy_process_group()
    return norms


def load(
    rank: int, world: int, folder: Path, *, path: str, tp: int, pp: int, zero1: bool, bf16: bool = False
) -> dict[str, Any]:
    """Build a fresh model with other values, load the checkpoint, and train the same two steps."""
    training = _training(rank, world, folder, tp, pp, zero1, 99, bf16)
    try:
        checkpoint.load(f"{path}-elsewhere", [training.ddp], training.optimizer)
    except ConfigError as error:
        refused = str(error)
    rest = checkpoint.load(path, [training.ddp], training.optimizer)
    assert rest == checkpoint.rest(path)
    groups = [group for part in training.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    assert not any("step" in group for group in groups), "torch's Adam would leave that count as it is"
    norms = [training.step(number, MICRO_BATCHES) for number in (2, 3, 4)]
    dist.destroy_process_group()
    return {"norms": norms, "rest": rest, "refused": refused}


def load_refused(rank: int, world: int, folder: Path, *, path: str, zero1: bool = False) -> str:
    """Load a checkpoint that was changed, or is of another optimizer; return the error."""
    training = _training(rank, world, folder, 1, 1, zero1, 99, False)
    try:
        checkpoint.load(path, [training.ddp], training.optimizer)
    except ConfigError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "loaded"
