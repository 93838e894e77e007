"""A worker whose optimizer updates while workers are killed: ``FOLDER NAME``.

Workers of the rank 1 die before, in and after updates, one by one, and their successors join.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from joins.walk import described
from optimizers.table import OPTIMIZERS, Matrices, data
from torch.overrides import TorchFunctionMode
from typing_extensions import override

EPOCHS: Final = 3
DEATHS: Final = {3: "compute", 6: "before", 10: "within", 13: "after"}
"""The point at which rank 1 dies, by the number of finished steps."""
DEATHS_OF_CLOSURES: Final = {**DEATHS, 15: "again"}
"""The same of optimizers that evaluate the loss several times in a step."""
MOST_SECONDS: Final = 60.0


class Strikes(pl.Callback):
    """Kills workers around their updates; the survivor waits at the next step until a successor may be admitted.

    Args:
        folder: for marks, which all workers share.
        alone: in a world of one, where nothing is killed.
    """

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self._folder, self._alone = folder, alone
        self._forwards = 0
        self._trainer: pl.Trainer | None = None
        self._joins = bool(self._struck())
        self._inside: _Inside | None = None

    def _struck(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("struck-*"))

    def strike(self, point: str) -> None:
        """Die, if this worker is to die at this point."""
        trainer = self._trainer
        if self._alone or trainer is None or trainer.world_size < 2 or trainer.global_rank != 1:
            return
        step = trainer.global_step
        mark = self._folder / f"struck-{step}"
        if DEATHS_OF_CLOSURES.get(step) == point and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._trainer = trainer
        module.net[0].register_forward_pre_hook(self._forward)
        trainer.optimizers[0].register_step_post_hook(self._after)

    def _forward(self, *_: Any) -> None:
        self._forwards += 1
        self.strike("compute")
        if self._forwards > 2:  # without failures each worker computes one micro-batch for each evaluation
            self.strike("again")

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.strike("before")
        if not self._alone:
            self._inside = _Inside(lambda: self.strike("within"))
            self._inside.__enter__()

    def _after(self, *_: Any) -> None:
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None
        self.strike("after")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._forwards = 0
        if self._alone:
            return
        step, struck = trainer.global_step, len(self._struck())
        who = "joiner" if self._joins else "member"
        self._joins = False
        if struck and trainer.world_size == 2:
            torch.save(described(trainer), self._folder / f"{who}-{struck}-{step}.pt")
        if trainer.world_size < 2 and struck:
            engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
            limit = time.monotonic() + MOST_SECONDS
            while not engine.control.newer_than(engine.world.epoch):
                assert time.monotonic() < limit, "no successor has come"
                time.sleep(0.01)


class _Inside(TorchFunctionMode):
    """Calls a function once torch has done something, as in the middle of an update."""

    def __init__(self, strike: Callable[[], None]) -> None:
        super().__init__()
        self._strike = strike

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        self._strike()
        return done


def train(name: str, folder: Path, *, alone: bool, strategy: str = "unicron") -> dict[str, Any]:
    """Train with an optimizer of the table; return what the trainer has then."""
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2 if alone else 1,
        num_nodes=1 if alone else 2,
        precision="64-true",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        callbacks=[Strikes(folder, alone=alone)],
    )
    trainer.fit(Matrices(OPTIMIZERS[name]), data())
    return described(trainer)


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    torch.save({"end": train(name, folder, alone=False)}, folder / f"result-{os.environ['RANK']}-{os.getpid()}.pt")
