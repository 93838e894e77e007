"""The workload of `job_ddp` with LM-Resiliency's checkpoints in memory, and in files of the node after each step."""

from __future__ import annotations

import os
from pathlib import Path

import job_ddp
import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig, enable_resiliency
from torch import nn


class Checkpoints(job_ddp.Checkpoints):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        folder = str(Path(os.environ["BENCH_LOG"]) / "gemini")
        self._handle = enable_resiliency(
            model,
            optimizer,
            interval=1,
            enable_detection=False,  # replays micro-batches on GPUs
            checkpoint=InMemoryCkptConfig(
                interval=1, disk_flush_interval=1, disk_folder=folder, run_id="bench", pin_memory=False
            ),
            group=dist.new_group(backend="gloo"),
            nccl_group=dist.new_group(backend="gloo"),  # it would make one of NCCL, which needs GPUs
            device=torch.device("cpu"),
        )

    def load(self) -> int:
        return int(self._handle.step_count)

    def after_step(self, step: int) -> None:
        """Its hooks save."""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    job_ddp.train(Checkpoints)
