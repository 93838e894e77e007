"""The workload under ``Trainer(strategy="unicron_fsdp")``: replicas of two shards, one worker per agent."""

from __future__ import annotations

import workload

log = workload.EventLog()
log("started")

from collections import Counter  # noqa: E402
from typing import Any  # noqa: E402

import lightning.pytorch as pl  # noqa: E402
from job_unicron import Job, Telling  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from unicron_lightning import UnicronFSDPStrategy  # noqa: E402

SHARDS = 2


class Sharded(Job):
    def configure_model(self) -> None:
        mesh: Any = self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in (*self.network.children(), self.network):
            if isinstance(layer, (nn.Linear, nn.Sequential)):
                fully_shard(layer, mesh=mesh)


class TellingShards(Telling):
    """A worker without a complete replica finishes a step without a share in it."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, module)
        activity: Any = trainer.strategy.engine.activity  # type: ignore[attr-defined]
        computed = activity.computed
        done: Counter[int] = Counter()

        def finished() -> None:
            computed()
            log("micro", step=trainer.global_step, place=done[trainer.global_step], micro=module.micro)
            done[trainer.global_step] += 1

        activity.computed = finished

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        place = trainer.strategy.fabric.place  # type: ignore[attr-defined]
        log("step", step=trainer.global_step - 1, world=trainer.world_size, zero=place.replica is None)


def main() -> None:
    trainer = pl.Trainer(
        strategy=UnicronFSDPStrategy(shard_size=SHARDS),
        accelerator="cpu",
        devices=1,
        num_nodes=workload.WORKERS,
        accumulate_grad_batches=workload.MICRO_BATCHES,
        max_steps=workload.STEPS,
        callbacks=[TellingShards()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sharded(), DataLoader(workload.Samples(), batch_size=None, shuffle=False))


if __name__ == "__main__":
    main()
