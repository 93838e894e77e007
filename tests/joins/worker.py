"""A worker of a script in which one is killed, and its successor joins: ``FOLDER SCRIPT``.

It writes what it has at the end, and at the first step with the joiner.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from joins.acting import random_script
from joins.scripts import LOST, ODD, RESUMED, SCRIPTS, Run, Script
from joins.walk import described

MOST_SECONDS = 60.0


class Strike(pl.Callback):
    """Kills the worker of a rank at a step; the others then wait until its successor may be admitted.

    Args:
        script: defines when.
        folder: for marks, which all workers share.
        alone: in a world of one, where nothing is killed.
    """

    def __init__(self, script: Script, folder: Path, *, alone: bool) -> None:
        self._script, self._folder, self._alone = script, folder, alone
        self._killed = folder / "killed"
        self.replaces = self._killed.exists()
        self.fit = 0
        self._first = True

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._alone:
            return
        fit, step, rank = self._script.kill
        world = trainer.world_size
        if self._killed.exists():
            self._describe(trainer, batch_idx)
            if not self.replaces and world < 2:
                self._wait(trainer)
        elif rank is None and not self.replaces and self.fit == fit and trainer.global_step >= step:
            self._die_together(trainer)
        elif self.fit == fit and trainer.global_step >= step and world == 2 and trainer.global_rank == rank:
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _die_together(self, trainer: pl.Trainer) -> None:
        """Kill this worker once all are here."""
        (self._folder / f"here-{trainer.global_rank}").touch()
        while len(list(self._folder.glob("here-*"))) < trainer.world_size:
            time.sleep(0.01)
        (self._folder / f"dead-{trainer.global_rank}").touch()
        while len(list(self._folder.glob("dead-*"))) < trainer.world_size:
            time.sleep(0.001)
        self._killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait(self, trainer: pl.Trainer) -> None:
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        limit = time.monotonic() + MOST_SECONDS
        while not engine.control.newer_than(engine.world.epoch):
            assert time.monotonic() < limit, "no successor has come"
            time.sleep(0.01)

    def _describe(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Write what a joiner has at its first step, and what a member has at each."""
        who = "joiner" if self.replaces else "member"
        if self.replaces and not self._first:
            return
        self._first = False
        torch.save(described(trainer), self._folder / f"{who}-{self.fit}-{trainer.current_epoch}-{batch_idx}.pt")


def train(script: Script, folder: Path, *, alone: bool) -> dict[str, Any]:
    """Run the fits of a script; return what it has then."""
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    strike = Strike(script, folder, alone=alone)
    trainer = None
    for number, run in enumerate(script.runs(folder), 1):
        strike.fit = number
        if trainer is None or run.trainer is not None:
            trainer = _trainer(run, strike, folder, alone=alone)
        else:
            trainer.fit_loop.max_epochs += run.epochs
        assert isinstance(run, Run)
        trainer.fit(run.module, **run.data)
    assert trainer is not None
    return {"end": described(trainer), "replaces": strike.replaces}


def _trainer(run: Run, strike: Strike, folder: Path, *, alone: bool) -> pl.Trainer:
    given: dict[str, Any] = {
        "strategy": "unicron",
        "accelerator": "cpu",
        "devices": 2 if alone else 1,
        "num_nodes": 1 if alone else 2,
        "precision": "64-true",
        "max_epochs": run.epochs,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    given |= run.trainer or {}
    made = given.pop("strategy")
    made = made() if callable(made) and not alone else "unicron"
    return pl.Trainer(strategy=made, **given, callbacks=[strike, *run.callbacks])


def script_of(name: str) -> Script:
    """Return a script of the tables, or a random one by its seed."""
    kind, _, seed = name.partition("-")
    return random_script(int(seed), lost=kind == "lost") if seed else (SCRIPTS | RESUMED | LOST | ODD)[name]


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    result = train(script_of(name), folder, alone=False)
    torch.save(result, folder / f"result-{os.environ['RANK']}-{os.getpid()}.pt")
