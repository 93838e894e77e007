"""Train the small GPT for some steps and kill this process at given points.

    torchrun ... job_exactness.py SIZE EPS STEPS [SLOT:STEP:POINT ...]

A fault kills the worker of its slot at that point of that step, or of the first later step that the worker takes part
in. Each worker writes the losses of its steps to ``losses_<slot>_<pid>.jsonl`` and its parameters to
``parameters_<slot>.pt``.
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
from models import GPT
from torch.utils.data import DataLoader
from transformer import SIZES, Walks

NODES, ACCUMULATE = 3, 2
SLOT = os.environ["BENCH_SLOT"]
FOLDER = Path(os.environ["BENCH_LOG"])
DEGRADED_SECONDS = 1.0
"""Delay of each step while the world is incomplete, so that lost workers have rejoined before the next fault."""


class Faults(pl.Callback):
    """Injects the faults and records the losses."""

    def __init__(self, faults: list[str]) -> None:
        self._file = (FOLDER / f"losses_{SLOT}_{os.getpid()}.jsonl").open("a", buffering=1)
        self._faults = [fault.split(":") for fault in faults]

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.engine.fault = self._reached  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.world_size < NODES and self._faults:
            time.sleep(DEGRADED_SECONDS)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: object) -> None:
        line = {"step": trainer.global_step, "loss": float(outputs["loss"]), "world": trainer.world_size}
        self._file.write(json.dumps(line) + "\n")

    def _reached(self, point: str, step: int, *_: int) -> None:
        for number, (slot, at, where) in enumerate(self._faults):
            if slot == SLOT and where == point and step >= int(at) and self._first(number, step):
                os.kill(os.getpid(), signal.SIGKILL)

    def _first(self, number: int, step: int) -> bool:
        """Whether this fault has not struck before; records that it has."""
        try:
            (FOLDER / f"fault_{number}").open("x").write(str(step))
        except FileExistsError:
            return False
        return True


def main() -> None:
    size, eps, steps, *faults = sys.argv[1:]
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=NODES,
        accumulate_grad_batches=ACCUMULATE,
        max_steps=int(steps),
        callbacks=[Faults(faults)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GPT(SIZES[size], float(eps))
    loader = DataLoader(Walks(8192, SIZES[size].context), batch_size=SIZES[size].sequences, shuffle=True)
    trainer.fit(model, loader)
    path = FOLDER / f"parameters_{SLOT}.pt"
    torch.save([parameter.detach() for parameter in model.parameters()], path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    main()
