"""Scenarios of errors, interrupts and signals."""

from __future__ import annotations

import os
import signal
from typing import Any

from conformance.lab import Lab
from conformance.net import Net
from conformance.table import scenario
from lightning.pytorch.callbacks import Callback

STAGES = (
    "on_fit_start",
    "setup",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
)


class Raising(Callback):
    def __init__(self, hook: str, error: BaseException) -> None:
        self.error = error

        def raises(*about: Any, **more: Any) -> None:
            raise error

        setattr(self, hook, raises)


@scenario(**{name: {"hook": name} for name in STAGES})
def error_in_callback(lab: Lab, hook: str) -> None:
    lab.trainer(Raising(hook, ValueError("broken"))).fit(Net())


@scenario(**{name: {"hook": name} for name in STAGES if "sanity" not in name})
def interrupt_in_callback(lab: Lab, hook: str) -> None:
    lab.trainer(Raising(hook, KeyboardInterrupt())).fit(Net())


@scenario(
    training={"step": "training_step", "run": "fit"},
    validation={"step": "validation_step", "run": "fit"},
    test={"step": "test_step", "run": "test"},
    predict={"step": "predict_step", "run": "predict"},
    optimizers={"step": "configure_optimizers", "run": "fit"},
    forward={"step": "forward", "run": "validate"},
    loader={"step": "train_dataloader", "run": "fit"},
)
def error_in_module(lab: Lab, step: str, run: str) -> None:
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(f"in {step}")

    trainer = lab.trainer()
    lab.attempt("failure", lambda: getattr(trainer, run)(type("Failing", (Net,), {step: fails})()))
    lab.see(status=trainer.state.status.value)


@scenario()
def fit_after_an_error(lab: Lab) -> None:
    class Once(Net):
        failed = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("once")
            return super().training_step(batch, batch_idx)

    module = Once()
    lab.attempt("failure", lambda: lab.trainer().fit(module))
    lab.trainer().fit(module)


@scenario()
def exit_in_a_step(lab: Lab) -> None:
    class Leaving(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise SystemExit(3)

    lab.trainer().fit(Leaving())


@scenario()
def sigterm(lab: Lab) -> None:
    class Ending(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = lab.trainer(Ending())
    lab.attempt("ended", lambda: trainer.fit(Net()))
    lab.see(received=trainer.received_sigterm)


@scenario()
def interrupted_by_a_signal(lab: Lab) -> None:
    class Ending(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    try:
        lab.attempt("ended", lambda: lab.trainer(Ending()).fit(Net()))
    finally:
        signal.signal(signal.SIGINT, before)


@scenario()
def handlers_are_put_back(lab: Lab) -> None:
    before = signal.getsignal(signal.SIGTERM)
    lab.trainer().fit(Net())
    lab.see(same=signal.getsignal(signal.SIGTERM) == before)
