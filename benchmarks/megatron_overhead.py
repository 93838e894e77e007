"""What the strategy costs a Megatron model where nothing fails: tokens per second against a plain megatron-core loop.

    python benchmarks/megatron_overhead.py [--tp 1] [--pp 2] [--dp 2] [--pairs 10] [--steps 10]

The same processes do both by turns: some steps of `Trainer.fit` under ``unicron_megatron``, then as many of the loop
that Megatron's examples have, over a second model of the same sizes and the same process groups. So whatever else the
machine does hits both alike. The figure is the ratio of the two medians of the steps' times. CPU, gloo and the shim.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

MICRO_BATCH = 4
SHARE = 4
"""Micro-batches of a replica's step."""
TOY = {"layers": 4, "hidden": 128, "heads": 4, "length": 64}
WARM_UP = 2
"""Steps at a segment's start that do not count."""


def work(folder: Path, settings: dict[str, Any]) -> None:
    """One worker."""
    warnings.simplefilter("ignore")  # megatron-core's about what is not installed
    import torch

    from unicron_lightning.megatron import shim

    shim.install()
    torch.set_num_threads(1)
    import lightning.pytorch as pl
    from megatron.core.optimizer import OptimizerConfig
    from torch.utils.data import DataLoader

    from unicron_lightning import UnicronMegatronStrategy
    from unicron_lightning.megatron import toy

    options = toy.Toy(**TOY)
    parallel = {"tensor_model_parallel_size": settings["tp"], "pipeline_model_parallel_size": settings["pp"]}
    adam = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0)

    class Gpt(pl.LightningModule):
        def configure_model(self) -> None:
            self.model = toy.model(options, toy.config(options, **parallel))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return toy.forward(self.model, batch)

        def loss(self, output: Any, batch: Any) -> Any:
            return toy.loss(output)

        def configure_optimizers(self) -> Any:
            return adam

    class Turns(pl.Callback):
        """After each segment of ours, one of the plain loop."""

        def __init__(self) -> None:
            self.ours: list[float] = []
            self.plain: list[float] = []
            self.loop: Plain | None = None
            self.before = 0.0

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            now = time.perf_counter()
            place = (trainer.global_step - 1) % settings["steps"]
            if place >= WARM_UP:
                self.ours.append(now - self.before)
            if place == settings["steps"] - 1:
                if self.loop is None:
                    self.loop = Plain(toy.model(options, toy.config(options, **parallel)), adam, options, settings)
                for number in range(settings["steps"]):
                    started = time.perf_counter()
                    self.loop.step(trainer.global_step + number)
                    if number >= WARM_UP:
                        self.plain.append(time.perf_counter() - started)
            self.before = time.perf_counter()

    turns = Turns()
    strategy = UnicronMegatronStrategy(
        tensor_model_parallel_size=settings["tp"], pipeline_model_parallel_size=settings["pp"]
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        num_nodes=settings["workers"],
        devices=1,
        accumulate_grad_batches=SHARE,
        max_steps=settings["steps"] * settings["pairs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    trainer.fit(Gpt(), DataLoader(toy.Text(options.length), batch_size=MICRO_BATCH, drop_last=True))
    if strategy.is_global_zero:
        (folder / "times.json").write_text(json.dumps([turns.ours, turns.plain]))


class Plain:
    """The loop of Megatron's examples."""

    def __init__(self, module: Any, config: Any, options: Any, settings: dict[str, Any]) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from unicron_lightning.megatron import toy

        self.ddp = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module)
        self.ddp.broadcast_params()
        self.optimizer = get_megatron_optimizer(config, [self.ddp], use_gloo_process_groups=False)
        module.config.finalize_model_grads_func = finalize_model_grads
        module.config.grad_scale_func = self.optimizer.scale_loss
        self.length = options.length
        self.data = toy.Text(options.length)
        self.rank, self.replicas = parallel_state.get_data_parallel_rank(), settings["dp"]
        self.run = get_forward_backward_func

    def step(self, number: int) -> None:
        from torch.utils.data import default_collate

        from unicron_lightning.megatron import toy

        def batches() -> Any:
            for place in range(SHARE):
                first = ((number * SHARE + place) * self.replicas + self.rank) * MICRO_BATCH
                yield default_collate([self.data[s % len(self.data)] for s in range(first, first + MICRO_BATCH)])

        def forward(iterator: Any, model: Any) -> Any:
            return toy.forward(model, next(iterator)), lambda output: (toy.loss(output), {})

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.run()(
            forward_step_func=forward,
            data_iterator=batches(),
            model=[self.ddp],
            num_microbatches=SHARE,
            seq_length=self.length,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        self.optimizer.step()


def main() -> None:
    from faults.cluster import Cluster, until

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tp", 1), ("pp", 2), ("dp", 2), ("pairs", 10), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = vars(parser.parse_args())
    workers = arguments["tp"] * arguments["pp"] * arguments["dp"]
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        folder = Path(name)
        settings = {**arguments, "workers": workers}
        here = Path(__file__).resolve()
        with Cluster(folder, script=here, agents=workers, nodes=f"{workers}:{workers}", settings=settings) as cluster:
            agents = cluster.agents.values()
            until("the agents' end", lambda: all(agent.poll() is not None for agent in agents), 3000)
            cluster.wait_end()
        ours, plain = json.loads((folder / "times.json").read_text())
    tokens = workers // (arguments["tp"] * arguments["pp"]) * SHARE * MICRO_BATCH * TOY["length"]
    fast, base = tokens / statistics.median(ours), tokens / statistics.median(plain)
    print(f"TP={arguments['tp']} PP={arguments['pp']} DP={arguments['dp']}, {len(ours)} steps each")
    print(f"tokens/s of plain megatron-core: {base:.0f}; under unicron_megatron: {fast:.0f}; ratio {fast / base:.3f}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        work(Path(sys.argv[1]), json.loads((Path(sys.argv[1]) / "settings.json").read_text()))
    else:
        main()
