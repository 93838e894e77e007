"""Several fits in one script, with evaluations around them and a worker that is killed in one of them: ``FOLDER``.

With ``unicron_fsdp`` a replica has `SHARDS` workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronFSDPStrategy

PASSES = 3
SHARDS = 2


class Net(pl.LightningModule):
    """Learns a sum, in each fit with another rate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.rate = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def _loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-3)


ADMISSION_SECONDS = 3.0
"""Time that a joiner of two small fits needs from its set-up to its readiness."""


class Killing(pl.Callback):
    """Kills a rank at a step of a fit; the others wait for its successor.

    Args:
        folder: of the mark that a worker has been killed.
        at: number of the fit, step and rank; None: no kill. After the fit's last step: at its end, where the others
            stay until the successor waits for its admission.
        workers: of the complete world.
    """

    def __init__(self, folder: Path, at: Any, workers: int) -> None:
        self._mark, self._at, self._workers, self.fit = folder / "killed", at, workers, 0
        self.replaces = self._mark.exists()
        self._arrived = folder / "arrived"

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self.replaces:
            self._arrived.touch()

    def on_fit_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._at is None or self._at[:2] != [self.fit, trainer.global_step] or self.replaces:
            return
        if trainer.global_rank == self._at[2]:
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not self._arrived.exists():
            time.sleep(0.05)
        time.sleep(ADMISSION_SECONDS)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._mark.exists():
            engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
            while (
                not self.replaces
                and trainer.world_size < self._workers
                and not engine.control.newer_than(engine.world.epoch)
            ):
                time.sleep(0.05)
        elif self._at == [self.fit, trainer.global_step, trainer.global_rank] and trainer.world_size == self._workers:
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def data(number: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number, 6, generator=torch.Generator().manual_seed(1))), batch_size=4)


def main() -> None:
    out = Path(sys.argv[1])
    settings = json.loads((out / "settings.json").read_text())
    of_ddp = settings["strategy"] == "ddp"
    pl.seed_everything(3, verbose=False)
    sharded, workers = settings["strategy"] == "unicron_fsdp", settings.get("workers", 2)
    killing, module = Killing(out, settings.get("kill"), workers), Net()
    evaluated: list[Any] = []
    seen: list[Any] = []

    def trainer(**options: Any) -> pl.Trainer:
        return pl.Trainer(
            strategy=UnicronFSDPStrategy(shard_size=SHARDS) if sharded else settings["strategy"],
            accelerator="cpu",
            devices=workers if of_ddp else 1,
            num_nodes=1 if of_ddp else workers,
            max_epochs=PASSES,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=out,
            **{"enable_checkpointing": False} | options,
        )

    if settings.get("evaluates") is True:  # otherwise only after each fit
        evaluated += trainer().validate(module, data(20), verbose=False)
        evaluated += trainer().test(module, data(20), verbose=False)
    run = None
    for number in range(settings["fits"]):
        killing.fit, module.rate = number + 1, 0.02 / (1 + number)
        saving = ModelCheckpoint(out / f"fit{number}", monitor="val")
        if run is None or not settings.get("same"):
            run = trainer(callbacks=[killing, saving], enable_checkpointing=True)
        else:
            run.fit_loop.max_epochs += PASSES  # type: ignore[operator]
        run.fit(module, data(48), data(20))
        seen.append([run.checkpoint_callback.best_model_path, float(run.callback_metrics["val"]), run.global_step])  # type: ignore[union-attr]
        if settings.get("evaluates"):
            evaluated += run.validate(module, data(20), verbose=False)
    shard = run.strategy.fabric.own_shard if sharded and run is not None else 0  # type: ignore[attr-defined]
    state = {name: value.to_local() if sharded else value for name, value in module.state_dict().items()}  # type: ignore[operator]
    result = {"state": state, "shard": shard, "evaluated": evaluated, "seen": seen, "replaces": killing.replaces}
    torch.save(result, out / f"result-{os.getpid()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
