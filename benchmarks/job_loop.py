"""The workload under `unicron_lightning.Run`, without Lightning."""

from __future__ import annotations

import workload

log = workload.EventLog()
log("started")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import unicron_lightning as unicron  # noqa: E402


def main() -> None:
    network, latest = workload.model(), [-1]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    samples = workload.MICRO_SIZE * workload.MICRO_BATCHES * workload.WORKERS
    run = unicron.Run(
        DataLoader(workload.Samples(), batch_size=None),
        micro_batch_size=workload.MICRO_SIZE,
        global_batch_size=samples,
        seed=1,
    )
    run.register(network=network, optimizer=optimizer)

    def reached(point: str, *where: int) -> None:
        if point == "micro_batch":
            log("micro", step=where[0], place=where[1], micro=latest[0])
        elif point == "exchange":
            log("reacted", epoch=where[0])

    def loss_of(batch: tuple[int, Tensor, Tensor]) -> Tensor:
        latest[0] = int(batch[0])
        return workload.loss(network, batch[1], batch[2])

    run.engine.fault = reached
    for step in run.steps(workload.STEPS):
        step.run(loss_of)
        optimizer.step()
        log("step", step=step.number - 1, world=run.world_size)


if __name__ == "__main__":
    main()
