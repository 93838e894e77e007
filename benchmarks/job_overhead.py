"""Train the small GPT under a given strategy in segments; each starts when the harness orders it.

    torchrun ... job_overhead.py STRATEGY SIZE BUCKET_MIB ACCUMULATE SEGMENT_STEPS

The further seconds of `segments` are those spent on states for the agent's memory or on checkpoints.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from models import GPT
from segments import FOLDER, Segments
from torch.utils.data import DataLoader
from transformer import SIZES, Walks

NUM_SAMPLES = 65_536
ON_GPU = os.environ.get("BENCH_ACCELERATOR") == "gpu"


def strategy(name: str, bucket_mib: float) -> Strategy:
    """Lightning's DDP strategy or `UnicronStrategy`, with the same bucket size."""
    if name == "ddp":
        return DDPStrategy(process_group_backend="nccl" if ON_GPU else "gloo", bucket_cap_mb=bucket_mib)
    from unicron_lightning.strategies.unicron import UnicronStrategy

    return UnicronStrategy(bucket_mib=bucket_mib)


def unwatch() -> None:
    """Remove the statistics of steps: the training thread's activity is neither recorded nor watched."""
    from unicron_lightning.worker.control.activity import Activity
    from unicron_lightning.worker.control.thread import HEARTBEAT_SECONDS, Control

    for method in ("enter", "waits", "computed", "committed"):
        setattr(Activity, method, lambda *_: None)
    Control._watch = lambda self, monitor: HEARTBEAT_SECONDS  # type: ignore[method-assign]


STALL = [0.0]
"""Seconds that the training thread has spent on states for the agent's memory, or on checkpoints."""


def memory() -> pl.Callback:
    """Return a callback that stages a state every ten steps; its time is added to `STALL`."""
    from unicron_lightning.callbacks import MemoryCheckpoint
    from unicron_lightning.checkpoints.agent_memory import StateMemory

    boundary = StateMemory.boundary

    def timed(self: StateMemory, state: Any) -> None:
        since = time.perf_counter()
        boundary(self, state)
        STALL[0] += time.perf_counter() - since

    StateMemory.boundary = timed  # type: ignore[method-assign]
    return MemoryCheckpoint(every_n_steps=10)


def checkpoints(beside: bool) -> pl.Callback:
    """Return a callback that saves every ten steps; the time of its saves is added to `STALL`."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from unicron_lightning.callbacks import UnicronCheckpoint

    kind = UnicronCheckpoint if beside else ModelCheckpoint
    save = kind._save_checkpoint

    def timed(self: Any, *arguments: Any) -> None:
        since = time.perf_counter()
        save(self, *arguments)
        STALL[0] += time.perf_counter() - since

    kind._save_checkpoint = timed  # type: ignore[method-assign]
    if beside:
        from unicron_lightning.strategies.state.checkpointing import Persisting

        settle = Persisting.settle

        def waited(self: Persisting) -> None:
            since = time.perf_counter()
            settle(self)
            STALL[0] += time.perf_counter() - since

        Persisting.settle = waited  # type: ignore[method-assign]
    return kind(FOLDER / "checkpoints", every_n_train_steps=10)


def callbacks(name: str) -> list[pl.Callback]:
    """Callbacks of the jobs ``watched``, ``memory``, ``beside`` and ``saved``."""
    if name == "memory":
        return [memory()]
    if name in ("beside", "saved"):
        return [checkpoints(name == "beside")]
    if name != "watched":
        return []
    from unicron_lightning.callbacks import ThroughputMonitor, UnicronMonitor

    return [UnicronMonitor(), ThroughputMonitor()]


class Steps(pl.Callback):
    """Trains in segments."""

    def __init__(self, steps: int) -> None:
        self._segments = Segments(steps)
        self._done = 0

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._segments.wait()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: object) -> None:
        if trainer.global_step == self._done:
            return  # under gradient accumulation, ddp calls this hook for each micro-batch
        self._done = trainer.global_step
        self._segments.end_step(trainer.global_rank, STALL[0])


def main() -> None:
    name, size, bucket_mib, accumulate, steps = sys.argv[1:]
    if name == "unwatched":
        unwatch()
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy(name, float(bucket_mib)),
        accelerator="gpu" if ON_GPU else "cpu",
        precision="bf16-mixed" if ON_GPU else None,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        accumulate_grad_batches=int(accumulate),
        max_steps=1_000_000,
        callbacks=[Steps(int(steps)), *callbacks(name)],
        logger=False,
        enable_checkpointing=name in ("beside", "saved"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Walks(NUM_SAMPLES, SIZES[size].context), batch_size=SIZES[size].sequences)
    trainer.fit(GPT(SIZES[size], fused=ON_GPU), loader)


if __name__ == "__main__":
    main()
