"""Trains on three nodes; on node n1 a bit of the parameters flips once. At the end each rank writes its digest.

With the file ``stop`` in the folder the strategy has ``on_divergence="stop"``, and with ``sharded`` it is that of a
sharded model, with replicas of one worker.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from differing import Ends, Line
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronFSDPStrategy, UnicronStrategy, environ
from unicron_lightning.fsdp.mesh import local_shard, local_shards
from unicron_lightning.worker.agreement import StateDigest, parts_of

FOLDER = Path(sys.argv[1])


class Plain(Line):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Flip(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *about: Any) -> None:
        done = FOLDER / "flipped"
        if trainer.global_step == 7 and environ.read().node == "n1" and not done.exists():
            done.touch()
            local_shard(module.layer.weight.detach()).view(torch.int32)[0, 0] ^= 1


def main() -> None:
    pl.seed_everything(1, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(48, 2)), batch_size=4)
    options: dict[str, Any] = {"digest_every": 5, "on_divergence": "stop" if (FOLDER / "stop").exists() else "heal"}
    sharded = (FOLDER / "sharded").exists()
    trainer = pl.Trainer(
        strategy=UnicronFSDPStrategy(shard_size=1, **options) if sharded else UnicronStrategy(**options),
        accelerator="cpu",
        devices=1,
        num_nodes=3,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ends(), Flip()],
    )
    module = Plain()
    trainer.fit(module, data)
    named = [name for name, _ in module.named_parameters()]
    parts = parts_of(dict(zip(named, local_shards(module.parameters()), strict=True)))
    (FOLDER / f"digest-{environ.read().node}").write_text(str(StateDigest(parts=parts).row[0]))


if __name__ == "__main__":
    main()
