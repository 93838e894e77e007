"""Train the small GPT without Lightning in segments; each starts when the harness orders it.

    torchrun ... job_loop_overhead.py loop|plain SIZE BUCKET_MIB ACCUMULATE SEGMENT_STEPS

``loop`` is a loop of `unicron_lightning.Run`, ``plain`` the loop that one would write by hand with
DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from segments import Segments
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformer import SIZES, Transformer, Walks, loss_of

NUM_SAMPLES, MOST_STEPS = 65_536, 1_000_000


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Walks, sequences: int, accumulate: int, mib: float,
    segments: Segments,
) -> None:  # fmt: skip
    """Train by `unicron_lightning.Run`."""
    import unicron_lightning as unicron

    samples = sequences * accumulate * int(os.environ["WORLD_SIZE"])
    loader = DataLoader(data, batch_size=sequences)
    run = unicron.Run(loader, global_batch_size=samples, seed=1, bucket_mib=mib)
    run.register(model=model, optimizer=optimizer)
    segments.wait()
    for step in run.steps(MOST_STEPS):
        step.run(partial(loss_of, model))
        optimizer.step()
        optimizer.zero_grad()
        segments.end_step(run.global_rank)


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Walks, sequences: int, accumulate: int, mib: float,
    segments: Segments,
) -> None:  # fmt: skip
    """Train by DistributedDataParallel."""
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=mib)
    loader = DataLoader(data, batch_size=sequences, sampler=DistributedSampler(data, shuffle=False))
    segments.wait()
    while True:
        for number, batch in enumerate(loader, 1):
            last = number % accumulate == 0
            with contextlib.nullcontext() if last else wrapped.no_sync():
                (loss_of(wrapped, batch) / accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                segments.end_step(dist.get_rank())


def main() -> None:
    name, size, mib, accumulate, steps = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Transformer(SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Walks(NUM_SAMPLES, SIZES[size].context)
    train = loop if name == "loop" else plain
    train(model, optimizer, data, SIZES[size].sequences, int(accumulate), float(mib), Segments(int(steps)))


if __name__ == "__main__":
    main()
