"""Scenarios of scripts that use a trainer's inner interfaces: they replace methods, and call those of its strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import lightning.pytorch as pl
import torch
from conformance.lab import Lab
from conformance.loggers import rows
from conformance.net import Net
from conformance.table import scenario
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO

TORCH_WRITER = "lightning.fabric.plugins.io.torch_io.TorchCheckpointIO.save_checkpoint"


@scenario(validation={"step": "validation_step"}, prediction={"step": "predict_step"})
def step_removed(lab: Lab, step: str) -> None:
    module = Net()
    setattr(module, step, None)
    trainer = lab.trainer()
    trainer.fit(module)
    lab.see(validated=trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed)


@scenario(alone=True, last={"save_last": True, "save_top_k": 0}, newest={"save_last": None, "save_top_k": 1})
def checkpoint_before_a_run(lab: Lab, **options: Any) -> None:
    callback = ModelCheckpoint(lab.folder / "c", **options)
    trainer = lab.trainer(callback, enable_checkpointing=True, trace=False)
    trainer.strategy.connect(Net())
    if options["save_last"]:
        callback._save_last_checkpoint(trainer, {})
    else:
        callback._save_none_monitor_checkpoint(trainer, {})
    written = torch.load(next(lab.folder.rglob("*.ckpt")), weights_only=False)
    lab.see(keys=sorted(written), callbacks=written["callbacks"], loops=written["loops"])


@scenario()
def replaced_writer(lab: Lab) -> None:
    trainer = lab.trainer(max_epochs=1)
    trainer.fit(Net())
    with patch(TORCH_WRITER) as writer:
        trainer.save_checkpoint(Path("a.ckpt"), storage_options={"a": 1})
        trainer.save_checkpoint("a.ckpt")
    lab.see(calls=[[repr(call.args[1]), call.kwargs] for call in writer.call_args_list])


@scenario(alone=True)
def watched_plugin(lab: Lab) -> None:
    class Own(CheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            torch.save(checkpoint, path)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.load(path, weights_only=False)

        def remove_checkpoint(self, path: Any) -> None:
            Path(path).unlink()

    plugin = MagicMock(wraps=Own(), spec=Own)
    callback = ModelCheckpoint(lab.folder / "c", save_last=True)
    trainer = lab.trainer(callback, enable_checkpointing=True, plugins=[plugin])
    trainer.fit(Net())
    trainer.test(Net(), ckpt_path=callback.last_model_path, verbose=False)
    lab.meet()
    calls = [plugin.save_checkpoint, plugin.load_checkpoint, plugin.remove_checkpoint]
    lab.see(calls=[[[str(each) for each in call.args[-1:]], call.kwargs] for made in calls for call in made.mock_calls])


@scenario(alone=True)
def watched_asynchronous_plugin(lab: Lab) -> None:
    plugin: Any = AsyncCheckpointIO()
    plugin.save_checkpoint = Mock(wraps=plugin.save_checkpoint)

    class Watching(Net):
        def on_fit_start(self) -> None:
            inner = plugin.checkpoint_io
            inner.save_checkpoint = Mock(wraps=inner.save_checkpoint)

    callback = ModelCheckpoint(lab.folder / "c", save_top_k=-1)
    lab.trainer(callback, enable_checkpointing=True, plugins=[plugin], max_epochs=3).fit(Watching())
    lab.see(calls=[plugin.save_checkpoint.call_count, plugin.checkpoint_io.save_checkpoint.call_count])


@scenario(watched={"how": "watched"}, named={"how": "named"})
def replaced_log_metrics(lab: Lab, how: str) -> None:
    class Named(CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None, factor: float = 1.0) -> None:
            super().log_metrics({name: factor * value for name, value in metrics.items()}, step)

    logger: Any = Named(lab.folder)
    if how == "watched":
        logger.log_metrics = Mock(wraps=logger.log_metrics)
    trainer = lab.trainer(logger=logger, log_every_n_steps=3)
    trainer.fit(Net())
    logger.log_metrics({"own": 2.0}, 20, factor=3.0)
    logger.save()
    lab.meet()
    lab.see(rows=rows(Path(logger.log_dir) / "metrics.csv"))
    if how == "watched":
        lab.see(steps=[call.kwargs.get("step") for call in logger.log_metrics.mock_calls])


@scenario(same={"accumulation": 2}, other={"accumulation": 3}, manual={"accumulation": 1, "manual": True})
def accumulation_beside_a_schedule(lab: Lab, accumulation: int, manual: bool = False) -> None:
    module = Net()
    module.automatic_optimization = not manual
    scheduler = GradientAccumulationScheduler({0: 2})
    lab.trainer(scheduler, accumulate_grad_batches=accumulation, limit_train_batches=1).fit(module)


@scenario()
def content_of_a_loaded_checkpoint(lab: Lab) -> None:
    seen: list[Any] = []

    class Looking(Net):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            seen.append(["module", sorted(checkpoint), checkpoint["loops"]["fit_loop"]["state_dict"]])

    class Watching(pl.Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            seen.append(["callback", sorted(checkpoint)])

    first = lab.trainer(max_epochs=1)
    first.fit(Net())
    first.save_checkpoint("a.ckpt")
    lab.trainer(Watching()).fit(Looking(), ckpt_path="a.ckpt")
    lab.see(seen=seen)


@scenario(alone=True)
def environment_of_a_plugin(lab: Lab) -> None:
    trainer = lab.trainer(plugins=[LightningEnvironment()])
    trainer.fit(Net())
    lab.see(environment=type(trainer._accelerator_connector.cluster_environment).__name__)
    lab.see(ranks=[trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size])


@scenario(fit={"run": "fit"}, test={"run": "test"})
def saved_in_hooks(lab: Lab, run: str) -> None:
    class Saving(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.save_checkpoint(f"{stage}-setup.ckpt")

        def on_train_batch_end(self, trainer: Any, *about: Any) -> None:
            trainer.save_checkpoint(f"batch{trainer.global_step}.ckpt")

        def on_test_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint("test.ckpt", weights_only=True)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.save_checkpoint(f"{stage}-teardown.ckpt")

    getattr(lab.trainer(Saving()), run)(Net())
    lab.meet()
    lab.see(steps={path.name: torch.load(path)["global_step"] for path in sorted(Path().glob("*.ckpt"))})


@scenario(none={"skipped": (5, 12)}, failing={"error": True})
def rate_search_in_a_callback(lab: Lab, skipped: Any = (), error: bool = False) -> None:
    class Searched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step in skipped:
                return None
            if error and self.trainer.global_step == 2:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None, attr_name="rate")
    lab.trainer(finder, enable_checkpointing=False).fit(Searched())
    lab.see(losses=finder.optimal_lr.results["loss"])
