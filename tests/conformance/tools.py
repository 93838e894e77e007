"""Scenarios of Lightning's tools: command line, tuner, profilers."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from conformance.lab import QUIET, Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner


@scenario(
    simple={"made": lambda lab: SimpleProfiler()},
    file={"made": lambda lab: SimpleProfiler(dirpath=lab.folder, filename="p")},
    advanced={"made": lambda lab: AdvancedProfiler(dirpath=lab.folder, filename="p")},
    none={"made": lambda lab: PassThroughProfiler()},
    simple_text={"made": lambda lab: "simple"},
    advanced_text={"made": lambda lab: "advanced"},
    torch={"made": lambda lab: PyTorchProfiler(dirpath=lab.folder, filename="p", export_to_chrome=False)},
)
def profiler(lab: Lab, made: Any) -> None:
    trainer = lab.trainer(profiler=made(lab))
    printed = io.StringIO()
    with redirect_stdout(printed):
        trainer.fit(Net())
    profile = trainer.profiler
    lab.see(kind=type(profile).__name__)
    if isinstance(profile, SimpleProfiler):
        own = ("[Strategy]", "[Callback]Trace", "val_next", "train_dataloader_next", "batch_to_device")
        own += ("[LightningModule]Net.on_before_batch_transfer",)  # the loop also calls it with the global batch
        counts = {name: len(times) for name, times in profile.recorded_durations.items()}
        lab.see(counts={name: count for name, count in sorted(counts.items()) if not name.startswith(own)})


@scenario(none={"profiler": None}, own={"profiler": "x"})
def profiler_in_module(lab: Lab, profiler: Any) -> None:
    used = SimpleProfiler() if profiler else None

    class Profiled(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("own"):
                return super().training_step(batch, batch_idx)

    lab.trainer(profiler=used).fit(Profiled())
    if used is not None:
        lab.see(own=len(used.recorded_durations["own"]))


class Tuned(Net):
    def __init__(self, lr: float = 0.05, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])

    def train_dataloader(self) -> Any:
        return loader(12, batch_size=self.hparams["batch_size"])


@scenario(
    plain={}, linear={"mode": "linear"}, few={"num_training": 6}, validate={"method": "validate"},
    none={"num_training": 0}, range={"min_lr": 1e-4, "max_lr": 0.01}, attribute={"attr_name": "rate"},
)  # fmt: skip
def lr_find(lab: Lab, **options: Any) -> None:
    trainer, module = lab.trainer(), Tuned()
    found = Tuner(trainer).lr_find(module, **{"num_training": 12, "max_lr": 0.1} | options)
    lab.see(suggestion=found and found.suggestion(), results=found and found.results, rate=module.hparams["lr"])
    lab.see(step=trainer.global_step)
    trainer.fit(module)


@scenario(power={"mode": "power"}, binary={"mode": "binsearch"}, wrong={"mode": "x"})
def scale_batch_size(lab: Lab, mode: str) -> None:
    module = Tuned()
    found = Tuner(lab.trainer()).scale_batch_size(module, mode=mode, max_trials=2, steps_per_trial=1)
    lab.see(found=found, size=module.hparams["batch_size"])


@scenario(power={"mode": "power"}, binary={"mode": "binsearch"}, alone=True)
def batch_size_finder(lab: Lab, mode: str) -> None:
    module = Tuned()
    finder = BatchSizeFinder(mode=mode, max_trials=2, steps_per_trial=1)
    trainer = lab.trainer(finder)
    trainer.fit(module)
    lab.see(found=finder.optimal_batch_size, size=module.hparams["batch_size"], step=trainer.global_step)


class Commanded(Net):
    def __init__(self, width: int = 3, rate: float = 0.05) -> None:
        super().__init__(rate)
        self.save_hyperparameters()


def commands(lab: Lab, line: list[str], **options: Any) -> Any:
    """Run `LightningCLI` with a command line."""
    from lightning.pytorch.cli import LightningCLI

    given: dict[str, Any] = {
        "strategy": lab.strategy,
        "accelerator": "cpu",
        "devices": lab.devices,
        **QUIET,
        "max_epochs": 1,
    }
    sys.argv = ["script.py", *line]
    return LightningCLI(options.pop("model", Commanded), trainer_defaults=given, **options)


@scenario(
    fit={"line": ["fit"]},
    model={"line": ["fit", "--model.rate=0.01", "--model.width", "5"]},
    trainer={"line": ["fit", "--trainer.max_epochs=2", "--trainer.limit_train_batches=3"]},
    seed={"line": ["fit", "--seed_everything=9"]},
    validate={"line": ["validate"]},
    test={"line": ["test"]},
    predict={"line": ["predict"]},
    optimizer={"line": ["fit", "--optimizer=Adam", "--optimizer.lr=0.02"]},
    scheduler={
        "line": [
            "fit",
            "--optimizer=SGD",
            "--optimizer.lr=0.1",
            "--lr_scheduler=ExponentialLR",
            "--lr_scheduler.gamma=0.5",
        ]
    },
    file={"line": ["fit", "--config=run.yaml"]},
    unknown={"line": ["fit", "--model.unknown=3"]},
    subcommand={"line": ["train"]},
    none={"line": []},
    callbacks={
        "line": [
            "fit",
            "--trainer.callbacks+=LearningRateMonitor",
            "--trainer.logger=CSVLogger",
            "--trainer.logger.save_dir=logs",
        ]
    },
    print={"line": ["fit", "--print_config"]},
    forced={"line": ["fit", "--trainer.strategy.class_path=unicron_lightning.strategies.unicron.UnicronStrategy"]},
    needs="jsonargparse",
)
def command_line(lab: Lab, line: list[str]) -> None:
    Path("run.yaml").write_text("model:\n  rate: 0.02\ntrainer:\n  max_steps: 3\n")
    cli = commands(lab, line, save_config_callback=None)
    lab.see(rate=cli.model.rate, steps=cli.trainer.global_step, hparams=dict(cli.model.hparams))


@scenario(needs="jsonargparse")
def command_line_saves_its_configuration(lab: Lab) -> None:
    cli = commands(lab, ["fit", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"])
    text = (Path(cli.trainer.log_dir) / "config.yaml").read_text()
    lab.see(saved="max_epochs: 1" in text and "rate: 0.05" in text)


@scenario(needs="jsonargparse")
def command_line_without_run(lab: Lab) -> None:
    cli = commands(lab, ["--model.rate=0.03"], run=False, save_config_callback=None)
    lab.see(rate=cli.model.rate)
    cli.trainer.fit(cli.model)


@scenario(needs="jsonargparse")
def command_line_with_data(lab: Lab) -> None:
    class Data(pl.LightningDataModule):
        def __init__(self, size: int = 6) -> None:
            super().__init__()
            self.size = size

        def train_dataloader(self) -> Any:
            return loader(self.size)

    cli = commands(lab, ["fit", "--data.size=8"], datamodule_class=Data, save_config_callback=None)
    lab.see(steps=cli.trainer.global_step)
