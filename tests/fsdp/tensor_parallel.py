"""A script for Lightning's ModelParallelStrategy with FSDP2 and tensor parallelism; only `strategy=` differs.

    torchrun ... tensor_parallel.py FOLDER [plain]

Its words, blocks and norm are parallel along the sequence, too, its loss over the words; the second of its blocks is a
mixture of experts, each on one worker of a lane. With ``plain`` it runs
under Lightning's own strategy, and then resumes the other run's checkpoints, at their last step. The whole parameters
are saved to FOLDER/NAME.ckpt; those of ``unicron_fsdp`` as a folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from experts import DividedExperts, Experts

from unicron_lightning import UnicronFSDPStrategy

WIDTH, WORDS, LENGTH, STEPS = 8, 16, 7, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), Experts(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.experts(self.norm(x))
        return out


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Mixture()])
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(self.norm(x))
        return logits


def parallelize(model: Language, device_mesh: DeviceMesh) -> None:
    """Divide words and hidden features within a lane, and the rest of the layers along the sequence; then shard."""
    lane, lanes = device_mesh["tensor_parallel"], device_mesh["data_parallel"]
    if lane.size() > 1:
        whole = {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, lane, whole)
        for layer in model.layers:
            plan: dict[str, ParallelStyle] = {
                "norm": SequenceParallel(use_local_output=True),
                "experts": DividedExperts(Shard(1)),
            }
            if isinstance(layer, Layer):
                plan = {
                    "norm": SequenceParallel(),
                    "up": ColwiseParallel(input_layouts=Shard(1)),
                    "down": RowwiseParallel(output_layouts=Shard(1)),
                }
            parallelize_module(layer, lane, plan)
    if lanes.size() > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=lanes)
        fully_shard(model, mesh=lanes)


class Training(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Language()

    def configure_model(self) -> None:
        parallelize(self.model, self.device_mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=True)

    def _loss(self, batch: Any) -> Tensor:
        [words] = batch
        with loss_parallel():
            return nn.functional.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Kill(pl.Callback):
    """Kills the rank in FOLDER/kill at a step of the complete world."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._mark, self._workers = folder / "kill", workers

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        try:
            victim = int(self._mark.read_text())
        except FileNotFoundError:  # the victim may remove it between two calls of another rank
            return
        if trainer.world_size == self._workers and trainer.global_step >= 3 and trainer.global_rank == victim:
            self._mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(folder: Path, settings: dict[str, int], *, plain: bool) -> pl.Trainer:
    shards, slices, replicas = settings["shards"], settings["slices"], settings["replicas"]
    workers, lanes = shards * slices * replicas, shards * replicas
    theirs = {"data_parallel_size": lanes, "tensor_parallel_size": slices}
    ours = {"shard_size": shards, "tensor_parallel_size": slices}
    strategy: Any = (
        ModelParallelStrategy(**theirs, save_distributed_checkpoint=False)  # type: ignore[arg-type]
        if plain
        else UnicronFSDPStrategy(**ours, save_distributed_checkpoint=True)  # type: ignore[arg-type]
    )
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=workers if plain else 1,
        num_nodes=1 if plain else workers,
        accumulate_grad_batches=2,
        max_steps=STEPS,
        val_check_interval=4,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Kill(folder, workers)],
    )


def main() -> None:
    folder, plain = Path(sys.argv[1]), sys.argv[2:] == ["plain"]
    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(3, verbose=False)
    words = torch.randint(WORDS, (512, LENGTH), generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(words), batch_size=2)
    name = "plain" if plain else "ours"
    trainer = trainer_of(folder, settings, plain=plain)
    trainer.fit(Training(), data, data)
    (folder / f"{name}-{trainer.global_rank}.json").write_text(
        json.dumps({key: float(value) for key, value in trainer.callback_metrics.items()})
    )
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    if plain:
        trainer = trainer_of(folder, settings, plain=True)
        trainer.fit(Training(), data, data, ckpt_path=folder / "ours.ckpt", weights_only=True)
        trainer.save_checkpoint(folder / "again.ckpt")


if __name__ == "__main__":
    main()
