"""A worker that trains the model of `loop.worker` by a Trainer, or the process that does so alone: ``FOLDER NAME``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loop.worker import EPOCHS, SAVED, WORKERS, Deaths, Net, Numbers, write
from torch import nn
from torch.utils.data import DataLoader

from unicron_lightning import UnicronStrategy

MICRO_BATCH = 4


class Fit:
    """A fit, as `Deaths` reads a run.

    Args:
        trainer: of the fit.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class Module(pl.LightningModule):
    """The net, with one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        loss: torch.Tensor = self.net(batch)
        self.log_dict({"loss": loss, "largest": batch[1].max()}, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of a batch."""
        self.log("held_out", self.net(batch), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        """Return an optimizer that moves the counters by the whole gradient, and a schedule of its other rate."""
        groups: Any = [{"params": [*self.net.layers.parameters()], "lr": 0.05, "momentum": 0.9}]
        optimizer = torch.optim.SGD([*groups, {"params": [self.net.uses], "lr": 1.0}])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5 ** (step // 3), lambda step: 1.0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(pl.Callback):
    """Notes what the training has, and kills this worker by the history.

    Args:
        folder: has the history.
    """

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, Any] = {"losses": {}, "evaluated": {}, "scale": 1.0}
        self._folder = folder
        self._deaths: Deaths | None = None

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._deaths = Deaths(self._folder, Fit(trainer))

    def on_train_batch_start(self, *_: Any) -> None:
        assert self._deaths is not None
        self._deaths.wait()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        assert self._deaths is not None
        self._deaths.at("body")
        nn.utils.clip_grad_norm_(module.net.layers.parameters(), 1.0)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        values = trainer.callback_metrics
        self.found["losses"][trainer.global_step] = {name: float(values[name]) for name in ("loss", "largest")}

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.found["evaluated"][trainer.global_step] = float(trainer.callback_metrics["held_out"])

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        (schedule,) = trainer.lr_scheduler_configs
        self.found |= {"step": trainer.global_step, "rate": schedule.scheduler.get_last_lr(), "random": torch.rand(1)}
        self.found["state"] = {key: value.clone() for key, value in module.state_dict().items()}


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # of logged values, too
    pl.seed_everything(1, verbose=False)
    out = folder / "alone" if name.endswith("-alone") else folder
    recorder = Recorder(folder)
    trainer = pl.Trainer(
        strategy=UnicronStrategy(reproducible=(folder / "reproducible").exists()),
        accelerator="cpu",
        devices=1,
        num_nodes=WORKERS,
        precision="64-true",
        accumulate_grad_batches=2,
        max_epochs=EPOCHS,
        callbacks=[recorder, ModelCheckpoint(out / "checkpoints", "{step}", every_n_train_steps=SAVED, save_top_k=-1)],
        logger=False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=out,
    )
    data = [DataLoader(Numbers(), batch_size=MICRO_BATCH, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(Module(), *data)
    write(recorder.found, folder, out)
