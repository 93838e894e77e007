"""Trains in two workers until one of them leaves the common path after step 5; see FOLDER/case.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.strategies.fsdp.strategy import UnicronFSDPStrategy

FOLDER = Path(sys.argv[1])
CASE = json.loads((FOLDER / "case.json").read_text())
AT = 5
LAST = 60


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def configure_model(self) -> None:
        if CASE["strategy"] == "unicron_fsdp":
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if CASE["call"] == "fail" and self.trainer.global_rank == 1 and not self.trainer.sanity_checking:
            raise RuntimeError("no batch to concatenate")
        self.log("loss", self.layer(batch[0]).square().mean())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Leaves(pl.Callback):
    """Does the action of the case, at its place, on rank 0 alone (or on all, to compare)."""

    def on_train_batch_end(self, trainer: pl.Trainer, *about: Any) -> None:
        self._leave("batch", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *about: Any) -> None:
        self._leave("validation", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *about: Any) -> None:
        self._leave("epoch", trainer)

    def on_train_end(self, trainer: pl.Trainer, *about: Any) -> None:
        if CASE["call"] == "save" and CASE["place"] == "after":
            trainer.save_checkpoint(FOLDER / "within")

    def _leave(self, place: str, trainer: pl.Trainer) -> None:
        if place != CASE["place"] or trainer.global_step < AT or trainer.global_rank not in CASE["ranks"]:
            return
        if CASE["call"] == "stop":
            trainer.should_stop = True
        elif CASE["call"] == "barrier":
            trainer.strategy.barrier()
        elif CASE["call"] == "save":
            trainer.save_checkpoint(FOLDER / "saved.ckpt")


def parts() -> tuple[Any, pl.LightningModule, int]:
    """Return the strategy, the module, and the numbers of a sample."""
    if CASE["strategy"] == "unicron_megatron":
        sys.path[0] = str(Path(__file__).parents[1])  # this folder has a module of the name megatron
        from cross import megatron
        from cross.cases import Script

        script = Script(strategy="unicron_megatron", shard_size=CASE.get("shard_size", 1))
        return megatron.strategy_of(script, alone=False), megatron.Stage(script, None), 3
    return UnicronFSDPStrategy(shard_size=2) if CASE["strategy"] == "unicron_fsdp" else CASE["strategy"], Line(), 2


def main() -> None:
    pl.seed_everything(1, verbose=False)
    strategy, module, numbers = parts()
    data = DataLoader(TensorDataset(torch.randn(80, numbers)), batch_size=4)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_steps=CASE.get("last", LAST),
        max_epochs=-1,
        default_root_dir=FOLDER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Leaves()],
    )
    trainer.fit(module, data, data)
    if CASE["call"] == "test" and trainer.global_rank in CASE["ranks"]:
        trainer.test(Line(), data, verbose=False)
    if CASE["call"] == "save" and CASE["place"] == "after":
        trainer.save_checkpoint(FOLDER / "after")
    if CASE["call"] == "export" and trainer.global_rank in CASE["ranks"]:
        raise OSError("no space for the exported model")
    name = f"ended-{trainer.global_rank}.json"
    (FOLDER / name).write_text(json.dumps({"step": trainer.global_step, "at": time.time()}))


if __name__ == "__main__":
    main()
