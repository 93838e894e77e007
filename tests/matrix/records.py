"""Recorders of a training: logged rows and hook calls."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger

Call = tuple[str, ...]
"""A hook and the types of its arguments beyond trainer and module."""


class Memory(Logger):
    """Keeps each row that this rank is asked to log."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Hooks(pl.Callback):
    """Notes each hook.

    Args:
        calls: where, together with the module's own.
    """

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls


def _noting(name: str) -> Callable[..., None]:
    def hook(self: Hooks, *args: Any, **kwargs: Any) -> None:
        batch = "batch_start" in name or "batch_end" in name  # a batch of another class is one of the documented things
        self.calls.append((name, *(() if batch else (type(each).__name__ for each in args[2:]))))

    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") and _name not in ("on_exception", "on_load_checkpoint"):
        setattr(Hooks, _name, _noting(_name))


def checkpoints(folder: Path) -> dict[str, Any]:
    """The contents of all checkpoints of a folder that do not depend on its path."""
    saved = {}
    for path in sorted(folder.glob("*.ckpt")):
        checkpoint = torch.load(path, weights_only=False)
        kept = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")
        states = {_unplaced(name, folder): _unplaced(state, folder) for name, state in checkpoint["callbacks"].items()}
        saved[path.name] = {name: checkpoint[name] for name in kept} | {"callbacks": states}
    return saved


def _unplaced(value: Any, folder: Path) -> Any:
    """The value without the folder in its strings."""
    if isinstance(value, str):
        return value.replace(str(folder), "")
    if isinstance(value, dict):
        return {_unplaced(key, folder): _unplaced(each, folder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_unplaced(each, folder) for each in value]
    return value


def table(folder: Path) -> list[tuple[str, dict[str, float]]]:
    """All rows of the CSV loggers, with their runs."""
    rows = []
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rows.append((path.parent.name, {name: float(value) for name, value in row.items() if value}))
    return rows
