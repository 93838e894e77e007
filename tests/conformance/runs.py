"""Scenarios of the trainer itself: arguments, states, hooks of the module, errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only

WRONG: dict[str, dict[str, Any]] = {
    "accelerator": {"accelerator": "none"},
    "devices": {"devices": 0},
    "devices_text": {"devices": "x"},
    "devices_negative": {"devices": -2},
    "precision": {"precision": "8"},
    "max_epochs": {"max_epochs": -3},
    "max_steps": {"max_steps": -3},
    "max_steps_none": {"max_steps": None},
    "max_time": {"max_time": "soon"},
    "max_time_number": {"max_time": 3},
    "limit_train_batches": {"limit_train_batches": -1},
    "limit_train_share": {"limit_train_batches": 1.5},
    "limit_val_batches": {"limit_val_batches": 2.5},
    "limit_test_batches": {"limit_test_batches": -0.5},
    "limit_predict_batches": {"limit_predict_batches": 1.2},
    "overfit_batches": {"overfit_batches": 1.2},
    "val_check_interval": {"val_check_interval": 1.5},
    "val_check_interval_text": {"val_check_interval": "soon"},
    "val_check_interval_negative": {"val_check_interval": -2},
    "check_val_every": {"check_val_every_n_epoch": 1.5},
    "check_val_none": {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
    "fast_dev_run": {"fast_dev_run": -1},
    "clip_value": {"gradient_clip_val": "much"},
    "clip_algorithm": {"gradient_clip_algorithm": "none"},
    "accumulate": {"accumulate_grad_batches": 0},
    "accumulate_share": {"accumulate_grad_batches": 1.5},
    "reload": {"reload_dataloaders_every_n_epochs": -1},
    "profiler": {"profiler": "none"},
    "plugins": {"plugins": ["none"]},
    "unknown": {"unknown": 3},
    "logger": {"logger": 3},
    "barebones": {"barebones": True, "logger": True},
    "barebones_anomaly": {"barebones": True, "detect_anomaly": True},
    "two_precisions": {"precision": "16-mixed", "plugins": [pl.plugins.MixedPrecision("bf16-mixed", "cpu")]},
    "deterministic": {"deterministic": "maybe"},
    "benchmark": {"benchmark": True},
    "num_nodes": {"num_nodes": 0},
    "num_nodes_text": {"num_nodes": "x"},
    "log_every": {"log_every_n_steps": -1},
    "sanity": {"num_sanity_val_steps": -2},
    "model_registry": {"model_registry": "none"},
}


@scenario(**{name: {"settings": settings} for name, settings in WRONG.items()})
def argument(lab: Lab, settings: Any) -> None:
    trainer = lab.trainer(**settings)
    lab.see(made=[trainer.max_epochs, trainer.max_steps, trainer.num_devices])
    trainer.fit(Net())


VARIABLES = {
    "epochs": {"PL_TRAINER_MAX_EPOCHS": "1"},
    "limit": {"PL_TRAINER_LIMIT_TRAIN_BATCHES": "2"},
    "seed": {"PL_GLOBAL_SEED": "11"},
}


@scenario(**{name: {"given": given} for name, given in VARIABLES.items()})
def variables(lab: Lab, given: dict[str, str]) -> None:
    os.environ.update(given)
    used = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=lab.strategy, accelerator="cpu", devices=1, num_nodes=lab.nodes, max_steps=8, **used)
    trainer.fit(Net())
    lab.see(steps=[trainer.global_step, trainer.current_epoch])


PROPERTIES = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "current_epoch",
    "device_ids",
    "enable_validation",
    "estimated_stepping_batches",
    "evaluating",
    "global_rank",
    "global_step",
    "gradient_clip_algorithm",
    "interrupted",
    "is_global_zero",
    "is_last_batch",
    "limit_train_batches",
    "local_rank",
    "log_dir",
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "node_rank",
    "num_devices",
    "num_nodes",
    "num_sanity_val_batches",
    "num_sanity_val_steps",
    "num_training_batches",
    "num_val_batches",
    "precision",
    "predicting",
    "received_sigterm",
    "sanity_checking",
    "testing",
    "training",
    "val_check_batch",
    "val_check_interval",
    "validating",
    "world_size",
)


@scenario(**{name: {"name": name} for name in PROPERTIES})
def property_of_trainer(lab: Lab, name: str) -> None:
    class Looking(Callback):
        def look(self, trainer: Any, where: str) -> None:
            if f"{where}" not in lab.record:
                lab.see(**{where: getattr(trainer, name)})

        def on_fit_start(self, trainer: Any, *about: Any) -> None:
            self.look(trainer, "fit")

        def on_train_start(self, trainer: Any, *about: Any) -> None:
            self.look(trainer, "train")

        def on_train_batch_end(self, trainer: Any, *about: Any) -> None:
            self.look(trainer, "batch")

        def on_validation_start(self, trainer: Any, *about: Any) -> None:
            self.look(trainer, "check" if trainer.sanity_checking else "validation")

        def on_test_start(self, trainer: Any, *about: Any) -> None:
            self.look(trainer, "test")

    trainer = lab.trainer(Looking(), max_epochs=1)
    trainer.fit(Net())
    trainer.test(Net(), verbose=False)
    lab.see(after=getattr(trainer, name))


@scenario(
    plain={},
    steps={"max_steps": 7},
    infinite={"max_epochs": -1, "max_steps": 3},
    limited={"limit_train_batches": 4},
    epochs={"max_epochs": 5},
)
def estimated_steps(lab: Lab, **settings: Any) -> None:
    class Estimating(Net):
        def configure_optimizers(self) -> Any:
            lab.see(estimated=self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    lab.trainer(**settings).fit(Estimating())


@scenario()
def estimated_steps_before_fit(lab: Lab) -> None:
    lab.see(estimated=lab.trainer().estimated_stepping_batches)


MODULE_HOOKS = [
    name
    for name in dir(pl.LightningModule)
    if (name.startswith("on_") and not name.endswith("batch_transfer"))
    or name in ("setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "train_dataloader")
    or name in ("val_dataloader", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "backward")
]


def hooked(calls: list[Any]) -> Net:
    """A module that records its hooks."""

    class Hooked(Net):
        pass

    for name in MODULE_HOOKS:
        if name in ("on_gpu",) or not callable(getattr(pl.LightningModule, name, None)):
            continue

        def hook(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            step = self.trainer.global_step if self._trainer is not None else None
            given = [each for each in args if isinstance(each, (int, str))]
            calls.append([_name, step, torch.is_grad_enabled(), self.training, *given, *sorted(kwargs)])
            return getattr(Net, _name)(self, *args, **kwargs)

        setattr(Hooked, name, hook)
    return Hooked()


@scenario(
    fit={"run": "fit"},
    validate={"run": "validate"},
    test={"run": "test"},
    predict={"run": "predict"},
    without_validation={"run": "fit", "limit_val_batches": 0},
    clipped={"run": "fit", "gradient_clip_val": 0.1},
    by_interval={"run": "fit", "val_check_interval": 2},
)
def hooks(lab: Lab, run: str, **settings: Any) -> None:
    calls: list[Any] = []
    getattr(lab.trainer(**settings), run)(hooked(calls))
    lab.see(calls=[call for call in calls if call[0] != "backward"])


@scenario()
def order_of_backward(lab: Lab) -> None:
    calls: list[Any] = []
    lab.trainer().fit(hooked(calls))
    lab.see(calls=[call for call in calls if "backward" in call[0] or "zero_grad" in call[0]])


@scenario()
def hooks_of_a_resumed_run(lab: Lab) -> None:
    trainer = lab.trainer(max_epochs=1)
    trainer.fit(Net())
    trainer.save_checkpoint("a.ckpt")
    calls: list[Any] = []
    lab.trainer().fit(hooked(calls), ckpt_path="a.ckpt")
    lab.see(calls=[call for call in calls if call[0] != "backward"])


@scenario(
    training={"stage": "training_step"},
    validation={"stage": "validation_step"},
    epoch={"stage": "on_train_epoch_end"},
)
def modes(lab: Lab, stage: str) -> None:
    """Modes of the modules, which Lightning keeps where the script has set them."""
    seen: list[Any] = []

    class Modes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Dropout(0.5).eval()

        def look(self) -> None:
            seen.append(
                [self.training, self.frozen.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
            )

    def looking(self: Any, *args: Any) -> Any:
        self.look()
        return getattr(Net, stage)(self, *args)

    lab.trainer().fit(type("Looking", (Modes,), {stage: looking})())
    lab.see(seen=seen)


@scenario()
def configure_model(lab: Lab) -> None:
    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more: Any = None

        def configure_model(self) -> None:
            if self.more is None:
                self.more = torch.nn.Linear(1, 1)
                torch.nn.init.ones_(self.more.weight)
                torch.nn.init.zeros_(self.more.bias)

        def forward(self, x: Any) -> Any:
            return self.more(self.layer(x))

    lab.trainer().fit(Late())


@scenario()
def not_a_module(lab: Lab) -> None:
    lab.trainer().fit(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@scenario()
def module_without_data(lab: Lab) -> None:
    lab.trainer().fit(type("Bare", (Net,), {"train_dataloader": pl.LightningModule.train_dataloader})(), loader())


@scenario()
def trainer_of_a_module(lab: Lab) -> None:
    module = Net()
    lab.attempt("before", lambda: module.trainer)
    trainer = lab.trainer()
    trainer.fit(module)
    lab.see(same=module.trainer is trainer, rank=[module.global_rank, module.local_rank], device=str(module.device))
    lab.see(step=module.global_step, epoch=module.current_epoch, optimizers=type(module.optimizers()).__name__)


@scenario()
def several_trainers_with_one_module(lab: Lab) -> None:
    module = Net()
    for _ in range(3):
        lab.trainer(max_epochs=1).fit(module)


@scenario()
def validate_in_a_callback(lab: Lab) -> None:
    class Validating(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            lab.see(nested=trainer.validate(module, verbose=False))

    lab.trainer(Validating(), max_epochs=1).fit(Net())


@scenario()
def deep_copy(lab: Lab) -> None:
    import copy

    trainer = lab.trainer(max_epochs=1)
    trainer.fit(Net())
    other = copy.deepcopy(trainer.lightning_module)
    lab.see(state=other.state_dict())


@scenario()
def compiled(lab: Lab) -> None:
    module = torch.compile(Net(), backend="eager")
    lab.trainer().fit(module)


@scenario(fit={"run": "fit"}, test={"run": "test"})
def random_state(lab: Lab, run: str) -> None:
    """The script's random numbers before a run do not depend on it."""
    lab.see(before=torch.rand(2))
    getattr(lab.trainer(), run)(Net())


@scenario(plain={"workers": False}, workers={"workers": True})
def seeds(lab: Lab, workers: bool) -> None:
    pl.seed_everything(5, workers=workers, verbose=False)
    lab.trainer().fit(Net(), loader(12, num_workers=1))
    lab.see(seed=os.environ.get("PL_GLOBAL_SEED"), workers=os.environ.get("PL_SEED_WORKERS"))


@scenario()
def rank_zero(lab: Lab) -> None:
    calls: list[Any] = []

    class Saying(Net):
        @rank_zero_only
        def on_train_start(self) -> None:
            calls.append("start")

    lab.trainer().fit(Saying())
    lab.see(calls=calls, rank=rank_zero_only.rank)


@scenario(plain={}, freeze={"how": "freeze"}, script={"how": "to_torchscript"})
def module_methods(lab: Lab, how: str | None = None) -> None:
    module = Net()
    lab.trainer().fit(module)
    if how == "freeze":
        module.freeze()
        lab.see(needs=[each.requires_grad for each in module.parameters()], training=module.training)
        module.unfreeze()
    elif how is not None:
        lab.see(output=getattr(module, how)(method="trace", example_inputs=torch.ones(1, 3))(torch.ones(1, 3)))
    lab.see(parameters=[each.requires_grad for each in module.parameters()], dtype=str(module.dtype))


@scenario(reference="ddp")
def sampler_of_ddp(lab: Lab) -> None:
    trainer = lab.trainer()
    trainer.fit(Net())
    lab.see(given=trainer.distributed_sampler_kwargs)


@scenario(reference="ddp")
def all_gather_in_hooks(lab: Lab) -> None:
    class Gathering(Net):
        def on_train_epoch_end(self) -> None:
            lab.see(**{f"gathered{self.current_epoch}": self.all_gather(torch.tensor([1.0]))})

    lab.trainer().fit(Gathering())


@scenario()
def default_folder(lab: Lab) -> None:
    trainer = lab.trainer(default_root_dir=None)
    lab.see(folder=Path(trainer.default_root_dir).name == Path.cwd().name)


@scenario()
def init_module(lab: Lab) -> None:
    trainer = lab.trainer(precision="64-true")
    with trainer.init_module():
        module = Net()
    lab.see(dtype=str(module.layer.weight.dtype))
    trainer.fit(module)
