"""The matrix: features of Lightning by axis, and the cases that are made of them.

A case takes one value of each axis. The first value of an axis is its default; every other value is in at least one
case, together with values of the other axes that a seeded generator picks, so that few trainings meet many pairs of
features.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

Case = dict[str, str]
"""The name of the value of each axis."""

OPTIMIZERS: Final = {"sgd": {"lr": 0.05, "momentum": 0.9}, "adamw": {"lr": 0.02, "eps": 1e-3}}
SCHEDULERS: Final = ("none", "per_step", "per_epoch", "plateau", "one_cycle")
LOGGING: Final[dict[str, dict[str, Any]]] = {
    "epoch": {"on_step": False, "on_epoch": True, "sync_dist": True},
    "both": {"on_step": True, "on_epoch": True, "sync_dist": True},
    "step": {"on_step": True, "on_epoch": False, "sync_dist": True},
    "sum": {"on_step": False, "on_epoch": True, "sync_dist": True, "reduce_fx": "sum"},
    "max": {"on_step": True, "on_epoch": True, "sync_dist": True, "reduce_fx": "max"},
    "bar": {"on_step": True, "on_epoch": True, "sync_dist": True, "prog_bar": True, "logger": False},
    "weighted": {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 3},
}
LOADERS: Final[dict[str, dict[str, Any]]] = {
    "shuffled": {"shuffle": True},
    "in_order": {},
    "workers": {"shuffle": True, "num_workers": 1},
    "drop_last": {"shuffle": True, "drop_last": True},
}
TRAINER: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip_norm": {"gradient_clip_val": 0.1},
    "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "val_every_3": {"val_check_interval": 3},
    "val_half": {"val_check_interval": 0.5},
    "val_by_time": {"val_check_interval": timedelta(microseconds=1)},
    "val_every_2_epochs": {"check_val_every_n_epoch": 2},
    "no_sanity": {"num_sanity_val_steps": 0},
    "limits": {"limit_train_batches": 4, "limit_val_batches": 2},
    "max_steps": {"max_steps": 7, "max_epochs": -1},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "log_often": {"log_every_n_steps": 1},
}
PRECISIONS: Final = ("32-true", "64-true", "bf16-mixed")
CALLBACKS: Final = ("none", "early_stopping", "top_k", "every_steps", "rates", "averaging", "peeking")

AXES: Final[dict[str, tuple[str, ...]]] = {
    "optimizer": tuple(OPTIMIZERS),
    "scheduler": SCHEDULERS,
    "logging": tuple(LOGGING),
    "loader": tuple(LOADERS),
    "trainer": tuple(TRAINER),
    "precision": PRECISIONS,
    "callback": CALLBACKS,
}


@dataclass(frozen=True, kw_only=True)
class Documented:
    """A difference that README's table names.

    Attributes:
        what: the kind of record that differs.
        when: the values of the cases in which it does; empty: in all.
        why: the line of the table, in short.
    """

    what: str
    when: Case
    why: str


EXCEPTIONS: Final = (
    Documented(
        what="hooks of validation batches", when={}, why="validation batches: as many hooks as this rank runs batches"
    ),
    Documented(what="hooks", when={"trainer": "accumulate"}, why="batch hooks once per optimizer step"),
    Documented(what="logged", when={"trainer": "accumulate"}, why="step values are of the whole step, not of its end"),
    Documented(what="metrics", when={"trainer": "accumulate"}, why="step values are of the whole step"),
)


def cases(seed: int = 0) -> Iterator[tuple[str, Case]]:
    """All cases by name: the defaults, then one for each other value."""
    picks = random.Random(seed)
    yield "defaults", {axis: values[0] for axis, values in AXES.items()}
    for axis, values in AXES.items():
        for value in values[1:]:
            case = {other: picks.choice(options) for other, options in AXES.items()} | {axis: value}
            yield f"{axis}_{value}", case


def is_documented(what: str, case: Case) -> bool:
    """Whether a difference of this kind is expected in a case."""
    return any(
        each.what == what and all(case[axis] == value for axis, value in each.when.items()) for each in EXCEPTIONS
    )
