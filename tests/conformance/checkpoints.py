"""Scenarios of checkpoints: `ModelCheckpoint`, contents of files, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint


def contents(path: Path) -> Any:
    """A checkpoint without what differs by design."""
    file = torch.load(path, weights_only=False)
    file.pop("unicron_logged", None)
    return file


@scenario(
    default={},
    last={"save_last": True},
    link={"save_last": "link"},
    none={"save_top_k": 0},
    none_last={"save_top_k": 0, "save_last": True},
    all={"save_top_k": -1},
    best={"monitor": "val_loss"},
    best_two={"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.3f}"},
    best_two_last={"monitor": "val_loss", "save_top_k": 2, "save_last": True},
    best_two_link={"monitor": "val_loss", "save_top_k": 2, "save_last": "link"},
    highest={"monitor": "val_loss", "mode": "max", "filename": "best"},
    highest_three={"monitor": "val_loss", "mode": "max", "save_top_k": 3},
    training_value={"monitor": "loss", "save_top_k": 2},
    on_train_end={"monitor": "val_loss", "save_on_train_epoch_end": True},
    not_on_train_end={"monitor": "val_loss", "save_on_train_epoch_end": False},
    every_steps={"every_n_train_steps": 4, "save_top_k": -1},
    every_steps_one={"every_n_train_steps": 1, "save_top_k": -1},
    every_steps_best={"every_n_train_steps": 2, "monitor": "loss", "save_top_k": 2},
    every_steps_last={"every_n_train_steps": 5, "save_last": True},
    every_steps_step={"every_n_train_steps": 3, "monitor": "step", "mode": "max", "save_top_k": 2},
    every_epochs={"every_n_epochs": 2, "save_top_k": -1},
    every_epochs_none={"every_n_epochs": 0},
    every_steps_none={"every_n_train_steps": 0, "every_n_epochs": 0},
    every_epochs_last={"every_n_epochs": 2, "save_last": True, "save_top_k": -1},
    interval={"train_time_interval": "zero", "save_top_k": -1},
    interval_long={"train_time_interval": "hour", "save_top_k": -1},
    versioned={"filename": "same", "save_top_k": -1},
    not_versioned={"filename": "same", "save_top_k": -1, "enable_version_counter": False},
    metric_name={"filename": "{epoch:02d}-{val_loss:.2f}-{step}", "auto_insert_metric_name": False, "save_top_k": -1},
    slash={"filename": "part/{epoch}", "save_top_k": -1},
    unknown_key={"filename": "{missing:.1f}-{epoch}", "save_top_k": -1},
    weights={"save_weights_only": True, "save_top_k": -1},
    verbose={"verbose": True, "monitor": "val_loss", "save_top_k": 2},
    missing={"monitor": "missing"},
    mode={"monitor": "loss", "mode": "middle"},
    two_triggers={"every_n_train_steps": 2, "every_n_epochs": 1},
    negative={"every_n_epochs": -1},
    negative_steps={"every_n_train_steps": -1},
    no_monitor_two={"save_top_k": 2},
    below={"save_top_k": -2},
    exception={"save_on_exception": True},
)
def model_checkpoint(lab: Lab, train_time_interval: str | None = None, **options: Any) -> None:
    from datetime import timedelta

    spans = {None: None, "zero": timedelta(), "hour": timedelta(hours=1)}
    callback = ModelCheckpoint(lab.folder / "c", train_time_interval=spans[train_time_interval], **options)
    lab.trainer(callback, enable_checkpointing=True, max_epochs=4, val_check_interval=0.5).fit(Net())
    lab.see(best=callback.best_model_path, score=callback.best_model_score, last=callback.last_model_path)
    lab.see(state=dict(callback.state_dict().items()), kth=callback.kth_best_model_path)
    lab.meet()
    files = sorted((lab.folder / "c").rglob("*.ckpt"))
    steps = {path.name: torch.load(path, weights_only=False)["global_step"] for path in files}
    lab.see(steps=steps, links=[path.name for path in files if path.is_symlink()])


@scenario(
    loss_nan={"values": [float("nan"), 1.0, float("nan")]},
    loss_inf={"values": [float("inf"), 1.0, 2.0]},
    same={"values": [1.0, 1.0, 1.0]},
    falling={"values": [3.0, 2.0, 1.0]},
    rising={"values": [1.0, 2.0, 3.0]},
    with_two={"values": [1.0, 3.0, 2.0], "top": 2},
)
def monitored(lab: Lab, values: list[float], top: int = 1) -> None:
    class Given(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("given", values[self.current_epoch])

    callback = ModelCheckpoint(lab.folder, "{epoch}-{given:.1f}", monitor="given", save_top_k=top)
    lab.trainer(callback, max_epochs=3, enable_checkpointing=True, num_sanity_val_steps=0).fit(Given())
    lab.see(state=callback.state_dict())


@scenario(
    fit={"max_epochs": 2},
    within={"max_steps": 4},
    validated_within={"max_steps": 4, "val_check_interval": 2},
    norms={"gradient_clip_val": 0.1},
    double={"precision": "64-true"},
    bfloat={"precision": "bf16-mixed"},
    accumulated={"accumulate_grad_batches": 1, "max_steps": 5},
)
def contents_of(lab: Lab, **settings: Any) -> None:
    class Stepping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"rate": 0.1, "name": "x"})

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["own"] = {"value": 3}

    trainer = lab.trainer(EarlyStopping("val_loss", strict=False), **settings)
    trainer.fit(Stepping())
    trainer.save_checkpoint(lab.folder / "a.ckpt")
    trainer.save_checkpoint(lab.folder / "w.ckpt", weights_only=True)
    lab.see(whole=contents(lab.folder / "a.ckpt"), weights=contents(lab.folder / "w.ckpt"))


@scenario(
    epoch={"first": {"max_epochs": 1}, "then": {"max_epochs": 3}},
    step={"first": {"max_steps": 4}, "then": {"max_epochs": 2}},
    step_to_step={"first": {"max_steps": 4}, "then": {"max_steps": 7, "max_epochs": 4}},
    done={"first": {"max_epochs": 2}, "then": {"max_epochs": 2}},
    beyond={"first": {"max_epochs": 3}, "then": {"max_epochs": 2}},
    beyond_steps={"first": {"max_epochs": 3}, "then": {"max_epochs": 9, "max_steps": 4}},
    validated={"first": {"max_steps": 4, "val_check_interval": 2}, "then": {"max_epochs": 2, "val_check_interval": 2}},
    sanity={"first": {"max_epochs": 1}, "then": {"max_epochs": 2, "num_sanity_val_steps": 2}},
    weights_only={"first": {"max_epochs": 1}, "then": {"max_epochs": 2}, "weights_only": True},
    safe={"first": {"max_epochs": 1}, "then": {"max_epochs": 2}, "options": {"weights_only": True}},
    other_limit={"first": {"max_epochs": 1}, "then": {"max_epochs": 2, "limit_train_batches": 3}},
)
def resumed(lab: Lab, first: Any, then: Any, weights_only: bool = False, options: Any = None) -> None:
    class Adaptive(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            lab.see(loaded=sorted(set(checkpoint) - {"unicron_logged"}))

    trainer = lab.trainer(**first)
    trainer.fit(Adaptive())
    path = lab.folder / "a.ckpt"
    trainer.save_checkpoint(path, weights_only=weights_only)
    second = lab.trainer(**then)
    second.fit(Adaptive(), ckpt_path=path, **(options or {}))
    lab.see(rates=[group["lr"] for group in second.optimizers[0].param_groups])


@scenario(
    missing={"path": "missing.ckpt"},
    best_without={"path": "best"},
    last_without={"path": "last"},
    hpc_without={"path": "hpc"},
    registry={"path": "registry:none"},
    folder={"path": "."},
    broken={"path": "broken.ckpt"},
    not_checkpoint={"path": "list.ckpt"},
)
def no_checkpoint(lab: Lab, path: str) -> None:
    Path("broken.ckpt").write_bytes(b"no checkpoint")
    torch.save({"state_dict": {}}, "list.ckpt")
    lab.trainer().fit(Net(), ckpt_path=path)


@scenario(best={"path": "best"}, last={"path": "last"}, none={"path": None}, given={"path": "c/last.ckpt"})
def evaluated_path(lab: Lab, path: str | None) -> None:
    callback = ModelCheckpoint(lab.folder / "c", "{epoch}", monitor="val_loss", mode="max", save_last=True)
    trainer = lab.trainer(callback, enable_checkpointing=True, max_epochs=3)
    module = Net()
    trainer.fit(module)
    lab.see(test=trainer.test(ckpt_path=path, verbose=False), test_path=trainer.ckpt_path)
    lab.see(validate=trainer.validate(module, ckpt_path=path, verbose=False), path=trainer.ckpt_path)
    lab.see(predict=trainer.predict(ckpt_path=path), predict_path=trainer.ckpt_path)


@scenario(strict={"strict": True}, loose={"strict": False})
def strictness(lab: Lab, strict: bool) -> None:
    class Larger(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(2, 2, bias=False)
            torch.nn.init.ones_(self.more.weight)

    trainer = lab.trainer()
    trainer.fit(Net())
    trainer.save_checkpoint("a.ckpt", weights_only=True)
    module = Larger()
    module.strict_loading = strict
    lab.trainer().test(module, ckpt_path="a.ckpt", verbose=False)


@scenario(
    plain={},
    other={"rate": 0.5},
    strict={"strict": True},
    device={"map_location": "cpu"},
)
def load_from_checkpoint(lab: Lab, **given: Any) -> None:
    class Kept(Net):
        def __init__(self, rate: float = 0.05, size: int = 3) -> None:
            super().__init__(rate)
            self.save_hyperparameters()

    trainer = lab.trainer()
    trainer.fit(Kept(rate=0.07, size=5))
    trainer.save_checkpoint("a.ckpt")
    loaded = Kept.load_from_checkpoint("a.ckpt", **given)
    lab.see(hparams=dict(loaded.hparams), state=loaded.state_dict(), rate=loaded.rate)


class Failing(Callback):
    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            raise self.error


@scenario(error={"error": RuntimeError("broken")}, interrupt={"error": KeyboardInterrupt()})
def on_exception(lab: Lab, error: BaseException) -> None:
    callback = OnExceptionCheckpoint(lab.folder / "c", "failed")
    trainer = lab.trainer(callback, Failing(4, error), enable_checkpointing=True)
    lab.attempt("failure", lambda: trainer.fit(Net()))
    lab.meet()  # no rank waits for the one that writes
    lab.see(step=contents(lab.folder / "c" / "failed.ckpt")["global_step"])


@scenario(error={"error": RuntimeError("broken")}, interrupt={"error": KeyboardInterrupt()})
def saved_on_exception(lab: Lab, error: BaseException) -> None:
    callback = ModelCheckpoint(lab.folder / "c", save_on_exception=True)
    trainer = lab.trainer(callback, Failing(4, error), enable_checkpointing=True)
    lab.attempt("failure", lambda: trainer.fit(Net()))


@scenario()
def several(lab: Lab) -> None:
    first = ModelCheckpoint(lab.folder / "a", monitor="val_loss")
    second = ModelCheckpoint(lab.folder / "b", every_n_train_steps=3, save_top_k=-1)
    trainer = lab.trainer(first, second, enable_checkpointing=True)
    trainer.fit(Net())
    lab.see(keys=[first.state_key, second.state_key], which=trainer.checkpoint_callback is first)


@scenario()
def same_key_twice(lab: Lab) -> None:
    lab.trainer(ModelCheckpoint(lab.folder), ModelCheckpoint(lab.folder), enable_checkpointing=True)


@scenario()
def default_folder(lab: Lab) -> None:
    trainer = lab.trainer(enable_checkpointing=True, logger=True)
    trainer.fit(Net())
    lab.see(folder=trainer.checkpoint_callback.dirpath)


@scenario()
def default_folder_without_logger(lab: Lab) -> None:
    trainer = lab.trainer(enable_checkpointing=True)
    trainer.fit(Net())
    lab.see(folder=trainer.checkpoint_callback.dirpath)


@scenario()
def not_empty(lab: Lab) -> None:
    for _ in range(2):
        lab.trainer(ModelCheckpoint(lab.folder / "c"), enable_checkpointing=True).fit(Net())


@scenario()
def disabled_with_callback(lab: Lab) -> None:
    lab.trainer(ModelCheckpoint(lab.folder))


@scenario()
def state_of_callbacks(lab: Lab) -> None:
    class Counting(Callback):
        def __init__(self, key: str) -> None:
            self.key, self.count = key, 0

        @property
        def state_key(self) -> str:
            return self._generate_state_key(key=self.key)

        def on_train_batch_end(self, *about: Any) -> None:
            self.count += 1

        def state_dict(self) -> Any:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    first = [Counting("a"), Counting("b")]
    trainer = lab.trainer(*first, max_epochs=1)
    trainer.fit(Net())
    trainer.save_checkpoint("a.ckpt")
    then = [Counting("b"), Counting("c")]
    lab.trainer(*then).fit(Net(), ckpt_path="a.ckpt")
    lab.see(counts=[each.count for each in then])


@scenario()
def save_before_fit(lab: Lab) -> None:
    trainer = lab.trainer()
    lab.attempt("without", lambda: trainer.save_checkpoint("a.ckpt"))


@scenario()
def save_after_validate(lab: Lab) -> None:
    trainer = lab.trainer()
    trainer.validate(Net(), verbose=False)
    trainer.save_checkpoint("a.ckpt", weights_only=True)
    lab.see(file=contents(Path("a.ckpt")))


@scenario()
def resume_in_one_trainer(lab: Lab) -> None:
    trainer = lab.trainer(max_epochs=1)
    module = Net()
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)


@scenario()
def datamodule_in_checkpoint(lab: Lab) -> None:
    import lightning.pytorch as pl

    class Data(pl.LightningDataModule):
        def __init__(self, size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.seen = 0

        def train_dataloader(self) -> Any:
            return loader(self.hparams["size"])

        def state_dict(self) -> Any:
            return {"seen": 5}

        def load_state_dict(self, state: Any) -> None:
            self.seen = state["seen"]

    trainer = lab.trainer(max_epochs=1)
    trainer.fit(Net(), datamodule=Data(6))
    trainer.save_checkpoint("a.ckpt")
    data = Data()
    lab.trainer().fit(Net(), datamodule=data, ckpt_path="a.ckpt")
    lab.see(file=contents(Path("a.ckpt")), seen=data.seen)
    lab.see(loaded=dict(Data.load_from_checkpoint("a.ckpt").hparams))


@scenario()
def async_plugin(lab: Lab) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    trainer = lab.trainer(
        ModelCheckpoint(lab.folder / "c", save_top_k=-1), enable_checkpointing=True, plugins=AsyncCheckpointIO()
    )
    trainer.fit(Net())


@scenario()
def own_plugin(lab: Lab) -> None:
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    calls: list[Any] = []

    class Own(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append(["save", Path(path).name, storage_options])
            super().save_checkpoint(checkpoint, path)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(["load", Path(path).name])
            return super().load_checkpoint(path, *args, **kwargs)

        def remove_checkpoint(self, path: Any) -> None:
            calls.append(["remove", Path(path).name])
            super().remove_checkpoint(path)

    plugin = Own()
    trainer = lab.trainer(ModelCheckpoint(lab.folder / "c", "{epoch}"), enable_checkpointing=True, plugins=[plugin])
    trainer.fit(Net())
    trainer.save_checkpoint("own.ckpt", storage_options={"a": 1})
    lab.trainer(plugins=[plugin], max_epochs=3).fit(Net(), ckpt_path="own.ckpt")
    lab.see(calls=calls)


@scenario()
def optimizer_missing(lab: Lab) -> None:
    class Other(Net):
        def configure_optimizers(self) -> Any:
            return None

    trainer = lab.trainer(max_epochs=1)
    trainer.fit(Other())
    trainer.save_checkpoint("a.ckpt")
    lab.trainer().fit(Net(), ckpt_path="a.ckpt")


@scenario()
def renamed_parameter(lab: Lab) -> None:
    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = self.layer
            del self.layer

        def forward(self, x: Any) -> Any:
            return self.other(x)

    trainer = lab.trainer(max_epochs=1)
    trainer.fit(Net())
    trainer.save_checkpoint("a.ckpt")
    lab.trainer().fit(Renamed(), ckpt_path="a.ckpt")


@scenario()
def old_version(lab: Lab) -> None:
    trainer = lab.trainer(max_epochs=1)
    trainer.fit(Net())
    trainer.save_checkpoint("a.ckpt")
    file = torch.load("a.ckpt", weights_only=False)
    file["pytorch-lightning_version"] = "1.5.0"
    file.pop("loops")
    file["callbacks"] = {}
    torch.save(file, "old.ckpt")
    lab.trainer(max_epochs=3).fit(Net(), ckpt_path="old.ckpt")
