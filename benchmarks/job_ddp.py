"""The workload under plain DDP with a periodic checkpoint, restarted by torchrun."""

from __future__ import annotations

import workload

log = workload.EventLog()
log("started")

import contextlib  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    checkpoint, first = Path(os.environ["BENCH_LOG"]) / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    log("restored", step=first)
    for step in range(first, workload.STEPS):
        optimizer.zero_grad()
        for place in range(workload.MICRO_BATCHES):
            micro = workload.number(step, place, rank)
            last = place == workload.MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                try:
                    (workload.loss(model, *workload.samples(micro)) / workload.MICRO_BATCHES).backward()
                except RuntimeError:  # raised by gloo when a peer's sockets are closed
                    log("reacted")
                    raise
            log("micro", step=step, place=place, micro=micro)
        optimizer.step()
        log("step", step=step, world=world)
        if rank == 0 and (step + 1) % workload.CHECKPOINT_EVERY == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)


if __name__ == "__main__":
    main()
