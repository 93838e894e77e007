"""Scenarios of ``self.log`` and of loggers."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
import torchmetrics
from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.loggers import Logger
from torchmetrics import MeanMetric, MetricCollection, SumMetric


class Memory(Logger):
    """Keeps all that it is given."""

    def __init__(self, name: str = "memory") -> None:
        super().__init__()
        self.rows: list[Any] = []
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return "v"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.rows.append(["hparams", vars(params) if isinstance(params, Namespace) else dict(params)])

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append(["metrics", step, dict(metrics)])

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append(["graph"])

    def save(self) -> None:
        self.rows.append(["save"])

    def finalize(self, status: str) -> None:
        self.rows.append(["finalize", status])

    def after_save_checkpoint(self, callback: Any) -> None:
        self.rows.append(["checkpoint", type(callback).__name__])


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "on_step": {"on_step": True, "on_epoch": False},
    "on_epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True},
    "neither": {"on_step": False, "on_epoch": False},
    "bar": {"prog_bar": True},
    "bar_only": {"prog_bar": True, "logger": False},
    "no_logger": {"logger": False},
    "maximum": {"on_epoch": True, "reduce_fx": "max"},
    "minimum": {"on_epoch": True, "reduce_fx": "min"},
    "sum": {"on_epoch": True, "reduce_fx": "sum"},
    "mean": {"on_epoch": True, "reduce_fx": "mean"},
    "torch_mean": {"on_epoch": True, "reduce_fx": torch.mean},
    "torch_max": {"on_epoch": True, "reduce_fx": torch.max},
    "unknown_reduction": {"on_epoch": True, "reduce_fx": "median"},
    "median": {"on_epoch": True, "reduce_fx": torch.median},
    "sizes": {"on_epoch": True, "batch_size": 5},
    "synced": {"on_epoch": True, "sync_dist": True},
    "rank_zero": {"rank_zero_only": True},
    "graph": {"enable_graph": True},
    "name_without_loader": {"add_dataloader_idx": False},
    "metric_attribute": {"metric_attribute": "nothing"},
}


@scenario(**{name: {"options": options} for name, options in OPTIONS.items()})
def in_training_step(lab: Lab, options: Any) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", float(batch_idx), **options)
            return self.loss(batch)

    memory = Memory()
    lab.trainer(logger=memory, log_every_n_steps=2).fit(Logging())
    lab.see(rows=memory.rows)


@scenario(**{name: {"options": options} for name, options in OPTIONS.items()})
def in_validation_step(lab: Lab, options: Any) -> None:
    class Logging(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", self.loss(batch) + batch_idx, **options)

    memory = Memory()
    trainer = lab.trainer(logger=memory, log_every_n_steps=2)
    trainer.fit(Logging())
    lab.see(rows=memory.rows, alone=trainer.validate(Logging(), verbose=False))


HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_sanity_check_start",
    "configure_optimizers",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "setup",
    "teardown",
    "on_validation_model_eval",
    "train_dataloader",
)


@scenario(**{name: {"hook": name} for name in HOOKS})
def in_hook(lab: Lab, hook: str) -> None:
    """A value that a hook of the module logs, or the error."""

    class Logging(Net):
        pass

    def logs(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.log("hook", 2.0)
        return getattr(super(Logging, self), hook, lambda *a, **k: None)(*args, **kwargs)

    setattr(Logging, hook, logs)
    memory = Memory()
    lab.trainer(logger=memory, log_every_n_steps=1, gradient_clip_val=1.0).fit(Logging())
    lab.see(rows=memory.rows)


@scenario()
def synced_in_hooks(lab: Lab) -> None:
    class Logging(Net):
        def on_train_start(self) -> None:
            self.log("start", 2.0, sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.log("end", torch.tensor(3.0), sync_dist=True, batch_size=5)

        def on_validation_epoch_end(self) -> None:
            self.log("most", 4, sync_dist=True, reduce_fx="max")

    lab.trainer().fit(Logging())


@scenario(
    **{name: {"hook": name} for name in HOOKS if name.startswith(("on_train", "on_val", "on_before", "on_after"))}
)
def in_callback(lab: Lab, hook: str) -> None:
    from lightning.pytorch.callbacks import Callback

    class Logging(Callback):
        pass

    setattr(Logging, hook, lambda self, trainer, module, *about: module.log("hook", 3.0, on_epoch=True))
    Logging._ = None
    memory = Memory()
    try:
        lab.trainer(Logging(), logger=memory, log_every_n_steps=1).fit(Net())
    finally:
        lab.see(rows=memory.rows)


VALUES: dict[str, Callable[[], Any]] = {
    "int": lambda: 3,
    "bool": lambda: True,
    "float": lambda: 2.5,
    "scalar": lambda: torch.tensor(2.0),
    "one_element": lambda: torch.tensor([2.0]),
    "integer_tensor": lambda: torch.tensor(2),
    "double": lambda: torch.tensor(2.0, dtype=torch.float64),
    "several_elements": lambda: torch.tensor([1.0, 2.0]),
    "text": lambda: "text",
    "none": lambda: None,
    "list": lambda: [1.0],
    "dict": lambda: {"a": 1.0},
    "metric_class": lambda: MeanMetric,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("inf"),
}


@scenario(**{name: {"value": value} for name, value in VALUES.items()})
def value_in_training(lab: Lab, value: Callable[[], Any]) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", value(), on_epoch=True)
            return self.loss(batch)

    lab.trainer().fit(Logging())


@scenario(**{name: {"value": value} for name, value in VALUES.items()})
def value_in_validation(lab: Lab, value: Callable[[], Any]) -> None:
    class Logging(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", value(), on_step=True, on_epoch=True)

    lab.trainer().validate(Logging(), verbose=False)


@scenario(
    plain={"name": "value"},
    slash={"name": "train/value"},
    with_loader={"name": "value/dataloader_idx_0"},
    empty={"name": ""},
    number={"name": 3},
    long={"name": "v" * 200},
)
def name_of_value(lab: Lab, name: Any) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log(name, 1.0)
            return self.loss(batch)

    lab.trainer().fit(Logging())


@scenario()
def twice_with_other_options(lab: Lab) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", 1.0, on_epoch=True)
            self.log("value", 2.0, on_epoch=False)
            return self.loss(batch)

    lab.trainer().fit(Logging())


@scenario()
def twice_in_a_step(lab: Lab) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", 1.0, on_epoch=True)
            self.log("value", 5.0, on_epoch=True)
            return self.loss(batch)

    lab.trainer().fit(Logging())


@scenario()
def same_name_in_two_hooks(lab: Lab) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", 1.0, on_epoch=True)
            return self.loss(batch)

        def on_train_batch_end(self, *about: Any) -> None:
            self.log("value", 7.0, on_epoch=True)

    lab.trainer().fit(Logging())


@scenario()
def sometimes(lab: Lab) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 3 == 1:
                self.log("value", float(batch_idx), on_step=True, on_epoch=True)
            return self.loss(batch)

    memory = Memory()
    lab.trainer(logger=memory, log_every_n_steps=1).fit(Logging())
    lab.see(rows=memory.rows)


@scenario(
    dict={"of": lambda: {"a": 1.0, "b": torch.tensor(2.0)}},
    metrics={"of": lambda: MetricCollection({"m": MeanMetric()})},
    nested={"of": lambda: {"a": {"b": 1.0}}},
)
def log_dict(lab: Lab, of: Any) -> None:
    class Logging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.values = of()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if isinstance(self.values, MetricCollection):
                self.values.update(batch[0])
            self.log_dict(self.values, on_step=True, on_epoch=True, prog_bar=True)
            return self.loss(batch)

    lab.trainer().fit(Logging())


@scenario(
    mean={"metric": MeanMetric, "options": {}},
    total={"metric": SumMetric, "options": {"on_step": False, "on_epoch": True}},
    both={"metric": MeanMetric, "options": {"on_step": True, "on_epoch": True}},
    step={"metric": MeanMetric, "options": {"on_step": True, "on_epoch": False}},
    reduction={"metric": MeanMetric, "options": {"reduce_fx": "sum"}},
    attribute={"metric": MeanMetric, "options": {"metric_attribute": "metric"}},
    wrong_attribute={"metric": MeanMetric, "options": {"metric_attribute": "other"}},
)
def metric_objects(lab: Lab, metric: Any, options: Any) -> None:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.metric, self.checked = metric(), metric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric(batch[0])
            self.log("metric", self.metric, **options)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.checked.update(batch[0])
            self.log("checked", self.checked, on_epoch=True)

    memory = Memory()
    trainer = lab.trainer(logger=memory, log_every_n_steps=2)
    trainer.fit(Measured())
    lab.see(rows=memory.rows)


@scenario()
def metric_not_an_attribute(lab: Lab) -> None:
    class Measured(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            metric = MeanMetric()
            metric.update(1.0)
            self.log("metric", metric)
            return self.loss(batch)

    lab.trainer().fit(Measured())


@scenario()
def metric_computed_by_hand(lab: Lab) -> None:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.error.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log("error", self.error.compute())
            self.error.reset()

    lab.trainer().fit(Measured())


@scenario()
def several_loaders(lab: Lab) -> None:
    class Two(Net):
        def val_dataloader(self) -> Any:
            return [loader(6), loader(4)]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("val_loss", self.loss(batch))
            self.log(f"own{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    trainer = lab.trainer()
    trainer.fit(Two())
    lab.see(results=trainer.validate(Two(), verbose=False))


@scenario()
def several_loaders_same_name(lab: Lab) -> None:
    class Two(Net):
        def val_dataloader(self) -> Any:
            return [loader(6), loader(4)]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("same", self.loss(batch), add_dataloader_idx=False)

    lab.trainer().fit(Two())


@scenario()
def several_loaders_dict(lab: Lab) -> None:
    class Two(Net):
        def val_dataloader(self) -> Any:
            return {"a": loader(6), "b": loader(4)}

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("val_loss", self.loss(batch))

    trainer = lab.trainer()
    trainer.fit(Two())
    lab.see(results=trainer.validate(Two(), verbose=False))


@scenario()
def outside_of_a_run(lab: Lab) -> None:
    module = Net()
    module.log("value", 1.0)
    lab.attempt("after", lambda: (lab.trainer().fit(module), module.log("value", 1.0)))


@scenario()
def in_predict_step(lab: Lab) -> None:
    class Logging(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", 1.0)

    lab.trainer().predict(Logging())


@scenario()
def progress_bar_values(lab: Lab) -> None:
    class Shown(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("shown", float(batch_idx), prog_bar=True, on_step=True, on_epoch=True)
            return self.loss(batch)

        def on_train_batch_end(self, *about: Any) -> None:
            lab.see(**{f"bar{self.global_step}": dict(self.trainer.progress_bar_metrics)})

    lab.trainer().fit(Shown())


@scenario()
def callback_metrics_during_the_run(lab: Lab) -> None:
    class Looking(Net):
        def look(self, name: str) -> None:
            lab.see(**{f"{name}{self.global_step}_{self.current_epoch}": dict(self.trainer.callback_metrics)})

        def on_train_batch_end(self, *about: Any) -> None:
            self.look("batch")

        def on_validation_epoch_end(self) -> None:
            self.look("validation")

        def on_train_epoch_end(self) -> None:
            self.look("epoch")

    lab.trainer().fit(Looking())


@scenario(printed={})
def printing(lab: Lab) -> None:
    class Printing(Net):
        def on_train_epoch_end(self) -> None:
            self.print("epoch", self.current_epoch)

    printed = io.StringIO()
    with redirect_stdout(printed):
        lab.trainer().fit(Printing())
    lab.see(printed=printed.getvalue())
