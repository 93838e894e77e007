"""Kills workers, and has orders given, by a history."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import lightning.pytorch as pl
from cross.cases import FUNCTIONS, POINTS, Case, Strike

START_SECONDS: Final = 30.0
"""Most that workers wait for each other before their first step."""
PATIENCE_SECONDS: Final = 8.0
"""Most that survivors wait for a replacement: it may wait for them elsewhere."""
ORDER_SECONDS: Final = 0.5
"""Most that a worker waits until an order that was given shows in its world: it need not."""
PRODUCT: Final = ("/unicron_lightning/", "/strategies/", "/callbacks/")
"""Folders of the product's functions."""


class Strikes(pl.Callback):
    """Kills workers by a history.

    Args:
        case: has the history.
        folder: for marks, which all workers share.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self.fit = 0
        self._expected = 0
        self._replaces = bool(self._died())
        self._first = True
        self._armed: dict[int, int] = {}

    def at(self, point: str, trainer: pl.Trainer) -> None:
        """Die if it is time."""
        for number, strike in enumerate(self._case.strikes):
            if strike.point == point and self._is_due(strike, trainer) and self._claim(number, strike, trainer):
                if strike.signal == 0:
                    raise RuntimeError(f"strike {number}")
                os.kill(os.getpid(), strike.signal)

    def arm(self, trainer: pl.Trainer) -> None:
        """Die in the functions that are due from now on."""
        for number, strike in enumerate(self._case.strikes):
            if strike.point.isdecimal() and number not in self._armed and self._is_due(strike, trainer):
                self._armed[number] = int(strike.point)
        if self._armed and sys.getprofile() is None:
            threading.setprofile(self._called)
            sys.setprofile(self._called)

    def end(self) -> None:
        """Die no more."""
        self._armed.clear()
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not any(each in name for each in PRODUCT):
            return
        place = zlib.crc32(f"{Path(name).name}:{frame.f_code.co_qualname}".encode()) % FUNCTIONS
        for number, armed in list(self._armed.items()):
            if armed == place and self._claim(number, self._case.strikes[number], self._trainer):
                print(f"strike {number} in {Path(name).name}:{frame.f_code.co_qualname}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, trainer: pl.Trainer) -> None:
        """Wait until the replacement of a worker that has died may be admitted, or all are there at the start."""
        self._trainer = trainer
        died = len(self._died()) + len(list(self._folder.glob("came-*")))
        begins = self._first and self.fit == 1 and not died
        self._first = False
        if not begins and (self._replaces or not self._case.waits or died <= self._expected):
            return
        self._expected = died
        workers = self._case.script.workers
        _wait(START_SECONDS if begins else PATIENCE_SECONDS, lambda: _changes(trainer) or trainer.world_size >= workers)

    def order(self, trainer: pl.Trainer) -> None:
        """Have the orders given that are due, and wait a moment for their effect."""
        for number, order in enumerate(self._case.orders):
            path = self._folder / f"order-{number}"
            if order.fit != self.fit or trainer.global_step < order.step or path.exists():
                continue
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            _wait(PATIENCE_SECONDS, (self._folder / f"given-{number}").exists)
            _wait(ORDER_SECONDS, lambda: _changes(trainer))

    def _is_due(self, strike: Strike, trainer: pl.Trainer) -> bool:
        rank = trainer.global_rank
        if strike.joiner and not self._replaces:
            return False
        return strike.fit == self.fit and trainer.global_step >= strike.step and strike.rank in (rank, -1)

    def _claim(self, number: int, strike: Strike, trainer: pl.Trainer) -> bool:
        if strike.signal == 0 and strike.rank == -1 and not self._raises_in_this_life(number, trainer):
            return False
        who = trainer.global_rank if strike.rank == -1 else "one"
        try:
            (self._folder / f"died-{number}-{who}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _raises_in_this_life(self, number: int, trainer: pl.Trainer) -> bool:
        """Whether no worker has raised the error in another life: an error that comes again ends the task."""
        mark = f"raised-{number}-{trainer.strategy.engine.control.welcome.life}"  # type: ignore[attr-defined]
        (self._folder / mark).touch()
        return [path.name for path in self._folder.glob(f"raised-{number}-*")] == [mark]

    def _died(self) -> list[Path]:
        return list(self._folder.glob("died-*"))

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._trainer = trainer
        self.arm(trainer)  # in a joiner: before it has its state

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.wait(trainer)
        self.order(trainer)
        self.arm(trainer)
        self.at("on_train_batch_start", trainer)


def _wait(seconds: float, until: Callable[[], bool]) -> None:
    limit = time.monotonic() + seconds
    while not until() and time.monotonic() < limit:
        time.sleep(0.005)


def _changes(trainer: pl.Trainer) -> bool:
    """Whether the next operation is in another epoch."""
    engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
    return bool(engine.control.newer_than(engine.world.epoch))


def _hook(name: str) -> Any:
    def hook(self: Strikes, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.at(name, trainer)

    return hook


for _name in POINTS:
    if _name.startswith("on_") and _name not in vars(Strikes):
        setattr(Strikes, _name, _hook(_name))
