"""The training script of the demo: any Lightning script with ``strategy="unicron"``. Run by torchrun, once per worker.

In addition to training it writes a diary, a JSON line per micro-batch and step, from which the demo proves its claims.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.demo.dataset import Windows

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm causal self-attention and feed-forward; maps [batch, length, width] to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: a key's bias has no gradient but rounding noise, which Adam would scale up to whole steps.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        fed: Tensor = x + self.dropout(self.feed(self.norm2(x)))
        return fed


class GPT(pl.LightningModule):
    """Next-byte prediction.

    Args:
        layers, width, heads: size of the transformer.
        length: bytes of context.
        steps: of the cosine schedule.
    """

    def __init__(
        self, layers: int = 2, width: int = 64, heads: int = 4, length: int = 64, steps: int = 240, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.steps = steps
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, 256] of the byte after each of ``tokens`` [batch, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))
        return logits

    def _loss(self, text: Tensor) -> Tensor:
        logits = self(text[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch[1]), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


LENGTH = 64


class DiaryCallback(Callback):
    """Writes this worker's activities, line by line, to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"worker-{os.getpid()}.jsonl").open("a", buffering=1)
        self._write(
            event="start",
            task=os.environ.get("UNICRON_TASK"),
            round=int(os.environ.get("UNICRON_ROUND", "1")),
            node=os.environ.get("UNICRON_NODE"),
        )

    def micro_batch(self, step: int, samples: list[int]) -> None:
        """Record a micro-batch of the step that follows ``step`` finished ones."""
        self._write(event="micro_batch", step=step, samples=samples)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = float(outputs["loss"])
        world, step = trainer.world_size, trainer.global_step
        self._write(event="step", step=step, epoch=trainer.current_epoch, world=world, loss=loss)

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), "pid": os.getpid(), **fields}) + "\n")


class DemoGPT(GPT):
    """The model, which records each micro-batch in the diary after its forward."""

    diary: DiaryCallback
    pace: float
    """Seconds of sleep per micro-batch, in place of an accelerator's work."""
    flops_per_step: float

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        time.sleep(self.pace)
        self.diary.micro_batch(self.trainer.global_step, batch[0].tolist())
        return loss


class StopOnRequest(Callback):
    """Ends the training when a file ``stop`` exists, at a step that all workers agree on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % 10 == 0 and trainer.strategy.broadcast(self._path.exists()):
            trainer.should_stop = True


def main() -> None:
    """Train, and save the final parameters and validation loss next to the diary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps-per-epoch", type=int, default=130)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep per micro-batch")
    parser.add_argument("--until-told", action="store_true", help="end when OUT/stop exists, without validation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(7, verbose=False)
    windows = options.steps_per_epoch * options.nodes * options.accumulate * options.batch_size
    train = DataLoader(Windows(0.0, 0.9, LENGTH, windows), batch_size=options.batch_size, shuffle=True)
    validate = DataLoader(Windows(0.9, 1.0, LENGTH, 120), batch_size=8)
    diary = DiaryCallback(options.out)
    model = DemoGPT(length=LENGTH, steps=options.epochs * options.steps_per_epoch)
    model.diary, model.pace = diary, options.pace
    tokens = options.nodes * options.accumulate * options.batch_size * LENGTH
    model.flops_per_step = 6.0 * sum(parameter.numel() for parameter in model.parameters()) * tokens
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=options.nodes,
        accumulate_grad_batches=options.accumulate,
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        limit_val_batches=0 if options.until_told else 1.0,
        gradient_clip_val=1.0,
        callbacks=[
            diary,
            ModelCheckpoint(options.out / "checkpoints", save_last=True),
            StopOnRequest(options.out / "stop"),
        ][: 3 if options.until_told else 2],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train, validate)
    result = {
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "val_loss": float(trainer.callback_metrics.get("val_loss", float("nan"))),
        "steps": trainer.global_step,
        "flops_per_step": model.flops_per_step,
    }
    torch.save(result, options.out / f"final-{os.getpid()}.pt")


if __name__ == "__main__":
    main()
