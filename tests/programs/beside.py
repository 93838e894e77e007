"""Parts of scripts that are run under Lightning's ddp and under unicron, each in a process of its own or two.

``beside.py STRATEGY CASE`` prints what the case gives, as JSON; under torchrun with a folder as third argument, each
rank writes it there.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 21


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.batch_size = 4

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return data(32, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return data(32)


class LogsOutside(Net):
    """Logs in a method that is not compiled."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.note("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("val", self.loss(batch))

    @torch.compiler.disable
    def note(self, name: str, value: Tensor) -> None:
        self.log(name, value, on_step=False, on_epoch=True, sync_dist=True)


class LogsInside(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss)
        return loss


class Gathers(Net):
    """Gathers the validation samples of all ranks; the ranks have different numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.found: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[1].flatten())

    def on_validation_epoch_end(self) -> None:
        mine = torch.cat(self.seen)
        self.seen.clear()
        both = self.all_gather({"number": mine, "rows": [mine.unsqueeze(1).repeat(1, 2)]})
        same = self.trainer.strategy.all_gather(mine)
        assert torch.equal(both["number"], same) and torch.equal(both["rows"][0][..., 1], same)
        own = same[self.global_rank][: len(mine)].tolist() == mine.tolist()
        self.found.append([len(same), sorted(set(same.flatten().tolist())), same.numel() >= SAMPLES, own])


def data(number: int, **settings: Any) -> DataLoader[Any]:
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, torch.arange(float(number)).unsqueeze(1) / 10), **{"batch_size": 4} | settings)


def trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(strategy=strategy, accelerator="cpu", **{"devices": 1, "max_epochs": 1} | quiet | settings)


def numbers(used: pl.Trainer, module: pl.LightningModule) -> Any:
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return [used.global_step, {key: float(value) for key, value in used.callback_metrics.items()}, weights]


def compiled(strategy: str) -> Any:
    module, used = LogsOutside(), trainer(strategy)
    used.fit(torch.compile(module, backend="aot_eager"))  # type: ignore[arg-type]
    result = numbers(used, module)
    validated = used.validate(torch.compile(LogsOutside(), backend="aot_eager"), verbose=False)  # type: ignore[arg-type]
    return [*result, [dict(each) for each in validated], module._compiler_ctx is not None]


def compiled_log(strategy: str) -> Any:
    """torch 2.13 cannot compile Lightning's `self.log`, under no strategy."""
    try:
        trainer(strategy).fit(torch.compile(LogsInside(), backend="aot_eager"))  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - which one depends on the version of torch
        return type(error).__name__
    return "none"


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
}


class Copying(pl.Callback):
    """Copies trainer, strategy and module in the hooks of a run."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._copy("train_start", trainer, module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *about: Any) -> None:
        if trainer.global_step == 2:
            self._copy("train_batch_end", trainer, module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._copy("validation_end", trainer, module)

    def _copy(self, where: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for way, make in COPIES.items():
            for value in (trainer, trainer.strategy, module):
                made = make(value)
                steps = made.global_step if isinstance(made, pl.Trainer) else None
                self.found.append([where, way, type(value) is type(made), steps])


def copies(strategy: str) -> Any:
    """Copies work before, in and after a fit, and can be used for another one."""
    found: list[Any] = []
    folder = Path(os.environ["BESIDE_FOLDER"])
    settings = {
        "callbacks": [Copying(found), ModelCheckpoint(folder / strategy)],
        "logger": CSVLogger(folder / f"csv-{strategy}"),
        "log_every_n_steps": 2,
        "enable_checkpointing": True,
        "enable_progress_bar": True,
    }
    first, module = trainer(strategy, **settings), Net()
    before = {way: make(first) for way, make in COPIES.items() if way != "copy"}
    for way, made in before.items():
        made.callbacks = [each for each in made.callbacks if not isinstance(each, Copying)]
        again = Net()
        made.fit(again)
        found.append(["fit before", way, numbers(made, again)])
    first.fit(module)
    for way, make in COPIES.items():
        made = make(first)
        found.append(["after", way, made.global_step, sorted(made.callback_metrics), made.max_epochs])
        if way != "copy":
            made.fit_loop.max_epochs = 2
            made.callbacks = [each for each in made.callbacks if not isinstance(each, Copying)]
            again = make(module)
            made.fit(again)
            found.append(["fit after", way, numbers(made, again)])
    return found


class Looks(pl.Callback):
    """Reads what scripts read of strategy and loaders."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        for loader in (trainer.train_dataloader, trainer.val_dataloaders):
            about = [loader.batch_size, loader.drop_last, loader.collate_fn.__name__, loader.num_workers]
            self.found.append([*about, len(loader), len(loader.dataset), loader.pin_memory, type(loader).__name__])
        self.found.append([strategy.num_processes, strategy.world_size, trainer.num_devices, trainer.num_nodes])


def attributes(strategy: str) -> Any:
    looks = Looks()
    trainer(strategy, callbacks=[looks]).fit(Net(), data(30, drop_last=True, shuffle=True), data(SAMPLES))
    return looks.found


def gathers(strategy: str) -> Any:
    module, used = Gathers(), trainer(strategy, devices=2, num_sanity_val_steps=0, max_epochs=2)
    used.fit(module, data(32), data(SAMPLES))
    used.validate(module, data(SAMPLES + 1), verbose=False)
    return module.found


CASES: dict[str, Callable[[str], Any]] = {
    "compiled": compiled,
    "compiled_log": compiled_log,
    "copies": copies,
    "attributes": attributes,
}
"""Cases of one process."""


def main() -> None:
    strategy, case, *folder = sys.argv[1:]
    if folder:
        Path(folder[0], f"{strategy}-{case}-{os.environ['RANK']}.json").write_text(json.dumps(gathers(strategy)))
        if strategy == "ddp":
            os._exit(0)  # ddp's worker was seen to abort while its interpreter ended, after all its results
    else:
        print("RESULT", json.dumps(CASES[case](strategy)))


if __name__ == "__main__":
    main()
