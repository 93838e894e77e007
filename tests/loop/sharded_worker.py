"""A worker whose loop trains sharded models, or a process that trains them whole: ``FOLDER NAME``; see `loop.worker`.

With a name that begins with "stream", the data are streams; the names of the process begin with "alone".
``options.json`` in the folder has the number of workers of a replica, if it is another one, a checkpoint to load, the
run's further options, and whether the net has no batch norm, or the script no average of its own, the name of an
optimizer that needs whole matrices, with which the critic is not sharded, and the arguments of `flip`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from fsdp.preconditioned import PRECONDITIONED
from loop.worker import EPOCHS, SAVED, Deaths, Numbers, Stream, write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unicron_lightning as unicron
from unicron_lightning.checkpoints.files import MODEL
from unicron_lightning.checkpoints.index import read_checkpoint
from unicron_lightning.errors import ConfigError

SHARDS: Final = 2
WORKERS: Final = 4


class Net(nn.Module):
    """A net with dropout and a norm, some of whose layers cannot be divided evenly.

    Args:
        norm: of the batch, or the layer.
    """

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 7, bias=False), norm(7), nn.Dropout(0.2), nn.Linear(7, 4))
        self.back = nn.Linear(7, 1)

    def forward(self, batch: Any) -> Any:
        """Return the loss, and the net's view of the values."""
        _, values, targets = batch
        hidden = self.layers[:3](values)
        seen = self.layers[3](hidden)
        return nn.functional.mse_loss(self.back(hidden), targets), seen


def refusal(act: Callable[[], Any]) -> str:
    """Return the message with which something is refused; empty if it is not, as without gradients."""
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


class Models:
    """Two models that are trained, and a frozen one.

    Args:
        run: to which they belong.
        shards: whether those that are trained are sharded.
        streams: whether they are evaluated on streams.
        norm: of the net.
        critic: whether the critic is sharded, too.
    """

    def __init__(
        self, run: unicron.Run, *, shards: bool, streams: bool, norm: type[nn.Module], critic: bool = True
    ) -> None:
        self.data = Stream() if streams else Numbers()
        self.net, self.critic, self.teacher = Net(norm), nn.Linear(4, 1), nn.Linear(4, 1)
        self.teacher.requires_grad_(False)
        for module in (self.net.layers[3], self.net, *([self.critic] if critic else [])) if shards else ():
            fully_shard(module, mesh=run.mesh)
        run.register(net=self.net, critic=self.critic, teacher=self.teacher)

    def loss(self, batch: Any) -> Any:
        """Return the loss of the net, and a number that shows which samples it was of."""
        loss, seen = self.net(batch)
        return {"loss": loss + 0.1 * self.critic(seen).mean(), "samples": torch.sin(batch[0].double()).sum()}

    def criticism(self, batch: Any) -> Any:
        """Return the loss of the critic."""
        with torch.no_grad():
            _, seen = self.net(batch)
        return nn.functional.mse_loss(self.critic(seen), self.teacher(batch[1])) * 0.1 * torch.rand(())

    def evaluate(self, run: unicron.Run) -> float:
        """Return the mean of the net's loss."""
        return float(run.evaluate(self.data, lambda batch: self.net(batch)[0], batch_size=5))


class Average:
    """Average of a model's parameters over the steps, of this worker's parts of them.

    Args:
        model: whose parameters are averaged.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = {name: torch.zeros_like(each) for name, each in self._parts()}

    def add(self) -> None:
        """Add the present parameters."""
        for name, each in self._parts():
            self.values[name].lerp_(each, 0.2)

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with another's average, or with this worker's part of that of a whole model."""
        for name, each in state.items():
            whole = self._model.get_parameter(name).shape  # a joiner's shard may be another one than it began with
            rows = self._rows(name) if each.shape == whole else slice(None)
            self.values[name] = each[rows].clone()

    def _rows(self, name: str) -> slice:
        whole = self._model.get_parameter(name)
        assert isinstance(whole, DTensor)
        rows = -(-len(whole) // whole.device_mesh.size())
        first = whole.device_mesh.get_local_rank() * rows
        return slice(first, first + rows)

    def _parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self._model.named_parameters():
            yield name, each.detach().to_local() if isinstance(each, DTensor) else each.detach()


def whole(path: str) -> dict[str, Any]:
    """Return the whole tensors of the models in a checkpoint."""
    if Path(path).is_dir():
        found: dict[str, Any] = read_checkpoint(path)[MODEL]
        return found
    saved = torch.load(path, weights_only=True)
    return {f"{model}.{key}": each for model in ("net", "critic", "teacher") for key, each in saved[model].items()}


def save(run: unicron.Run, step: int, folder: Path, *, beside: bool) -> None:
    """Save at the step where it is due; at several ones beside the training, whose first writer has to start."""
    first = folder / "checkpoints" / f"step={SAVED}.ckpt"
    while beside and step == SAVED + 2 and not (first.exists() or any(folder.glob("died-*"))):
        time.sleep(0.005)
    if step in (range(SAVED, SAVED + 8) if beside else (SAVED,)):
        run.save()


def flip(run: unicron.Run, layer: nn.Module, node: str, step: int, *, same: bool) -> None:
    """Have a layer's outputs be wrong on a node from a step on, in training, in the same way each time or not."""
    calls = itertools.count()

    def changed(_module: nn.Module, _given: Any, found: torch.Tensor) -> torch.Tensor | None:
        world = run.engine.world
        if not torch.is_grad_enabled() or run.global_step + 1 < step or not world.nodes[world.rank].endswith(node):
            return None
        return found * (1.0 + 0.5 ** (10 + (0 if same else next(calls) % 30)))

    layer.register_forward_hook(changed)


def plain(values: dict[str, Any]) -> dict[str, float]:
    """Return numbers instead of tensors."""
    return {key: float(value) for key, value in values.items()}


def started(out: Path, shards: int | None, options: dict[str, Any], *, streams: bool) -> unicron.Run:
    """Return the run, without models."""
    return unicron.Run(
        Stream() if streams else Numbers(),
        micro_batch_size=4,
        # Of seven micro-batches, so that the last row is incomplete, and the last step shorter.
        global_batch_size=24 if streams else 28,
        streams=3 if streams else 1,
        seed=3,
        checkpoints=out / "checkpoints",
        digest_every=2,
        shard_size=shards,
        **options,
    )


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    out = folder / name if name.startswith("alone") else folder
    out.mkdir(exist_ok=True)
    options = json.loads((folder / "options.json").read_text()) if (folder / "options.json").exists() else {}
    shards = None if name.startswith("alone") else options.get("shards", SHARDS)
    streams = name.startswith(("alone-stream", "stream"))
    run = started(out, shards, options.get("run", {}), streams=streams)
    deaths = Deaths(folder, run, options.get("workers", WORKERS))
    norm = nn.BatchNorm1d if options.get("batch_norm", True) else nn.LayerNorm
    whole_updates = options.get("whole_updates", "")
    models = Models(run, shards=shards is not None, streams=streams, norm=norm, critic=not whole_updates)
    if shards and "flips" in options:
        flip(run, models.net.layers[0], **options["flips"])
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(models.net.parameters(), lr=0.01, eps=1e-3)
    if whole_updates:
        optimizer = PRECONDITIONED[whole_updates](models.net.parameters(), lr=0.01, eps=1e-1)
    judge = torch.optim.SGD(models.critic.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    average = Average(models.net)
    run.register(optimizer=optimizer, judge=judge, schedule=schedule)
    if options.get("average", True):
        run.register(average=average)
    if "load" in options:
        run.load(options["load"])
    result: dict[str, Any] = {"losses": {}, "evaluated": {}, "refused": "", "shards": run.mesh.size() if shards else 1}
    for step in run.steps(max_epochs=EPOCHS):
        deaths.wait()
        found = step.run(models.loss, max_norm=0.3 if whole_updates else None)
        deaths.at("body")
        if shards and step.number == SAVED:
            result["refused"] = refusal(lambda: nn.utils.clip_grad_norm_(models.net.parameters(), 1.0))
        norm = 0.0 if whole_updates else step.clip_grad_norm_(0.3)
        optimizer.step()
        schedule.step()
        average.add()
        judged = step.run(models.criticism)
        judge.step()
        result["losses"][step.number] = plain({**found, "judged": judged, "norm": norm})
        step.log(**found)
        save(run, step.number, folder, beside=options.get("run", {}).get("beside", False))
        if step.ends_epoch:
            result["evaluated"][step.number] = models.evaluate(run)
    result["predicted"] = run.predict(models.data, lambda batch: float(models.net(batch)[0]), batch_size=5)
    result["evaluated"][0] = models.evaluate(run)
    result["state"] = whole(run.save(out / "last.ckpt"))
    result |= {"step": run.global_step, "rate": schedule.get_last_lr(), "random": torch.rand(1)}
    if options.get("average", True):
        result["average"] = (run.mesh.get_local_rank() if shards else 0, average.values)
    write(result, folder, out)
