"""A worker of benchmarks/witness_alarms.py: STRATEGY SETTING SECONDS NODES FOLDER; the first one writes its counts."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformer import SIZES, Transformer, Walks, loss_of

from unicron_lightning import UnicronFSDPStrategy, UnicronStrategy
from unicron_lightning.worker import witness

SIZE = SIZES["tiny"]
COUNTS = Counter[str]()
find = witness.in_doubt


def counted(ranks: Sequence[dict[int, Any]]) -> list[int]:
    """Count the micro-batches that two ranks have run, and the comparisons with a difference."""
    known = Counter(micro_batch for each in ranks for micro_batch in each)
    COUNTS["compared"] += sum(number > 1 for number in known.values())
    found = find(ranks)
    COUNTS["alarms"] += bool(found)
    return found


class Layers(nn.Module):
    """Blocks with dropout after each, compiled or computed again in the backward."""

    def __init__(self, blocks: Sequence[nn.Module], *, dropout: bool, compiled: bool, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.dropout = nn.Dropout(0.1 if dropout else 0.0)
        self._checkpointed = checkpointed
        for block in self.layers if compiled else ():
            block.compile(backend="aot_eager")  # type: ignore[no-untyped-call]

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            kept: Any = checkpoint(layer, hidden, use_reentrant=False) if self._checkpointed else layer(hidden)
            hidden = self.dropout(kept)
        return hidden


class Module(pl.LightningModule):
    def __init__(self, layers: dict[str, bool], end: float, folder: Path) -> None:
        super().__init__()
        self.network = Transformer(SIZE)
        self.network.blocks = Layers([*self.network.blocks], **layers)  # type: ignore[assignment]
        self._end, self._folder = end, folder

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step % 20 == 0:
            over = bool(self.trainer.strategy.broadcast(time.monotonic() > self._end, 0))
            self.trainer.should_stop = self.trainer.should_stop or over

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            (self._folder / "counts.json").write_text(json.dumps({**COUNTS, "steps": self.global_step}))


def main() -> None:
    strategy, setting, seconds, nodes, folder = sys.argv[1:]
    witness.in_doubt = counted
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    kind: Any = UnicronStrategy if strategy == "unicron" else UnicronFSDPStrategy
    options = {"witness_every": 1, **({} if strategy == "unicron" else {"shard_size": 2, "blocks": ("Block",)})}
    layers = {name: setting in (name, "all") for name in ("dropout", "compiled", "checkpointed")}
    trainer = pl.Trainer(
        strategy=kind(**options),
        accelerator="cpu",
        devices=1,
        num_nodes=int(nodes),
        accumulate_grad_batches=2,
        max_epochs=-1,
        precision="bf16-mixed" if setting in ("bf16", "all") else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(layers, time.monotonic() + float(seconds), Path(folder))
    trainer.fit(module, DataLoader(Walks(4096, SIZE.context), batch_size=SIZE.sequences, shuffle=True))


if __name__ == "__main__":
    main()
