"""A loop as a job: ``managed.py FOLDER STEPS PACE``; each worker notes its steps and the samples that it computes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import unicron_lightning as unicron

SAMPLES = 64


def train(folder: Path, steps: int, pace: float) -> torch.Tensor:
    """Train with a pause in each step; return the parameters."""
    torch.manual_seed(1)
    values = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2)).double()
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), values, values.sum(1, keepdim=True))
    run = unicron.Run(data, micro_batch_size=2, global_batch_size=8, seed=1, checkpoints=folder / "checkpoints")
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.register(model=model, optimizer=optimizer)
    with (folder / f"notes-{os.getpid()}").open("a", buffering=1) as notes:

        def loss(batch: Any) -> torch.Tensor:
            numbers, inputs, targets = batch
            notes.write(json.dumps({"epoch": run.current_epoch, "samples": numbers.tolist()}) + "\n")
            return torch.nn.functional.mse_loss(model(inputs), targets)

        for step in run.steps(steps):
            step.run(loss)
            optimizer.step()
            notes.write(json.dumps({"step": step.number, "world": run.world_size}) + "\n")
            time.sleep(pace)
    found = torch.cat([each.detach().flatten() for each in model.parameters()])
    torch.save(found, folder / f"final-{os.getpid()}.pt")
    return found


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
