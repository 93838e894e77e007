"""A worker with two runs, whose models begin with weights of the rank: ``FOLDER NAME``; see `loop.worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loop.worker import Net, Numbers, write

import unicron_lightning as unicron


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    torch.set_default_dtype(torch.float64)
    out = folder / "alone" if name.endswith("-alone") else folder
    rank, result = 0, dict[str, Any]()
    for number in range(2):
        torch.manual_seed(7 + rank)
        run = unicron.Run(Numbers(), micro_batch_size=4, global_batch_size=24, checkpoints=out, digest_every=1)
        net, rank = Net(), run.global_rank
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        run.register(net=net, optimizer=optimizer)
        losses = {}
        for step in run.steps(3):
            losses[step.number] = {"loss": float(step.run(net))}
            optimizer.step()
        state = {f"{number}.{key}": value.clone() for key, value in net.state_dict().items()}
        result = {"state": {**result.get("state", {}), **state}, "losses": losses, "evaluated": {number: 0.0}}
    write(result | {"step": run.global_step, "random": torch.zeros(1)}, folder, out)
