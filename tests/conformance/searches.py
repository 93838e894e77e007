"""Scenarios of searches for a batch size or a rate, beyond the simple ones."""

from __future__ import annotations

from typing import Any

import torch
from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, EarlyStopping, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn


class Sized(Net):
    """A module with a batch size that its loaders have."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.batch_size = size

    def train_dataloader(self) -> Any:
        return loader(32, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(16, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


@scenario(
    alone=True, fit={"run": "fit"}, validate={"run": "validate"}, test={"run": "test"}, predict={"run": "predict"}
)
def batch_size_of_a_run(lab: Lab, run: str) -> None:
    module, finder = Sized(), BatchSizeFinder(max_trials=2, steps_per_trial=2)
    trainer = lab.trainer(finder)
    getattr(trainer, run)(module)
    again = Tuner(lab.trainer()).scale_batch_size(module, method=run, init_val=2, max_trials=8)
    lab.see(size=[finder.optimal_batch_size, again, module.batch_size])


@scenario(alone=True, power={"mode": "power"}, binary={"mode": "binsearch"})
def batch_size_that_memory_limits(lab: Lab, mode: str) -> None:
    class Large(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 5:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    module, trainer = Large(), lab.trainer()
    found = Tuner(trainer).scale_batch_size(module, mode=mode, init_val=8, steps_per_trial=1)
    trainer.fit(module)
    lab.see(sizes=[found, module.batch_size, trainer.train_dataloader.batch_size])


@scenario(alone=True)
def batch_size_at_epochs(lab: Lab) -> None:
    class Again(BatchSizeFinder):
        def on_fit_start(self, *about: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch != 1:
                self.scale_batch_size(trainer, pl_module)

    module, finder = Sized(), Again(max_trials=1, steps_per_trial=2)
    lab.trainer(finder, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module)
    lab.see(size=module.batch_size)


@scenario(alone=True)
def rate_at_epochs(lab: Lab) -> None:
    steps: list[list[Any]] = []

    class Again(LearningRateFinder):
        def on_fit_start(self, *about: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch != 1:
                self.lr_find(trainer, pl_module)
                loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop]
                steps.append([trainer.global_step, trainer.fit_loop.max_steps, *(each.restarting for each in loops)])

    finder = Again(num_training_steps=15, max_lr=0.1, early_stop_threshold=None, attr_name="rate")
    lab.trainer(finder, max_epochs=3).fit(Net())
    lab.see(steps=steps, losses=finder.optimal_lr.results["loss"])


@scenario(alone=True)
def rates_in_turn(lab: Lab) -> None:
    trainer, module = lab.trainer(limit_train_batches=4), Net()
    searches = [Tuner(trainer).lr_find(module, num_training=12, max_lr=0.1, attr_name="rate") for _ in range(2)]
    lab.see(results=[each.results for each in searches], batches=[each._total_batch_idx for each in searches])


@scenario(alone=True)
def rate_before_finetuning(lab: Lab) -> None:
    class Layered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([each for each in self.parameters() if each.requires_grad], lr=self.rate)

    trainer, module = lab.trainer(BackboneFinetuning(unfreeze_backbone_at_epoch=1), max_epochs=3), Layered()
    lab.see(results=Tuner(trainer).lr_find(module, num_training=8, max_lr=0.1, attr_name="rate").results)
    trainer.fit(module)


@scenario(alone=True)
def rate_beside_a_monitored_schedule(lab: Lab) -> None:
    class Monitored(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    finder = LearningRateFinder(num_training_steps=20, max_lr=0.1, attr_name="rate")
    stopping = EarlyStopping("val_loss", patience=3)
    trainer = lab.trainer(finder, stopping, max_epochs=6)
    trainer.fit(Monitored())
    lab.see(rate=trainer.optimizers[0].param_groups[0]["lr"], results=finder.optimal_lr.results)
