"""The workload under ``Trainer(strategy="unicron")``; with ``BENCH_EQUAL`` all workers have equal shares."""

from __future__ import annotations

import os

import workload

log = workload.EventLog()
log("started")


import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from unicron_lightning.strategies.unicron import UnicronStrategy  # noqa: E402


class Job(pl.LightningModule):
    """The perceptron; ``micro`` is the number of the latest micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network = workload.model()
        self.micro = -1

    def training_step(self, batch: tuple[int, Tensor, Tensor], index: int) -> Tensor:
        self.micro = int(batch[0])
        return workload.loss(self.network, batch[1], batch[2])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.network.parameters(), lr=1e-3)


class Telling(pl.Callback):
    """Writes the workload's event log."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, Job)

        def reached(point: str, *where: int) -> None:
            if point == "micro_batch":
                number = trainer.strategy.engine.activity.now.micro_batch  # type: ignore[attr-defined]
                log("micro", step=where[0], place=where[1], micro=module.micro, number=number)
            elif point == "exchange":
                log("reacted", epoch=where[0])

        trainer.strategy.engine.fault = reached  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        log("step", step=trainer.global_step - 1, world=trainer.world_size)


def main() -> None:
    trainer = pl.Trainer(
        strategy=UnicronStrategy(rebalance=False) if "BENCH_EQUAL" in os.environ else "unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=workload.WORKERS,
        accumulate_grad_batches=workload.MICRO_BATCHES,
        max_steps=workload.STEPS,
        callbacks=[Telling()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Job(), DataLoader(workload.Samples(), batch_size=None))


if __name__ == "__main__":
    main()
