"""The GPT of gpt.py sharded with FSDP2: replicas of two workers; one is killed while they train.

    python examples/fsdp_gpt.py --demo           # four workers and a spare node, as `make demo-sharded`

or on every node, for a training without that failure:

    torchrun --nnodes 2:4 --nproc-per-node 1 --rdzv-backend unicron --rdzv-id gpt --max-restarts 99 examples/fsdp_gpt.py

The demonstration trains twice, with and without the failure, and compares the parameters.
"""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from demonstration import LAST, command_line, compare
from gpt import Gpt, Text
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from unicron_lightning import UnicronFSDPStrategy

SHARDS = 2
BATCH = 4


class ShardedGpt(Gpt):
    """The same model, sharded as for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        if isinstance(self.head, FSDPModule) or self.device_mesh is None:
            return  # it is called before each run
        mesh = self.device_mesh["data_parallel"]
        for part in (*self.blocks.layers, self.token, self.place, self.head):
            fully_shard(part, mesh=mesh)


def train(steps: int, replicas: int, folder: Path) -> None:
    """Train on this worker; keep a checkpoint in the folder."""
    torch.set_num_threads(1)
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=UnicronFSDPStrategy(shard_size=SHARDS),
        accelerator="cpu",
        devices=1,
        num_nodes=SHARDS * replicas,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        max_steps=steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(ShardedGpt(), DataLoader(Text(), batch_size=BATCH, shuffle=True))
    trainer.save_checkpoint(folder / LAST)
    if trainer.global_rank == 0:
        print(f"finished {trainer.global_step} steps: loss {float(trainer.callback_metrics['loss']):.3f}", flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="replicas of two workers")
    options = parser.parse_args()
    if options.demo:
        command = [Path(__file__), "--replicas", str(options.replicas)]
        compare(command, options.steps, workers=SHARDS * options.replicas, least=SHARDS, spare=1)
    else:
        train(options.steps, options.replicas, options.folder)


if __name__ == "__main__":
    main()
