"""Scenarios of optimizers and schedulers."""

from __future__ import annotations

from typing import Any

import torch
from conformance.lab import Lab
from conformance.net import Net
from conformance.table import scenario
from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)


def sgd(module: Net) -> SGD:
    return SGD(module.parameters(), lr=0.1)


def with_step(module: Net, **options: Any) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), **options}}


def with_plateau(module: Net, **options: Any) -> Any:
    optimizer = sgd(module)
    plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=100.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **options}}


def pair(module: Net, scheduler: Any) -> Any:
    optimizer = sgd(module)
    return [optimizer], [scheduler(optimizer)]


FORMS: dict[str, Any] = {
    "single": sgd,
    "list": lambda m: [sgd(m)],
    "tuple": lambda m: (sgd(m),),
    "none": lambda m: None,
    "dict": lambda m: {"optimizer": sgd(m)},
    "dict_scheduler": lambda m: (lambda o: {"optimizer": o, "lr_scheduler": StepLR(o, 1, 0.5)})(sgd(m)),
    "lists": lambda m: pair(m, lambda o: StepLR(o, 1, 0.5)),
    "lists_of_dicts": lambda m: pair(m, lambda o: {"scheduler": ExponentialLR(o, 0.9), "interval": "step"}),
    "list_of_dict": lambda m: [{"optimizer": sgd(m)}],
    "two_tuple_of_lists": lambda m: ([sgd(m)], []),
    "epoch": lambda m: with_step(m, interval="epoch"),
    "step": lambda m: with_step(m, interval="step"),
    "every_third_step": lambda m: with_step(m, interval="step", frequency=3),
    "every_second_epoch": lambda m: with_step(m, interval="epoch", frequency=2),
    "named": lambda m: with_step(m, name="own"),
    "unknown_interval": lambda m: with_step(m, interval="week"),
    "unknown_key": lambda m: with_step(m, other=3),
    "extra_key": lambda m: {"optimizer": sgd(m), "other": 3},
    "no_scheduler": lambda m: {"optimizer": sgd(m), "lr_scheduler": {"interval": "step"}},
    "plateau": lambda m: with_plateau(m, monitor="loss"),
    "plateau_validation": lambda m: with_plateau(m, monitor="val_loss"),
    "plateau_step": lambda m: with_plateau(m, monitor="loss", interval="step"),
    "plateau_step_frequency": lambda m: with_plateau(m, monitor="loss", interval="step", frequency=4),
    "plateau_frequency": lambda m: with_plateau(m, monitor="loss", frequency=2),
    "plateau_without_monitor": with_plateau,
    "plateau_missing": lambda m: with_plateau(m, monitor="missing"),
    "plateau_missing_relaxed": lambda m: with_plateau(m, monitor="missing", strict=False),
    "plateau_bare": lambda m: pair(m, ReduceLROnPlateau),
    "plateau_flag": lambda m: with_plateau(m, monitor="loss", reduce_on_plateau=False),
    "several_schedulers": lambda m: (lambda o: ([o], [StepLR(o, 1, 0.5), ExponentialLR(o, 0.9)]))(sgd(m)),
    "cosine": lambda m: pair(m, lambda o: CosineAnnealingLR(o, 4)),
    "one_cycle": lambda m: pair(m, lambda o: {"scheduler": OneCycleLR(o, 1.0, total_steps=30), "interval": "step"}),
    "cyclic": lambda m: pair(m, lambda o: {"scheduler": CyclicLR(o, 0.01, 0.1), "interval": "step"}),
    "lambda": lambda m: pair(m, lambda o: LambdaLR(o, lambda epoch: 0.5**epoch)),
    "adam": lambda m: Adam(m.parameters(), lr=0.1),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "foreach": lambda m: AdamW(m.parameters(), lr=0.1, foreach=True),
    "fused": lambda m: AdamW(m.parameters(), lr=0.1, fused=True),
    "groups": lambda m: SGD([{"params": [m.layer.weight]}, {"params": [m.layer.bias], "lr": 0.01}], lr=0.1),
    "named_parameters": lambda m: SGD(m.named_parameters(), lr=0.1),
    "some_parameters": lambda m: SGD([m.layer.weight], lr=0.1),
    "two": lambda m: [sgd(m), sgd(m)],
    "scheduler_only": lambda m: StepLR(sgd(m), 1),
    "class": lambda m: SGD,
    "number": lambda m: 3,
    "other_optimizers_scheduler": lambda m: ([sgd(m)], [StepLR(sgd(m), 1)]),
    "frequency_in_optimizer": lambda m: {"optimizer": sgd(m), "frequency": 2},
    "no_parameters": lambda m: SGD([], lr=0.1),
}


@scenario(**{name: {"form": form} for name, form in FORMS.items()})
def configure_optimizers(lab: Lab, form: Any) -> None:
    class Configured(Net):
        def configure_optimizers(self) -> Any:
            return form(self)

    memory = []

    class Rates(Configured):
        def on_train_batch_end(self, *about: Any) -> None:
            memory.append([group["lr"] for each in self.trainer.optimizers for group in each.param_groups])

    trainer = lab.trainer(max_epochs=4)
    try:
        trainer.fit(Rates())
    finally:
        lab.see(rates=memory)
    lab.see(
        configs=[
            [c.interval, c.frequency, c.monitor, c.name, c.strict, c.reduce_on_plateau]
            for c in trainer.lr_scheduler_configs
        ]
    )
    state = [each.state_dict() for each in trainer.optimizers]
    lab.see(optimizers=state, kinds=[type(each).__name__ for each in trainer.optimizers])


@scenario(
    step={"interval": "step"},
    epoch={"interval": "epoch"},
    none={"interval": None},
    momentum={"interval": "step", "log_momentum": True},
    decay={"interval": "step", "log_weight_decay": True},
    wrong={"interval": "week"},
)
def learning_rate_monitor(lab: Lab, interval: Any, **options: Any) -> None:
    from conformance.logged import Memory

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = AdamW([{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 0.01}], lr=0.1)
            return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step", "name": "rate"}]

    memory = Memory()
    monitor = LearningRateMonitor(interval, **options)
    lab.trainer(monitor, logger=memory, log_every_n_steps=2).fit(Scheduled())
    lab.see(rows=memory.rows, rates=monitor.lrs)


@scenario()
def learning_rate_monitor_without_logger(lab: Lab) -> None:
    lab.trainer(LearningRateMonitor()).fit(Net())


@scenario()
def learning_rate_monitor_without_scheduler(lab: Lab) -> None:
    from conformance.logged import Memory

    memory = Memory()
    lab.trainer(LearningRateMonitor(), logger=memory).fit(Net())
    lab.see(rows=memory.rows)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.other.weight)
        torch.nn.init.zeros_(self.other.bias)

    def configure_optimizers(self) -> Any:
        first, second = SGD(self.layer.parameters(), lr=0.05), SGD(self.other.parameters(), lr=0.02)
        return [first, second], [StepLR(first, 2, 0.5), StepLR(second, 3, 0.5)]


def manual_plain(self: Any, batch: Any, batch_idx: int) -> None:
    first, second = self.optimizers()
    loss = (self.other(self(batch[0])) - batch[1]).square().mean()
    first.zero_grad()
    second.zero_grad()
    self.manual_backward(loss)
    first.step()
    second.step()
    self.log("loss", loss, on_step=True, on_epoch=True)


def manual_toggled(self: Any, batch: Any, batch_idx: int) -> None:
    for number, optimizer in enumerate(self.optimizers()):
        self.toggle_optimizer(optimizer)
        loss = (self.other(self(batch[0])) - batch[1]).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.log(f"loss{number}", loss)


def manual_toggled_context(self: Any, batch: Any, batch_idx: int) -> None:
    for optimizer in self.optimizers():
        with optimizer.toggle_model(sync_grad=True):
            loss = (self.other(self(batch[0])) - batch[1]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def manual_alternating(self: Any, batch: Any, batch_idx: int) -> None:
    optimizer = self.optimizers()[batch_idx % 2]
    loss = (self.other(self(batch[0])) - batch[1]).square().mean()
    optimizer.zero_grad()
    self.manual_backward(loss)
    optimizer.step()


def manual_accumulating(self: Any, batch: Any, batch_idx: int) -> None:
    loss = (self.other(self(batch[0])) - batch[1]).square().mean()
    self.manual_backward(loss / 2)
    if batch_idx % 2:
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def manual_closure(self: Any, batch: Any, batch_idx: int) -> None:
    for optimizer in self.optimizers():

        def closure(optimizer: Any = optimizer) -> Any:
            loss = (self.other(self(batch[0])) - batch[1]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def manual_schedulers(self: Any, batch: Any, batch_idx: int) -> None:
    manual_plain(self, batch, batch_idx)
    for scheduler in self.lr_schedulers():
        scheduler.step()


def manual_clipped(self: Any, batch: Any, batch_idx: int) -> None:
    first, _ = self.optimizers()
    first.zero_grad()
    self.manual_backward(self.loss(batch))
    self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
    first.step()


def manual_returning(self: Any, batch: Any, batch_idx: int) -> Any:
    manual_plain(self, batch, batch_idx)
    return {"value": torch.tensor(float(batch_idx))}


def manual_without_step(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("seen", float(batch_idx), on_epoch=True)


def manual_raw_optimizers(self: Any, batch: Any, batch_idx: int) -> None:
    first, _ = self.optimizers(use_pl_optimizer=False)
    first.zero_grad()
    self.manual_backward(self.loss(batch))
    first.step()


def manual_plain_backward(self: Any, batch: Any, batch_idx: int) -> None:
    first, _ = self.optimizers()
    first.zero_grad()
    self.loss(batch).backward()
    first.step()


STEPS = [each for name, each in list(globals().items()) if name.startswith("manual_")]


@scenario(**{each.__name__.removeprefix("manual_"): {"step": each} for each in STEPS})
def manual(lab: Lab, step: Any) -> None:
    module = type("Module", (Manual,), {"training_step": step})()
    trainer = lab.trainer(max_epochs=2)
    trainer.fit(module)
    lab.see(rates=[group["lr"] for each in trainer.optimizers for group in each.param_groups])


@scenario(
    norm={"gradient_clip_val": 0.1},
    algorithm={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    accumulate={"accumulate_grad_batches": 2},
)
def manual_refuses(lab: Lab, **settings: Any) -> None:
    module = type("Module", (Manual,), {"training_step": manual_plain})()
    lab.trainer(**settings).fit(module)


@scenario()
def manual_backward_in_automatic(lab: Lab) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self.loss(batch))

    lab.trainer().fit(Wrong())


@scenario()
def automatic_without_gradient(lab: Lab) -> None:
    class Detached(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch).detach()

    lab.trainer().fit(Detached())


@scenario(
    skipping={"hook": "optimizer_step"},
)
def own_optimizer_step(lab: Lab, hook: str) -> None:
    class Own(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            lab.see(**{f"step{self.global_step}": [epoch, batch_idx, type(optimizer).__name__]})
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="value")

    lab.trainer().fit(Own())


@scenario()
def own_backward(lab: Lab) -> None:
    class Own(Net):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            loss.backward(retain_graph=True)

    lab.trainer().fit(Own())


@scenario()
def doubled_backward(lab: Lab) -> None:
    class Own(Net):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            (loss * 2).backward()

    lab.trainer().fit(Own())


@scenario()
def step_without_closure(lab: Lab) -> None:
    class Own(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer.step()

    lab.trainer().fit(Own())


@scenario()
def closure_not_called(lab: Lab) -> None:
    class Own(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step()

    lab.trainer().fit(Own())


@scenario()
def warmup_in_optimizer_step(lab: Lab) -> None:
    class Own(Net):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = 0.01 * (self.global_step + 1)

    lab.trainer().fit(Own())


@scenario()
def gradients_in_hooks(lab: Lab) -> None:
    class Looking(Net):
        def on_after_backward(self) -> None:
            lab.see(**{f"after{self.global_step}": self.layer.weight.grad})

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            lab.see(**{f"before{self.global_step}": self.layer.weight.grad})

        def on_before_zero_grad(self, optimizer: Any) -> None:
            lab.see(**{f"zero{self.global_step}": self.layer.weight.grad})

    lab.trainer(gradient_clip_val=0.1, max_epochs=1).fit(Looking())


@scenario()
def frozen_layer(lab: Lab) -> None:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer.bias.requires_grad_(False)

    lab.trainer().fit(Frozen())


@scenario()
def unused_layer(lab: Lab) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(2, 2)
            torch.nn.init.ones_(self.unused.weight)
            torch.nn.init.ones_(self.unused.bias)

    lab.trainer().fit(Unused())


@scenario()
def unused_layer_adam(lab: Lab) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(1, 1)
            torch.nn.init.ones_(self.unused.weight)
            torch.nn.init.ones_(self.unused.bias)

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=0.1, weight_decay=0.5)

    lab.trainer().fit(Unused())
