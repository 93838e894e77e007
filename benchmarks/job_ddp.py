"""The workload under plain DDP with a periodic checkpoint, restarted by torchrun or ft_launcher."""

from __future__ import annotations

import workload

log = workload.EventLog()
log("started")

import contextlib  # noqa: E402
import os  # noqa: E402
from contextlib import AbstractContextManager, nullcontext  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


class Checkpoints:
    """A file that rank 0 writes after every tenth step; other systems replace this.

    Args:
        model, optimizer: it has their state.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._path = Path(os.environ["BENCH_LOG"]) / "checkpoint.pt"

    def load(self) -> int:
        """Load the newest state, if there is one; return the next step."""
        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def after_step(self, step: int) -> None:
        """Save the state if it is time."""
        if dist.get_rank() == 0 and (step + 1) % workload.CHECKPOINT_EVERY == 0:
            with self.saving():
                state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": step + 1}
                torch.save(state, self._path.with_suffix(".tmp"))
                self._path.with_suffix(".tmp").replace(self._path)

    def saving(self) -> AbstractContextManager[object]:
        """The context in which a file is written."""
        return nullcontext()


def train(kind: type[Checkpoints] = Checkpoints) -> None:
    """Train from the newest checkpoint on, in the default process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    checkpoints = kind(model.module, optimizer)
    first = checkpoints.load()
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
        checkpoints.after_step(step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
