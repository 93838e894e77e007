"""A training that logs, whose first rank is killed twice before it writes a step's row.

Under torchrun agents: ``logging_worker.py FOLDER``, where the file ``logger`` names one of `LOGGERS`. It ends once the
second one has been replaced. If the file ``late`` exists, torchrun's first rank joins the other worker; if ``all``
does, both workers are killed in one step instead.
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
from lightning.fabric.loggers import tensorboard as fabric
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.callbacks import MemoryCheckpoint

PACE_SECONDS = 0.03
KILLS = 2


def tensorboardx(folder: Path) -> TensorBoardLogger:
    """Return Lightning's logger with tensorboardX as its writer, even where tensorboard is installed."""
    fabric._TENSORBOARD_AVAILABLE = False  # type: ignore[assignment]
    return TensorBoardLogger(folder)


LOGGERS = {
    "csv": CSVLogger,
    "csv_version": lambda folder: CSVLogger(folder, version=0),
    "tensorboard": tensorboardx,
    "wandb": lambda folder: WandbLogger(save_dir=folder, project="p", offline=True),
    "mlflow": lambda folder: MLFlowLogger(tracking_uri=f"file:{folder}/mlruns"),
}


class Line(pl.LightningModule):
    """A hook at the start of each epoch but the first needs a value of the last one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer = nn.Linear(2, 1)
        self.complete = 0

    @property
    def all_die(self) -> bool:
        return (self.folder / "all").exists()

    def kills(self) -> int:
        return sum((self.folder / f"killed-{number}").exists() for number in range(KILLS))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            seen = {"epoch": self.current_epoch, "loss": float(self.trainer.callback_metrics["loss_epoch"])}
            with (self.folder / "seen.jsonl").open("a") as file:
                file.write(json.dumps(seen) + "\n")

    def training_step(self, batch: Any) -> Any:
        time.sleep(PACE_SECONDS)
        assert self.trainer.log_dir is not None
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.complete = self.complete + 1 if self.trainer.world_size == 2 else 0
        rank = self.trainer.global_rank
        number = rank if self.all_die else self.kills()
        dies = number < KILLS and not (self.folder / f"killed-{number}").exists()
        if dies and (self.all_die or rank == 0) and self.complete > 5:
            (self.folder / f"killed-{number}").touch()
            while self.all_die and self.kills() < KILLS:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self) -> None:
        # The survivor of a death in the last step of an epoch may not have noticed it yet: it has made 6 steps in two.
        enough = self.complete > 7 and self.kills() == KILLS
        self.trainer.should_stop = bool(self.trainer.strategy.broadcast(enough, 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if (folder / "late").exists() and os.environ["RANK"] == "0":
        while not (folder / "logs/lightning_logs/version_0").exists():  # the other worker trains alone
            time.sleep(0.05)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        max_epochs=-1,
        default_root_dir=folder,
        logger=LOGGERS[(folder / "logger").read_text()](folder / "logs"),
        log_every_n_steps=1,
        enable_checkpointing=False,
        callbacks=[MemoryCheckpoint(every_n_steps=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(folder), DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=4))
    assert trainer.num_nodes == 2
    (folder / f"end-{trainer.global_rank}").write_text(str(trainer.global_step))


if __name__ == "__main__":
    main()
