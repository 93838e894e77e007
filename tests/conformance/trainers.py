"""Scenarios of scripts that hold a trainer's parts: its loops, its strategy, its loaders, one run after another."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import torch
from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler


@scenario(interrupt={"kind": KeyboardInterrupt}, error={"kind": RuntimeError}, alone=True)
def error_reaches_the_strategy(lab: Lab, kind: type[BaseException]) -> None:
    """The base class's method, which a script may have replaced, is called, too."""

    class Failing(Net):
        def on_fit_start(self) -> None:
            raise kind("own")

    with mock.patch("lightning.pytorch.strategies.strategy.Strategy.on_exception") as seen:
        lab.attempt("raised", lambda: lab.trainer().fit(Failing()))
    lab.see(calls=[str(each.args) for each in seen.mock_calls])


@scenario(first={"at": 0}, second={"at": 1})
def checkpoint_of_a_failed_validation(lab: Lab, at: int) -> None:
    class Failing(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if not self.trainer.sanity_checking and self.current_epoch == 1 and (dataloader_idx, batch_idx) == (at, 1):
                raise ValueError("own")
            return self.loss(batch)

        def val_dataloader(self) -> Any:
            return [loader(6), loader(6)]

    trainer = lab.trainer(OnExceptionCheckpoint(lab.folder), enable_checkpointing=True)
    lab.attempt("raised", lambda: trainer.fit(Failing()))
    lab.meet()  # no rank waits for the one that writes
    loops = torch.load(lab.folder / "on_exception.ckpt", weights_only=True)["loops"]["fit_loop"]
    lab.see(progress=loops["epoch_loop.val_loop.batch_progress"], training=loops["epoch_loop.batch_progress"])


@scenario()
def loops_after_a_failed_step(lab: Lab) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1 and batch_idx == 2:
                raise ValueError("own")
            return super().training_step(batch, batch_idx)

    trainer = lab.trainer(OnExceptionCheckpoint(lab.folder), enable_checkpointing=True, limit_val_batches=0)
    lab.attempt("raised", lambda: trainer.fit(Failing()))
    lab.meet()  # no rank waits for the one that writes
    saved = torch.load(lab.folder / "on_exception.ckpt", weights_only=True)["loops"]["fit_loop"]
    lab.see(saved=saved, state=trainer.fit_loop.state_dict())
    trainer.fit_loop.load_state_dict(saved)
    trainer.fit_loop.epoch_loop.reset()
    lab.see(progress=trainer.fit_loop.epoch_loop.batch_progress.state_dict())


@scenario(automatic={}, closure={"closure": True})
def step_by_hand(lab: Lab, closure: bool = False) -> None:
    module = Net()
    trainer = lab.trainer(max_epochs=1)
    trainer.fit(module)
    trainer.state.stage = RunningStage.TRAINING
    arguments: Any = {"batch": next(iter(module.train_dataloader())), "batch_idx": 0}
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    if closure:
        lab.see(loss=loop._make_closure(arguments, trainer.optimizers[0], 0)(), gradient=module.layer.weight.grad)
    else:
        lab.see(loss=loop.run(trainer.optimizers[0], 0, arguments)["loss"])


@scenario(
    training={"stage": RunningStage.TRAINING, "number": 12},
    validation={"stage": RunningStage.VALIDATING, "number": 12},
    test={"stage": RunningStage.TESTING, "number": 12},
    prediction={"stage": RunningStage.PREDICTING, "number": 12},
    empty={"stage": RunningStage.TRAINING, "number": 0},
    alone=True,
)
def data_without_a_run(lab: Lab, stage: RunningStage, number: int) -> None:
    trainer, module, data = lab.trainer(), Net(), loader(number)
    name = f"{stage.dataloader_prefix}_dataloaders"
    trainer.strategy.connect(module)
    trainer.state.fn, trainer.state.stage = None, stage
    trainer._data_connector.attach_data(
        module, **{"train_dataloaders" if stage == RunningStage.TRAINING else name: data}
    )
    loops = {
        RunningStage.TRAINING: trainer.fit_loop,
        RunningStage.VALIDATING: trainer.validate_loop,
        RunningStage.TESTING: trainer.test_loop,
        RunningStage.PREDICTING: trainer.predict_loop,
    }
    loop: Any = loops[stage]
    loop.setup_data()
    shown = getattr(trainer, name.removesuffix("s") if stage == RunningStage.TRAINING else name)
    lab.see(batches=loop.max_batches, loader=type(shown).__name__)
    trainer.state.stage = None


@scenario(
    training={"name": "training_step"},
    validation={"name": "validation_step"},
    test={"name": "test_step"},
    prediction={"name": "predict_step"},
)
def step_set_to_none(lab: Lab, name: str) -> None:
    module = Net()
    setattr(module, name, None)
    lab.trainer().fit(module)


@scenario(
    list={"of": lambda data: [data]},
    dict={"of": lambda data: {"own": data}},
    combined={"of": lambda data: CombinedLoader([data], "min_size")},
    nested={"of": lambda data: {"own": [data]}},
)
def one_loader_in_a_collection(lab: Lab, of: Any) -> None:
    class Unpacking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            while not isinstance(batch[0] if isinstance(batch, list) else None, torch.Tensor):
                batch = batch["own"] if isinstance(batch, dict) else batch[0]
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return of(loader(12))

    trainer = lab.trainer()
    trainer.fit(Unpacking())
    lab.see(loader=type(trainer.train_dataloader).__name__)


@scenario(fit={"run": "fit"}, test={"run": "test"}, predict={"run": "predict"})
def advice_of_more_workers(lab: Lab, run: str) -> None:
    place = "lightning.pytorch.trainer.connectors.data_connector.suggested_max_num_workers"
    with mock.patch(place, return_value=4):
        getattr(lab.trainer(), run)(Net())


@scenario()
def overfit_without_validation_step(lab: Lab) -> None:
    class Looking(Net):
        validation_step: Any = None

        def train_dataloader(self) -> Any:
            data = loader(12).dataset
            return DataLoader(data, batch_size=2, sampler=RandomSampler(data))

    trainer = lab.trainer(overfit_batches=2)
    trainer.fit(Looking())
    lab.see(sampler=type(trainer.train_dataloader.sampler).__name__)


@scenario(alone=True)
def nothing_is_kept(lab: Lab) -> None:
    """Trainers, modules, loaders and batches of finished runs can be freed."""
    batches: list[Any] = []

    class Seeing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches.append(weakref.ref(batch[0]))
            return super().training_step(batch, batch_idx)

    kept: list[Any] = []
    for _ in range(3):
        module, data, trainer = Seeing(), loader(12), lab.trainer(Callback(), trace=False)
        trainer.fit(module, data)
        lab._trainers.clear()
        kept += [weakref.ref(module), weakref.ref(data), weakref.ref(trainer)]
        gc.collect()
        lab.see(**{f"batches{len(kept)}": [each() is None for each in batches]})
        del module, data, trainer
    gc.collect()
    lab.see(freed=[each() is None for each in kept])


@scenario(alone=True)
def loader_that_yields_none(lab: Lab) -> None:
    """Only the counters are compared of the batches that there are."""
    losses: list[Any] = []

    class Skipping(Net):
        def train_dataloader(self) -> Any:
            def collate(samples: Any) -> Any:
                x, y = (torch.stack(each) for each in zip(*samples, strict=True))
                return None if x[0, 0] < 0 else (x, y)

            return loader(12, collate_fn=collate)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses.append([batch_idx, batch[0][0, 0]])
            return super().training_step(batch, batch_idx)

    lab.trainer().fit(Skipping())
    lab.see(losses=losses)


@scenario()
def zeroing_of_ones_own(lab: Lab) -> None:
    class Zeroing(Net):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)

    lab.trainer().fit(Zeroing())
