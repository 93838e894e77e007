"""The workload under torchft, written as in its README: one replica group per worker, gloo."""

from __future__ import annotations

import workload

log = workload.EventLog()
log("started")

import contextlib  # noqa: E402
import os  # noqa: E402
from datetime import timedelta  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: E402

# Values of torchft's own CPU example.
GROUP_TIMEOUT, MANAGER_TIMEOUT = timedelta(seconds=5), timedelta(seconds=30)


def main() -> None:
    group, network = int(os.environ["REPLICA_GROUP_ID"]), workload.model()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        log("restored", step=manager.current_step())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GROUP_TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"bench_{group}",
        timeout=MANAGER_TIMEOUT,
    )
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, torch.optim.Adam(model.parameters(), lr=1e-3))
    iteration = manager.current_step()
    while manager.current_step() < workload.STEPS:
        optimizer.zero_grad()  # starts the quorum
        micros = []
        for place in range(workload.MICRO_BATCHES):
            last = place == workload.MICRO_BATCHES - 1
            micros.append(workload.number(iteration, place, group))
            with contextlib.nullcontext() if last else model.no_sync():
                (workload.loss(model, *workload.samples(micros[-1])) / workload.MICRO_BATCHES).backward()
            log("micro", step=manager.current_step(), place=place, micro=micros[-1])
        healing = manager._healing  # a healing replica's gradients count as zero in this step
        optimizer.step()  # commits or discards the step
        world = manager.num_participants()
        if manager._commit_failures:
            log("dropped", step=manager.current_step())
        else:
            log("step", step=manager.current_step() - 1, world=world, zero=healing)
        iteration += 1  # as in torchft's example: the loader advances whether or not the step counted


if __name__ == "__main__":
    main()
