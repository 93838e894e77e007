"""The work on which every system is timed, and its event log, which records the fate of each micro-batch.

Needs torch only, since jobs of systems without Lightning import it too. A worker writes one JSON line per event to
``$BENCH_LOG/worker_<slot>_<pid>.jsonl``:

    started                         the script's first line
    reacted                         the worker has learned of the failure
    micro    step, micro, place     forward and backward of a micro-batch are done; ``micro`` is its number in the data,
                                    and ``number``, from ``unicron``, that in the step
    step     step, world            an optimizer step is done
    dropped  step                   a step was discarded
    restored step                   state was loaded
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WORKERS = int(os.environ.get("BENCH_WORKERS", "3"))
MICRO_BATCHES = int(os.environ.get("BENCH_MICRO_BATCHES", "4"))
"""Micro-batches per worker and optimizer step."""
MICRO_SECONDS = float(os.environ.get("BENCH_MICRO_SECONDS", "0.05"))
"""Emulated compute time per micro-batch."""
MICRO_SIZE = 16
STEPS = 100_000
CHECKPOINT_EVERY = 10
FEATURES, HIDDEN, CLASSES = 64, 512, 10
SLOT = os.environ.get("BENCH_SLOT", os.environ.get("LOCAL_RANK", "0"))
STUCK = Path(os.environ.get("BENCH_LOG", "")) / f"stuck_{SLOT}"


class EventLog:
    """Appends events as lines that are written at once."""

    def __init__(self, slot: str = SLOT) -> None:
        self._slot = slot
        path = Path(os.environ["BENCH_LOG"]) / f"worker_{slot}_{os.getpid()}.jsonl"
        self._file = path.open("a", buffering=1)

    def __call__(self, event: str, **fields: object) -> None:
        line = {"t": time.time(), "event": event, "slot": self._slot, "pid": os.getpid(), **fields}
        self._file.write(json.dumps(line) + "\n")


def model() -> nn.Module:
    """A small perceptron with the same initial parameters in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def samples(micro: int) -> tuple[Tensor, Tensor]:
    """The samples of micro-batch ``micro``, numbered over the whole run."""
    generator = torch.Generator().manual_seed(micro)
    features = torch.randn(MICRO_SIZE, FEATURES, generator=generator)
    return features, torch.randint(0, CLASSES, (MICRO_SIZE,), generator=generator)


class Samples(Dataset[Any]):
    """One item is one micro-batch."""

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES * WORKERS

    def __getitem__(self, micro: int) -> tuple[int, Tensor, Tensor]:
        return micro, *samples(micro)


def number(step: int, place: int, worker: int) -> int:
    """Number of the micro-batch at a worker's ``place`` in a step, where each worker has a fixed share."""
    return (step * MICRO_BATCHES + place) * WORKERS + worker


def loss(network: nn.Module, features: Tensor, classes: Tensor) -> Tensor:
    """The loss, after the emulated compute time; once there is a file ``stuck_<slot>`` in the log's folder, never."""
    if STUCK.exists():
        STUCK.unlink()  # the replacement computes
        time.sleep(1e6)
    time.sleep(MICRO_SECONDS)
    return nn.functional.cross_entropy(network(features), classes)
