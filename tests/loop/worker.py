"""A worker that trains by a loop of its own, or the process that does so alone: ``FOLDER NAME``.

The name begins with one of `LOOPS`: the difference to a plain loop, such as data in streams. ``orders.json`` in the
folder has the steps at which a test gives orders, ``history.json`` the deaths: for each the rank (-1: all), the step
from which on it is due, and the point of the engine or of the body. ``witness.json`` has options of a witness, and the
bits that flip on some nodes (`Flips`). A worker writes what its training has at the end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

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


class Stream(IterableDataset[Any]):
    """Samples with their numbers in three streams of different lengths, in an order of the epoch."""

    epoch = 0
    ENDS: Final = (0, 36, 68, 90)
    """Streams of 9, 8 and 6 batches of four samples, the last one of two."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ["RANK"])
        assert os.environ["WORLD_SIZE"] == "3", "of streams"
        first, end = self.ENDS[rank : rank + 2]
        samples = Numbers()
        for number in torch.randperm(end - first, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            yield samples[first + number]


class Net(nn.Module):
    """A net with dropout and batch norm, a parameter that counts the uses of samples, and one that is trained later."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)]
        self.layers = nn.Sequential(*layers)
        self.uses = nn.Parameter(torch.zeros(SAMPLES))
        self.late = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        index, values, targets = batch
        return nn.functional.mse_loss(self.layers(values) + self.late, targets) + self.uses[index].sum()


class Deaths:
    """Kills this worker by a history.

    Args:
        folder: has the history, and marks.
        run: whose engine is observed: a loop, or one of a Trainer.
        workers: of the task.
    """

    def __init__(self, folder: Path, run: Any, workers: int = WORKERS) -> None:
        path = folder / "history.json"
        self._history = json.loads(path.read_text()) if path.exists() else []
        orders = folder / "orders.json"
        self._orders = json.loads(orders.read_text()) if orders.exists() else []
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
                together = rank == -1  # at points that no worker needs others to reach
                whose = self._agent() if together else "one"
                mark = self._folder / f"died-{number}-{whose}"
                try:
                    mark.touch(exist_ok=False)
                except FileExistsError:
                    continue
                while together and len([*self._folder.glob(f"died-{number}-*")]) < self._workers:
                    time.sleep(0.005)  # all die together
                os.kill(os.getpid(), signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the replacement of a worker that has died may be admitted, or all are there at the start."""
        run, engine = self._run, self._run.engine
        died = len(self._died())
        # A mark may be there before its worker is dead, and others may be at the start of the same step then.
        still_whole = self._expected >= 0 and run.world_size >= self._workers
        if engine.control is None or died <= self._expected or still_whole:
            return
        self._expected = died
        limit = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < limit and run.world_size < self._workers:
            if engine.control.newer_than(engine.world.epoch):
                break
            time.sleep(0.005)

    def order(self) -> None:
        """Where the test gives an order, wait until its epoch is known, so that the step's commit agrees to it."""
        run, engine = self._run, self._run.engine
        if engine.control is None or run.global_step not in self._orders:
            return
        (self._folder / f"at-{run.global_step}").touch()
        limit = time.monotonic() + 60.0
        while time.monotonic() < limit and not engine.control.newer_than(engine.world.epoch):
            time.sleep(0.005)

    def _agent(self) -> str:
        """Return the name of this worker's agent, as that of a file."""
        control = self._run.engine.control
        assert control is not None
        return control.worker.rpartition("/")[0].replace("/", "-")

    def _died(self) -> list[Path]:
        return list(self._folder.glob("died-*"))


class Flips:
    """Flips bits on some nodes.

    Args:
        run: whose worker is on one of them, maybe.
        net: whose calculations are wrong.
        flips: for each of the nodes its number, the step, from 1, from which on it is wrong, the place ("gradient",
            "activation" or "parameter"), the calls in a step that are wrong (None: all), and whether it is the same bit
            each time.
        mark: of the parameter's bit, which flips once.
    """

    def __init__(
        self, run: unicron.Run, net: Net, flips: list[tuple[int, int, str, list[int] | None, bool]], mark: Path
    ) -> None:
        self._run, self._net, self._flips = run, net, flips
        self._step, self._calls, self._all = 0, 0, 0
        self._mark = mark
        net.register_forward_pre_hook(self._called)
        net.layers[0].weight.register_hook(lambda gradient: self._at("gradient", gradient))
        net.layers[1].register_forward_hook(lambda module, given, found: self._at("activation", found))

    def _called(self, *_: Any) -> None:
        step = self._run.global_step + 1
        self._step, self._calls = step, self._calls + 1 if step == self._step else 0
        self._all += 1
        if torch.is_grad_enabled() and not self._mark.exists() and self._is_due("parameter"):
            self._mark.touch()
            with torch.no_grad():
                weight = self._net.layers[0].weight
                weight.copy_(self._flip(weight))

    def _at(self, place: str, value: torch.Tensor) -> torch.Tensor:
        trains = place == "gradient" or torch.is_grad_enabled()
        return self._flip(value) if trains and self._is_due(place) else value

    def _is_due(self, place: str) -> bool:
        world = self._run.engine.world
        for node, step, where, calls, _ in self._flips:
            there = bool(world.nodes) and world.nodes[world.rank].endswith(f"-{node}")
            if there and where == place and self._step >= step and (calls is None or self._calls in calls):
                return True
        return False

    def _flip(self, value: torch.Tensor) -> torch.Tensor:
        same = all(each[4] for each in self._flips)
        bits = torch.zeros(value.numel(), dtype=torch.int64)
        bits[0] = 1 << (45 if same else 20 + self._all % 30)
        return value + (_flipped(value.detach(), bits) - value.detach())


def _flipped(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return (value.contiguous().view(-1).view(torch.int64) ^ bits).view(torch.float64).view(value.shape)


LOOPS: Final = {
    "plain": 4,
    "stream": 5,
    "gan": 4,
    "compiled": 4,
    "scaler": 4,
    "schedule": 6,
    "loops": 4,
    "beside": 4,
    "memory": 4,
}
"""With the steps of an epoch on average."""
BREAK: Final = 6
"""Step at whose end the first one of two loops ends."""
BETWEEN: Final = "between.ckpt"
"""Checkpoint that is written there."""
SCHEDULE: Final = {0: 24, 2: 12}
STOPPED: Final = 6
"""Step in which one rank of a loop of kind "stop" wants it to end."""
LATE: Final = 4
"""Step in which the optimizer gets a further parameter, whose gradient is clipped together with others before."""
HALVED: Final = 6
"""Step whose gradients overflow, with a scaler."""


class _Rival:
    """A second model with an optimizer of its own, which a second call of a step's `run` trains."""

    def __init__(self, run: unicron.Run) -> None:
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, eps=1e-3)
        run.register(rival=self.net, rivals=self.optimizer)

    def train(self, step: Any, net: Net) -> dict[str, Any]:
        """Train it against the other one; return the mean loss."""
        found = step.run(lambda batch: (self.net(batch[1]) - net.layers[3].weight.detach().sum()).square().mean())
        assert net.uses.grad is None
        self.optimizer.step()
        return {"rival": found}


class Training:
    """A loop's models and optimizers.

    Args:
        run: of the loop.
        kind: one of `LOOPS`.
    """

    def __init__(self, run: unicron.Run, kind: str) -> None:
        self.net = net = Net()
        self.kind, self._average = kind, AveragedModel(net)
        # rounding shows no more than in the gradients
        self._optimizer = torch.optim.AdamW(net.layers.parameters(), lr=0.01, eps=1e-3)
        self._counter = torch.optim.SGD([net.uses], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self._optimizer, 3, 0.5)
        self._used = torch.compile(net, backend="aot_eager") if kind == "compiled" else net
        run.register(average=self._average, optimizer=self._optimizer, counter=self._counter, schedule=self.schedule)
        run.register(net=self._used)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=kind == "scaler")
        if kind == "scaler":
            run.register(scaler=self.scaler)
        self._rival = _Rival(run) if kind == "gan" else None

    def loss(self, batch: Any) -> Any:
        """Return the loss, and another value."""
        return {"loss": self._used(batch), "largest": batch[1].max()}

    def update(self, step: Any) -> dict[str, Any]:
        """Step the optimizers; return further values."""
        if self.kind == "scaler" and step.number == HALVED:
            self.net.layers[0].weight.grad.fill_(torch.inf)
        if step.number == LATE:
            self._optimizer.add_param_group({"params": [self.net.late], "lr": 0.02})
        self.scaler.unscale_(self._optimizer)
        nn.utils.clip_grad_norm_([*self.net.layers.parameters(), self.net.late], 1.0)
        self.scaler.step(self._optimizer)
        self.scaler.step(self._counter)
        self.scaler.update()
        found = {} if self._rival is None else self._rival.train(step, self.net)
        self.schedule.step()
        self._average.update_parameters(self.net)
        return found


def _options(kind: str) -> dict[str, Any]:
    """Return a run's options."""
    found: dict[str, Any] = {"micro_batch_size": 4, "seed": 3, "digest_every": 2, "streams": 3}
    found["global_batch_size"] = SCHEDULE if kind == "schedule" else 24
    found |= {"beside": {"beside": True, "keep": 2}, "memory": {"memory_every_n_steps": 2}}.get(kind, {})
    return found


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    kind = name.partition("-")[0]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    out = folder / "alone" if name.endswith("-alone") else folder
    out.mkdir(exist_ok=True)
    data: Any = DataLoader(Stream(), batch_size=4) if kind == "stream" else Numbers()
    is_exact, witness = (folder / "reproducible").exists(), folder / "witness.json"
    found = json.loads(witness.read_text()) if witness.exists() else {}
    options = {**_options(kind), **found.get("options", {})}
    run = unicron.Run(data, checkpoints=out / "checkpoints", reproducible=is_exact, **options)
    deaths, training = Deaths(folder, run, found.get("workers", WORKERS)), Training(run, kind)
    if "flips" in found:
        Flips(run, training.net, found["flips"], folder / "flipped")
    for path in out.glob("checkpoints/last-pause-*.ckpt"):
        run.load(path)
    result: dict[str, Any] = {"losses": {}, "evaluated": {}}

    def steps() -> Iterator[Any]:
        """Yield the steps of all loops; between two of them save and evaluate."""
        if kind == "loops":
            yield from run.steps(BREAK)
            run.save(out / BETWEEN)
            result["evaluated"][BREAK] = float(run.evaluate(Numbers(), training.net, batch_size=5))
        yield from run.steps(max_epochs=EPOCHS)

    for step in steps():
        deaths.wait()
        deaths.order()
        run.should_stop = kind == "stop" and run.global_rank == 1 and step.number >= STOPPED
        found = step.run(training.loss)
        deaths.at("body")
        first = out / "checkpoints" / f"step={SAVED}.ckpt"
        while kind == "beside" and step.number == SAVED + 2 and not (first.exists() or any(folder.glob("died-*"))):
            time.sleep(0.005)  # the process that writes it has to start
        found |= training.update(step)
        result["losses"][step.number] = {name: float(value) for name, value in found.items()}
        step.log(**found)
        if step.number == SAVED + (BREAK if kind == "loops" else 0) or (kind == "beside" and step.number > SAVED):
            run.save()
        if step.ends_epoch:
            held_out = DataLoader(Stream(), batch_size=5) if kind == "stream" else Numbers()
            result["evaluated"][step.number] = float(run.evaluate(held_out, training.net, batch_size=5))
    result["state"] = {key: value.clone() for key, value in run.registered.module.state_dict().items()}
    result |= {"step": run.global_step, "rate": training.schedule.get_last_lr(), "scale": training.scaler.get_scale()}
    result["random"] = torch.rand(1)
    write(result, folder, out)


def write(result: dict[str, Any], folder: Path, out: Path) -> None:
    """Write a result, whole or not at all: that of a worker in the folder, that of a process alone elsewhere."""
    out.mkdir(exist_ok=True)
    path = out / ("result.pt" if out != folder else f"result-{os.environ['RANK']}-{os.getpid()}.pt")
    torch.save(result, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
