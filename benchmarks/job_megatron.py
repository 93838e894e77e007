"""One worker of `megatron_overhead`: alternates `Trainer.fit` under the strategy with Megatron's own loop."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, default_collate

from unicron_lightning import UnicronMegatronStrategy
from unicron_lightning.megatron import shim

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed
shim.install()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from unicron_lightning.megatron import toy  # noqa: E402

MICRO_BATCH = 4
SHARE = 4
"""Micro-batches of a replica in a step."""
SETTINGS: dict[str, int] = json.loads((Path(sys.argv[1]) / "settings.json").read_text())
LANES = SETTINGS["dp"] * max(SETTINGS["ep"], SETTINGS["cp"]) // SETTINGS["cp"]
"""Workers that compute different micro-batches at a time."""
EXPERTS = 2 * SETTINGS["ep"] if SETTINGS["ep"] > 1 else 0
OPTIONS = toy.Toy(
    layers=SETTINGS["layers"],
    hidden=SETTINGS["hidden"],
    heads=4,
    length=64,
    experts=EXPERTS,
    sequence_parallel=EXPERTS > 0 and SETTINGS["tp"] > 1,
)
ADAM = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0)
WARM_UP = 2
"""Steps at the start of a segment that are not counted."""


class Gpt(pl.LightningModule):
    """The module as a user writes it."""

    def __init__(self, parallel: dict[str, int]) -> None:
        super().__init__()
        self.parallel = parallel

    def configure_model(self) -> None:
        self.model = toy.model(OPTIONS, toy.config(OPTIONS, **self.parallel))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        virtual = isinstance(self.model, torch.nn.ModuleList)
        return toy.forward(self.model[strategy.virtual_stage] if virtual else self.model, batch)

    def loss(self, output: Any, batch: Any) -> Any:
        return toy.loss(output)

    def configure_optimizers(self) -> Any:
        return ADAM


class Plain:
    """The training loop of Megatron's examples."""

    def __init__(self, module: Any, replicas: int) -> None:
        parts = [*module] if isinstance(module, torch.nn.ModuleList) else [module]
        config = parts[0].config
        self.ddps = [
            DistributedDataParallel(config, DistributedDataParallelConfig(), part, disable_bucketing=number > 0)
            for number, part in enumerate(parts)
        ]
        for ddp in self.ddps:
            ddp.broadcast_params()
        self.optimizer = get_megatron_optimizer(ADAM, self.ddps, use_gloo_process_groups=False)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.data = toy.Text(OPTIONS.length)
        self.rank, self.replicas = parallel_state.get_data_parallel_rank(), replicas

    def step(self, number: int) -> None:
        def batches() -> Any:
            for place in range(SHARE):
                first = ((number * SHARE + place) * self.replicas + self.rank) * MICRO_BATCH
                yield default_collate([self.data[s % len(self.data)] for s in range(first, first + MICRO_BATCH)])

        def forward(iterator: Any, model: Any) -> Any:
            return toy.forward(model, next(iterator)), lambda output: (toy.loss(output) / SETTINGS["cp"], {})

        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[batches() for _ in self.ddps] if len(self.ddps) > 1 else batches(),
            model=self.ddps,
            num_microbatches=SHARE,
            seq_length=OPTIONS.length,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        self.optimizer.step()


class Turns(pl.Callback):
    """Runs a segment of the plain loop after each segment under the strategy."""

    def __init__(self, steps: int, replicas: int, parallel: dict[str, int]) -> None:
        self.ours: list[float] = []
        self.plain: list[float] = []
        self._steps, self._replicas, self._parallel = steps, replicas, parallel
        self._loop: Plain | None = None
        self._before = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.perf_counter()
        place = (trainer.global_step - 1) % self._steps
        if place >= WARM_UP:
            self.ours.append(now - self._before)
        if place == self._steps - 1:
            self._run_plain(trainer.global_step)
        self._before = time.perf_counter()

    def _run_plain(self, first: int) -> None:
        if self._loop is None:
            self._loop = Plain(toy.model(OPTIONS, toy.config(OPTIONS, **self._parallel)), self._replicas)
        for number in range(self._steps):
            started = time.perf_counter()
            self._loop.step(first + number)
            if number >= WARM_UP:
                self.plain.append(time.perf_counter() - started)


def main() -> None:
    """Run the worker.

    Its argument is the folder with the settings, to which the times are written.
    """
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    parallel = {"tensor_model_parallel_size": SETTINGS["tp"], "pipeline_model_parallel_size": SETTINGS["pp"]}
    if SETTINGS["cp"] > 1:
        parallel["context_parallel_size"] = SETTINGS["cp"]
    if SETTINGS["ep"] > 1:
        parallel["expert_model_parallel_size"] = SETTINGS["ep"]
    if SETTINGS["vpp"] > 1:
        parallel["virtual_pipeline_model_parallel_size"] = SETTINGS["vpp"]
    turns = Turns(SETTINGS["steps"], LANES, parallel)
    strategy = UnicronMegatronStrategy(**parallel)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        num_nodes=SETTINGS["workers"],
        devices=1,
        accumulate_grad_batches=SHARE,
        max_steps=SETTINGS["steps"] * SETTINGS["pairs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    trainer.fit(Gpt(parallel), DataLoader(toy.Text(OPTIONS.length), batch_size=MICRO_BATCH, drop_last=True))
    if strategy.is_global_zero:
        tokens = LANES * SHARE * MICRO_BATCH * OPTIONS.length
        (folder / "times.json").write_text(json.dumps([tokens, turns.ours, turns.plain]))


if __name__ == "__main__":
    main()
