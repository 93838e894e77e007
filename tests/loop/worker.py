"""A worker that trains by a loop of its own, or the process that does so alone: ``FOLDER NAME``.

``history.json`` in the folder has the deaths: for each the rank (-1: all), the step from which on it is due, and the
point of the engine or of the body. A worker writes what its training has at the end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

import unicron_lightning as unicron

SAMPLES: Final = 96
EPOCHS: Final = 4
WORKERS: Final = 3
WAIT_SECONDS: Final = 8.0
"""Most that members wait for a replacement."""
SAVED: Final = 5
"""Step at whose end a checkpoint is written."""


class Numbers(Dataset[Any]):
    """Random samples, with their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(1)  # an augmentation
        return index, torch.randn(4, generator=generator) + 0.1 * noise, torch.randn(1, generator=generator)


class Net(nn.Module):
    """A net with dropout and batch norm, and a parameter that counts the uses of each sample."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)]
        self.layers = nn.Sequential(*layers)
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        index, values, targets = batch
        return nn.functional.mse_loss(self.layers(values), targets) + self.uses[index].sum()


class Deaths:
    """Kills this worker by a history.

    Args:
        folder: has the history, and marks.
        run: whose engine is observed.
        workers: of the task.
    """

    def __init__(self, folder: Path, run: unicron.Run, workers: int = WORKERS) -> None:
        path = folder / "history.json"
        self._history = json.loads(path.read_text()) if path.exists() else []
        self._folder, self._run, self._workers = folder, run, workers
        self._expected = -1
        others: Callable[..., None] = run.engine.fault

        def at(phase: str, *where: Any) -> None:
            others(phase, *where)
            self.at(phase)

        run.engine.fault = at

    def at(self, phase: str) -> None:
        """Die if it is time."""
        run = self._run
        for number, (rank, step, point) in enumerate(self._history):
            if point == phase and run.global_step >= step and rank in (run.global_rank, -1):
                mark = self._folder / f"died-{number}-{run.global_rank if rank == -1 else 'one'}"
                try:
                    mark.touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the replacement of a worker that has died may be admitted, or all are there at the start."""
        run, engine = self._run, self._run.engine
        if engine.control is None or len(self._died()) <= self._expected:
            return
        self._expected = len(self._died())
        limit = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < limit and run.world_size < self._workers:
            if engine.control.newer_than(engine.world.epoch):
                break
            time.sleep(0.005)

    def _died(self) -> list[Path]:
        return list(self._folder.glob("died-*"))


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    out = folder / "alone" if name == "alone" else folder
    out.mkdir(exist_ok=True)
    run = unicron.Run(
        Numbers(), micro_batch_size=4, global_batch_size=24, seed=3, checkpoints=out / "checkpoints", digest_every=2
    )
    deaths = Deaths(folder, run)
    net = Net()
    average = AveragedModel(net)
    optimizer = torch.optim.AdamW(
        net.layers.parameters(), lr=0.01, eps=1e-3
    )  # rounding shows no more than in the gradients
    counter = torch.optim.SGD([net.uses], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    run.register(net=net, average=average, optimizer=optimizer, counter=counter, schedule=schedule)
    losses: dict[int, Any] = {}
    evaluated: dict[int, Any] = {}

    def loss_of(batch: Any) -> Any:
        loss = net(batch)
        return {"loss": loss, "largest": batch[1].max()}

    for step in run.steps(max_epochs=EPOCHS):
        deaths.wait()
        found = step.run(loss_of)
        deaths.at("body")
        nn.utils.clip_grad_norm_(net.layers.parameters(), 1.0)
        optimizer.step()
        counter.step()
        schedule.step()
        average.update_parameters(net)
        losses[step.number] = {name: float(value) for name, value in found.items()}
        step.log(**found)
        if step.number == SAVED:
            run.save()
        if step.ends_epoch:
            evaluated[step.number] = float(run.evaluate(Numbers(), net, batch_size=5))
    state = {key: value.clone() for key, value in run.registered.module.state_dict().items()}
    result = {
        "state": state,
        "losses": losses,
        "evaluated": evaluated,
        "step": run.global_step,
        "rate": schedule.get_last_lr(),
    }
    result["random"] = torch.rand(1)
    path = out / ("result.pt" if name == "alone" else f"result-{os.environ['RANK']}-{os.getpid()}.pt")
    torch.save(result, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
