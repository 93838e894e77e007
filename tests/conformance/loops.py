"""Scenarios of loops: lengths, intervals of validation, early ends."""

from __future__ import annotations

from typing import Any

from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from torch import Tensor, nn


@scenario(
    max_steps={"max_steps": 5, "max_epochs": -1},
    max_steps_in_epoch={"max_steps": 8, "max_epochs": 4},
    max_epochs_first={"max_steps": 100, "max_epochs": 2},
    no_steps={"max_steps": 0},
    no_epochs={"max_epochs": 0},
    default_epochs={"max_epochs": None, "max_steps": 7},
    min_epochs={"min_epochs": 2, "max_epochs": 3},
    min_steps={"min_steps": 9, "max_epochs": 2},
    min_steps_beyond_max={"min_steps": 4, "max_steps": 3},
    min_epochs_beyond_max={"min_epochs": 4, "max_epochs": 2},
    max_time={"max_time": "00:01:00:00"},
    max_time_dict={"max_time": {"minutes": 5}, "max_epochs": 1},
    max_time_over={"max_time": {"seconds": 0}},
    max_time_over_min_epochs={"max_time": {"seconds": 0}, "min_epochs": 2, "max_epochs": 5},
    max_time_over_min_steps={"max_time": {"seconds": 0}, "min_steps": 3, "max_epochs": 5},
    limit_train_int={"limit_train_batches": 3},
    limit_train_float={"limit_train_batches": 0.5},
    limit_train_above={"limit_train_batches": 100},
    limit_train_none={"limit_train_batches": 0},
    limit_train_tiny={"limit_train_batches": 0.1},
    limit_val_int={"limit_val_batches": 1},
    limit_val_float={"limit_val_batches": 0.67},
    limit_val_none={"limit_val_batches": 0},
    limit_val_tiny={"limit_val_batches": 0.1},
    limit_val_float_none={"limit_val_batches": 0.0},
    sanity_none={"num_sanity_val_steps": 0},
    sanity_all={"num_sanity_val_steps": -1},
    sanity_more={"num_sanity_val_steps": 10},
    sanity_limited={"num_sanity_val_steps": 2, "limit_val_batches": 1},
    val_interval_int={"val_check_interval": 2},
    val_interval_uneven={"val_check_interval": 4},
    val_interval_float={"val_check_interval": 0.5},
    val_interval_third={"val_check_interval": 0.34},
    val_interval_over_epochs={"val_check_interval": 8, "check_val_every_n_epoch": None, "max_epochs": 3},
    val_interval_within_limit={"val_check_interval": 2, "limit_train_batches": 5},
    val_interval_too_large={"val_check_interval": 7},
    val_interval_one_float={"val_check_interval": 1.0},
    val_interval_one={"val_check_interval": 1, "max_epochs": 1},
    val_interval_time={"val_check_interval": "00:00:00:00"},
    val_interval_time_dict={"val_check_interval": {"hours": 1}},
    val_interval_time_epochless={"val_check_interval": "00:00:00:00", "check_val_every_n_epoch": None},
    every_second_epoch={"check_val_every_n_epoch": 2, "max_epochs": 5},
    every_second_epoch_interval={"check_val_every_n_epoch": 2, "val_check_interval": 3, "max_epochs": 4},
    every_epoch_more_than_max={"check_val_every_n_epoch": 9},
    overfit_int={"overfit_batches": 2},
    overfit_float={"overfit_batches": 0.5},
    overfit_one={"overfit_batches": 1, "max_epochs": 4},
    fast_dev_run={"fast_dev_run": True},
    fast_dev_run_three={"fast_dev_run": 3},
    fast_dev_run_logger={"fast_dev_run": True, "logger": True, "enable_checkpointing": True},
    accumulate_one={"accumulate_grad_batches": 1},
    barebones={
        "barebones": True,
        "logger": None,
        "enable_checkpointing": None,
        "enable_progress_bar": None,
        "enable_model_summary": None,
    },
    deterministic={"deterministic": True},
    no_inference_mode={"inference_mode": False},
    detect_anomaly={"detect_anomaly": True},
    norms={"gradient_clip_val": 0.1},
    values={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    no_clip={"gradient_clip_val": 0.0},
    log_every_step={"log_every_n_steps": 1},
    log_never={"log_every_n_steps": 0},
    double={"precision": "64-true"},
    bfloat={"precision": "bf16-mixed"},
    bfloat_true={"precision": "bf16-true"},
    half_true={"precision": "16-true"},
    half_mixed={"precision": "16-mixed"},
)
def fit(lab: Lab, **settings: Any) -> None:
    lab.trainer(**settings).fit(Net())


@scenario(
    plain={},
    limited={"limit_val_batches": 2, "limit_test_batches": 3, "limit_predict_batches": 1},
    fractions={"limit_val_batches": 0.5, "limit_test_batches": 0.5, "limit_predict_batches": 0.5},
    none={"limit_val_batches": 0, "limit_test_batches": 0, "limit_predict_batches": 0},
    dev_run={"fast_dev_run": True},
    no_inference_mode={"inference_mode": False},
    double={"precision": "64-true"},
)
def evaluate(lab: Lab, **settings: Any) -> None:
    module = Net()
    trainer = lab.trainer(**settings)
    lab.see(validated=trainer.validate(module, verbose=False))
    lab.see(tested=trainer.test(module, verbose=False))
    lab.see(predicted=trainer.predict(module))
    trainer.fit(module)
    lab.see(again=trainer.validate(verbose=False, ckpt_path=None, model=module))


@scenario(
    running={"track_running_stats": True},
    of_batches={"track_running_stats": False},
)
def batch_norm_that_trains_in_validation(lab: Lab, **options: Any) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, **options)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

        def on_validation_model_eval(self) -> None:
            self.train()

    lab.trainer(val_check_interval=2).fit(Normed())


@scenario(
    verbose={"verbose": True},
    quiet={"verbose": False},
)
def results(lab: Lab, verbose: bool) -> None:
    import io
    from contextlib import redirect_stdout

    printed = io.StringIO()
    with redirect_stdout(printed):
        lab.see(validated=lab.trainer().validate(Net(), [loader(6), loader(4)], verbose=verbose))
    lab.see(printed=printed.getvalue())


class Stopping(Callback):
    def __init__(self, hook: str, at: int = 1) -> None:
        def stop(trainer: Any, *args: Any, **kwargs: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step >= at

        setattr(self, hook, stop)


@scenario(
    batch_start={"hook": "on_train_batch_start"},
    batch_end={"hook": "on_train_batch_end"},
    later={"hook": "on_train_batch_end", "at": 4},
    epoch_end={"hook": "on_train_epoch_end"},
    epoch_start={"hook": "on_train_epoch_start", "at": 6},
    validation={"hook": "on_validation_end", "at": 0},
    validation_batch={"hook": "on_validation_batch_end", "at": 1},
    train_start={"hook": "on_train_start", "at": 0},
    with_min_steps={"hook": "on_train_batch_end", "at": 2, "min_steps": 5},
    with_min_epochs={"hook": "on_train_batch_end", "at": 2, "min_epochs": 2},
    with_interval={"hook": "on_train_batch_end", "at": 3, "val_check_interval": 2},
)
def should_stop(lab: Lab, hook: str, at: int = 1, **settings: Any) -> None:
    lab.trainer(Stopping(hook, at), **{"max_epochs": 4} | settings).fit(Net())


@scenario(
    loss={"monitor": "loss", "patience": 0, "min_delta": 100.0},
    value={"monitor": "val_loss", "patience": 1, "min_delta": 100.0},
    maximum={"monitor": "val_loss", "mode": "max", "patience": 0},
    threshold={"monitor": "val_loss", "stopping_threshold": 1e9},
    divergence={"monitor": "val_loss", "divergence_threshold": -1.0},
    on_train_end={"monitor": "val_loss", "check_on_train_epoch_end": True, "patience": 0, "min_delta": 100.0},
    relaxed={"monitor": "missing", "strict": False},
    strict={"monitor": "missing"},
    unknown_mode={"monitor": "loss", "mode": "middle"},
    never={"monitor": "val_loss", "patience": 50},
    log_zero={"monitor": "val_loss", "patience": 0, "min_delta": 100.0, "log_rank_zero_only": True, "verbose": True},
)
def early_stopping(lab: Lab, **options: Any) -> None:
    stopping = EarlyStopping(**options)
    lab.trainer(stopping, max_epochs=5).fit(Net())
    lab.see(
        state=stopping.state_dict(), epoch=stopping.stopped_epoch, reason=getattr(stopping, "stopping_reason", None)
    )


@scenario()
def early_stopping_infinite(lab: Lab) -> None:
    class Growing(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", float("nan") if self.current_epoch else 1.0)

    lab.trainer(EarlyStopping("val_loss", check_finite=True), max_epochs=4).fit(Growing())


@scenario()
def early_stopping_several(lab: Lab) -> None:
    first, second = EarlyStopping("loss", patience=0, min_delta=100.0), EarlyStopping("val_loss", patience=9)
    lab.trainer(first, second, max_epochs=5).fit(Net())
    lab.see(keys=[first.state_key, second.state_key])


@scenario(
    step={"interval": "step"},
    epoch={"interval": "epoch"},
    over={"interval": "step", "duration": {"seconds": 0}},
    wrong={"interval": "week"},
)
def timer(lab: Lab, interval: str, duration: Any = "00:10:00:00") -> None:
    made = Timer(duration=duration, interval=interval)
    lab.trainer(made).fit(Net())
    lab.see(positive=[made.time_elapsed("train") > 0, made.time_elapsed("validate") > 0, made.start_time() is not None])
    lab.see(ended=made.end_time() is not None, keys=sorted(made.state_dict()["time_elapsed"]))


@scenario()
def skipped_by_batch_start(lab: Lab) -> None:
    class Ending(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 3 else None

    lab.trainer().fit(Ending())


@scenario(
    loss={"of": lambda loss: loss},
    dict={"of": lambda loss: {"loss": loss, "other": loss.detach() * 2}},
    none={"of": lambda loss: None},
    text={"of": lambda loss: "loss"},
    missing={"of": lambda loss: {"other": loss}},
    number={"of": lambda loss: 3.0},
)
def returned(lab: Lab, of: Any) -> None:
    class Returning(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return of(self.loss(batch))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            lab.see(**{f"outputs{self.current_epoch}_{batch_idx}": outputs})

    lab.trainer().fit(Returning())
