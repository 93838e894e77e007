"""A script for Lightning's ModelParallelStrategy, with FSDP2 and without tensor parallelism; only `strategy=` differs.

    torchrun ... model_parallel.py FOLDER [plain]

With ``plain`` it runs under Lightning's own strategy, and then resumes the other run's checkpoints, at their last step.
The whole parameters are saved to FOLDER/NAME.ckpt; those of ``unicron_fsdp`` as a folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronFSDPStrategy

WIDTH, WORDS, LENGTH, STEPS = 8, 17, 6, 8
WORKERS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Language(nn.Module):
    """A language model whose parameters are made after it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(3)})
        self.out = nn.Linear(WIDTH, WORDS)

    def init_weights(self) -> None:
        """Set the same values for any number of shards."""
        for number, parameter in enumerate(self.parameters()):
            whole = torch.sin(torch.arange(float(parameter.numel())) + number).view(parameter.shape) / 4
            shard: Any = parameter
            local = shard.to_local()
            mesh = shard.device_mesh
            parts = whole.chunk(mesh.size())
            place = mesh.get_local_rank()
            local.detach().copy_(parts[place] if place < len(parts) else whole[:0])

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers.values():
            x = layer(x)
        logits: Tensor = self.out(x)
        return logits


def parallelize(model: Language, device_mesh: DeviceMesh, *, wraps: bool) -> None:
    """Shard layer by layer, with checkpointed activations and a precision of FSDP2's own."""
    data_mesh, tensor_mesh = device_mesh["data_parallel"], device_mesh["tensor_parallel"]
    assert tensor_mesh.size() == 1
    if data_mesh.size() > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
        for name, layer in model.layers.items():
            model.layers[name] = fully_shard(
                checkpoint_wrapper(layer) if wraps else layer, mesh=data_mesh, mp_policy=policy
            )
        fully_shard(model, mesh=data_mesh, mp_policy=policy)


class Training(pl.LightningModule):
    def __init__(self, *, wraps: bool = True) -> None:
        super().__init__()
        self._wraps = wraps
        with torch.device("meta"):
            self.model = Language()

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        parallelize(self.model, mesh, wraps=self._wraps)
        self.model.to_empty(device=self.device)
        self.model.init_weights()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=True)

    def _loss(self, batch: Any) -> Tensor:
        [words] = batch
        return nn.functional.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Kill(pl.Callback):
    """Kills the last rank at a step of the complete world, if FOLDER/kill exists."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "kill"

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        last = trainer.world_size == WORKERS and trainer.global_rank == WORKERS - 1
        if last and trainer.global_step >= 3 and self._mark.exists():
            self._mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(folder: Path, name: str, *, plain: bool) -> pl.Trainer:
    lightnings = ModelParallelStrategy(
        data_parallel_size=WORKERS, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    return pl.Trainer(
        strategy=lightnings if plain else UnicronFSDPStrategy(shard_size=2, save_distributed_checkpoint=True),
        accelerator="cpu",
        devices=WORKERS if plain else 1,
        num_nodes=1 if plain else WORKERS,
        accumulate_grad_batches=2,
        max_steps=STEPS,
        val_check_interval=8,
        limit_val_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder / name, monitor="val_loss", save_top_k=1), Kill(folder)],
    )


def main() -> None:
    folder, plain = Path(sys.argv[1]), sys.argv[2:] == ["plain"]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(3, verbose=False)
    words = torch.randint(WORDS, (512, LENGTH), generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(words), batch_size=2)
    name = "plain" if plain else "ours"
    trainer = trainer_of(folder, name, plain=plain)
    trainer.fit(Training(), data, data)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    for resumed in ("ours", "whole") if plain else ():
        trainer = trainer_of(folder, f"from-{resumed}", plain=True)
        module = Training(wraps=resumed == "ours")  # Lightning 2.6 reads files only into modules without wrappers
        trainer.fit(module, data, data, ckpt_path=folder / f"{resumed}.ckpt", weights_only=True)
        trainer.save_checkpoint(folder / f"from-{resumed}.ckpt")


if __name__ == "__main__":
    main()
