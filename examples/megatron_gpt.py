"""A small GPT by megatron-core under Unicron, over bytes of English text.

On every node, one agent per worker (or per node, with --nproc-per-node):

    torchrun --nnodes 3:4 --nproc-per-node 1 --rdzv-backend unicron --rdzv-id gpt --max-restarts 1000 \
        examples/megatron_gpt.py --pipeline 2 --nodes 4

Kill any worker with SIGKILL: the step is finished, and the worker is replaced. `unicron relayout gpt --tp 2 --pp 1`
continues the training in another layout. Without CUDA the script runs on the CPU, by the patches of
`unicron_lightning.megatron.shim`, which are for demonstrations only.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch

warnings.filterwarnings("ignore", module="megatron")

from unicron_lightning.megatron import shim  # noqa: E402

if not torch.cuda.is_available():
    shim.install()

import lightning.pytorch as pl  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim.lr_scheduler import CosineAnnealingLR  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from unicron_lightning import UnicronMegatronStrategy  # noqa: E402
from unicron_lightning.megatron import toy  # noqa: E402


class Gpt(pl.LightningModule):
    def __init__(self, options: toy.Toy) -> None:
        super().__init__()
        self.options = options

    def configure_model(self) -> None:
        # not the command line's sizes: an operator may have ordered another layout
        strategy: Any = self.trainer.strategy
        config = toy.config(
            self.options,
            tensor_model_parallel_size=strategy.tensor_model_parallel_size,
            pipeline_model_parallel_size=strategy.pipeline_model_parallel_size,
        )
        self.model = toy.model(self.options, config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return toy.forward(self.model, batch)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = toy.loss(output)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return {
            "optimizer": OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0),
            "lr_scheduler": lambda optimizer: {"scheduler": CosineAnnealingLR(optimizer, 1000), "interval": "step"},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--devices", type=int, default=1, help="workers per node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    options = toy.Toy(dropout=0.1)
    strategy = UnicronMegatronStrategy(
        tensor_model_parallel_size=arguments.tensor, pipeline_model_parallel_size=arguments.pipeline
    )
    trainer = pl.Trainer(
        strategy=strategy,
        devices=arguments.devices,
        num_nodes=arguments.nodes,
        accumulate_grad_batches=4,
        max_steps=arguments.steps,
        enable_checkpointing=False,
        logger=False,
    )
    data = DataLoader(toy.Text(options.length), batch_size=4, shuffle=True, drop_last=True)
    trainer.fit(Gpt(options), data)


if __name__ == "__main__":
    main()
