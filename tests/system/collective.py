"""Exchanges values by `torch.distributed` between steps, as scripts for ddp do; one worker dies in the first exchange.

Its argument is a folder: what each exchange gave is appended to ``exchanges``; with a file ``finish`` there it ends.
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
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Exchanges(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *about: Any) -> None:
        assert (dist.get_rank(), dist.get_world_size()) == (trainer.global_rank, trainer.world_size)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if world == 3:
            if rank == 1 and self._first():
                self._wait_for_others()
                os.kill(os.getpid(), signal.SIGKILL)
            (self.folder / f"exchanging-{rank}").touch()
        votes = torch.tensor([1.0, float(rank), float((self.folder / "finish").exists())])
        dist.all_reduce(votes)
        now = dist.get_world_size()
        with (self.folder / "exchanges").open("a") as file:
            line = {"pid": os.getpid(), "epoch": trainer.current_epoch, "world": world, "now": now}
            file.write(json.dumps({**line, "rank": rank, "votes": votes.tolist()}) + "\n")
        trainer.should_stop = bool(votes[2])

    def _wait_for_others(self) -> None:
        """Wait until the others have reached the first exchange in a world of three, and for their call to begin."""
        deadline = time.monotonic() + 100
        while not all((self.folder / f"exchanging-{rank}").exists() for rank in (0, 2)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)

    def _first(self) -> bool:
        try:
            (self.folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def main() -> None:
    folder = Path(sys.argv[1])
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=3,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Exchanges(folder)],
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(48, 2)), batch_size=4))


if __name__ == "__main__":
    main()
