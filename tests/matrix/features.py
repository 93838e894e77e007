"""The matrix: features of Lightning by axis, and the cases that are made of them.

A case takes one value of each axis; the first value of an axis is its default. Each pair of values of two axes is in at
least one case (`pairs`), so that few trainings meet all pairs. Features of `EXTRA`, each of which changes most of what
is compared, have a case of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from matrix.pairs import covering

Case = dict[str, str]
"""The name of the value of each axis."""

OPTIMIZERS: Final = ("sgd", "adamw", "groups")
SCHEDULERS: Final = ("none", "per_step", "per_epoch", "plateau", "one_cycle")
LOGGING: Final[dict[str, dict[str, Any]]] = {
    "epoch": {"on_step": False, "on_epoch": True, "sync_dist": True},
    "both": {"on_step": True, "on_epoch": True, "sync_dist": True},
    "step": {"on_step": True, "on_epoch": False, "sync_dist": True},
    "bar": {"on_step": True, "on_epoch": True, "sync_dist": True, "prog_bar": True, "logger": False},
    "weighted": {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 3},
}
LOADERS: Final[dict[str, dict[str, Any]]] = {
    "shuffled": {"shuffle": True},
    "in_order": {},
    "workers": {"shuffle": True, "num_workers": 1},
    "drop_last": {"shuffle": True, "drop_last": True},
}
EVALUATION: Final = ("one", "two_loaders", "shuffled", "other_size")
WHEN: Final[dict[str, dict[str, Any]]] = {
    "each_epoch": {},
    "every_2": {"val_check_interval": 2},
    "half": {"val_check_interval": 0.5},
    "by_time": {"val_check_interval": timedelta(microseconds=1)},
    "every_2_epochs": {"check_val_every_n_epoch": 2},
}
LENGTH: Final[dict[str, dict[str, Any]]] = {
    "whole": {},
    "limits": {"limit_train_batches": 4, "limit_val_batches": 2},
    "max_steps": {"max_steps": 11},
    "fraction": {"limit_train_batches": 0.5},
}
CLIPPING: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "unchecked": {"num_sanity_val_steps": 0, "log_every_n_steps": 1},
    "strict": {"detect_anomaly": True, "inference_mode": False, "deterministic": True},
}
CALLBACKS: Final = ("none", "early_stopping", "top_k", "every_steps", "averaging", "peeking")

AXES: Final[dict[str, tuple[str, ...]]] = {
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "logging": tuple(LOGGING),
    "loader": tuple(LOADERS),
    "evaluation": EVALUATION,
    "when": tuple(WHEN),
    "length": tuple(LENGTH),
    "accumulation": ("1", "2"),
    "clipping": tuple(CLIPPING),
    "precision": ("32-true", "64-true", "bf16-mixed"),
    "callback": CALLBACKS,
    "metrics": ("none", "objects", "collection"),
    "model": ("plain", "frozen", "tied", "buffers"),
    "run": ("fit", "evaluated", "resumed", "datamodule"),
    "options": tuple(OPTIONS),
}
EXTRA: Final[dict[str, Case]] = {
    "no_validation": {"evaluation": "none"},
    "uneven": {"loader": "uneven"},
    "own_sampler": {"loader": "own_sampler"},
    "local_logging": {"logging": "local"},
    "norms": {"model": "norms"},
    "metric_steps": {"metrics": "steps", "logging": "both"},
    "rate_finder": {"callback": "rate_finder"},
    "scheduled": {"callback": "scheduler", "accumulation": "2"},
}
"""Cases of a single feature, beside the defaults."""
FORBIDDEN: Final = (
    {"callback": "averaging", "run": "resumed"},  # Lightning's own callback fails on a resume
    {"when": "by_time", "callback": "early_stopping"},  # so does this one
    {"when": "by_time", "accumulation": "2"},  # ddp validates between the batches of an accumulation
)
"""Pairs that are not compared."""


def cases(seed: int = 9) -> Iterator[tuple[str, Case]]:
    """All cases by name."""
    defaults = {axis: values[0] for axis, values in AXES.items()}
    yield "defaults", defaults
    for number, case in enumerate(covering(AXES, FORBIDDEN, seed)):
        yield f"pairs_{number:02}", case
    for name, changes in EXTRA.items():
        yield name, defaults | changes
