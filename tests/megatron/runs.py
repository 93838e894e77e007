"""Several runs of one script with ``unicron_megatron``, and faults in them; see FOLDER/settings.json and `main`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed

import torch  # noqa: E402

from unicron_lightning.megatron import shim  # noqa: E402

shim.install()
torch.set_num_threads(1)

import lightning.pytorch as pl  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from unicron_lightning import UnicronMegatronStrategy  # noqa: E402
from unicron_lightning.megatron import toy  # noqa: E402

STEPS = 5
"""Of each fit."""
FOLDER = Path(sys.argv[1])
SETTINGS = json.loads((FOLDER / "settings.json").read_text())


class Model(pl.LightningModule):
    """The toy GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toy.Toy(**SETTINGS.get("toy", {}))
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        strategy: Any = self.trainer.strategy
        config = toy.config(self.toy, pipeline_model_parallel_size=strategy.pipeline_model_parallel_size)
        self.model = toy.model(self.toy, config)
        if start := SETTINGS.get("start"):
            self.model.load_state_dict(torch.load(f"{start}-{strategy.fabric.own_shard}.pt"))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return toy.forward(self.model, batch)

    validation_step = test_step = training_step

    def loss(self, output: Any, batch: Any) -> Any:
        return toy.loss(output)

    def validation_loss(self, output: Any, batch: Any) -> None:
        self.log("val", toy.loss(output))

    def test_loss(self, output: Any, batch: Any) -> None:
        self.log("test", toy.loss(output))
        self.log("samples", float(len(output)), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        zero1 = bool(SETTINGS.get("zero1"))
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=0.0,
            use_distributed_optimizer=zero1,
            bf16=self.toy.bf16,
            params_dtype=self.toy.dtype,
        )
        factory = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # noqa: E731
        return {"optimizer": config, "lr_scheduler": factory}


class Killing(pl.Callback):
    """Kills a rank at a place in the runs: the number of the run and the step, or the batch of an evaluation; at a
    place with ``stays`` no successor is awaited.
    """

    run = 0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._kill(trainer, batch_idx)
        engine, workers = trainer.strategy.engine, SETTINGS["workers"]  # type: ignore[attr-defined]
        waits = (FOLDER / "killed").exists() and not SETTINGS.get("stays")
        while waits and trainer.world_size < workers and not engine.control.newer_than(engine.world.epoch):
            time.sleep(0.05)

    def on_test_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *where: Any) -> None:
        self._kill(trainer, batch_idx)

    def _kill(self, trainer: pl.Trainer, number: int) -> None:
        mark = FOLDER / "killed"
        if SETTINGS.get("kill") == [self.run, number, trainer.global_rank] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(options: toy.Toy, killing: Killing) -> pl.Trainer:
    """The script's trainer."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=bool(SETTINGS.get("zero1")), grad_reduce_in_fp32=options.bf16
    )
    return pl.Trainer(
        strategy=UnicronMegatronStrategy(pipeline_model_parallel_size=2, ddp=ddp),
        accelerator="cpu",
        devices=1,
        num_nodes=SETTINGS["workers"],
        accumulate_grad_batches=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[killing],
        default_root_dir=FOLDER,
    )


def keep(trainer: pl.Trainer, module: Model, name: str) -> None:
    """Keep this worker's parameters."""
    strategy: Any = trainer.strategy
    if strategy.fabric.place is None:  # a successor has left the fit out
        return
    state = {key: value for key, value in module.model.state_dict().items() if value is not None}
    torch.save(state, FOLDER / f"{os.getpid()}-{name}.pt")
    if strategy.fabric.place.replica == 0:
        torch.save(state, FOLDER / f"{name}-{strategy.fabric.own_shard}.pt")


def main() -> None:
    """Evaluate, fit, evaluate, fit again and evaluate; with ``start`` only a second fit with those parameters."""
    pl.seed_everything(1234, verbose=False)
    options = toy.Toy(**SETTINGS.get("toy", {}))
    killing, module = Killing(), Model()
    trainer = trainer_of(options, killing)
    samples = STEPS * SETTINGS["workers"] // 2 * 2 * 2
    data = DataLoader(toy.Text(options.length, limit=samples), batch_size=2, drop_last=True)
    judged = DataLoader(toy.Text(options.length, limit=22), batch_size=3)
    found: list[Any] = []

    def run(call: Any, *args: Any, **named: Any) -> None:
        killing.run += 1
        found.extend(call(module, *args, **named) or [])

    if SETTINGS.get("start"):
        processed: Any = trainer.fit_loop.epoch_progress.current
        processed.ready = processed.started = processed.processed = processed.completed = 1
        trainer.fit_loop.max_epochs = 2
        run(trainer.fit, data)
        keep(trainer, module, "second")
        return
    run(trainer.validate, judged, verbose=False)
    run(trainer.fit, data)
    keep(trainer, module, "first")
    run(trainer.test, judged, verbose=False)
    trainer.save_checkpoint(FOLDER / "saved")
    trainer.fit_loop.max_epochs = 2
    run(trainer.fit, data)
    keep(trainer, module, "second")
    run(trainer.test, judged, verbose=False)
    run(trainer.validate, judged, verbose=False, ckpt_path=FOLDER / "saved")
    replica = trainer.strategy.fabric.place.replica  # type: ignore[attr-defined]
    result = {"found": found, "step": trainer.global_step, "replica": replica}
    (FOLDER / f"result-{os.getpid()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
