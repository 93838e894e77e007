"""The GPT of gpt.py sharded with FSDP2: replicas of two workers; one is killed while they train.

    python examples/fsdp_gpt.py --demo           # four workers and a spare node, as `make demo-sharded`

or on every node, for a training without that failure:

    torchrun --nnodes 2:4 --nproc-per-node 1 --rdzv-backend unicron --rdzv-id gpt --max-restarts 99 examples/fsdp_gpt.py

The demonstration trains twice, with and without the failure, and compares the parameters.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from gpt import Gpt, Text
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from unicron_lightning import LocalCluster, UnicronFSDPStrategy

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


def train(steps: int, replicas: int, folder: Path | None) -> None:
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
    if folder is not None:
        trainer.save_checkpoint(folder / "last.ckpt")
    if trainer.global_rank == 0:
        print(f"finished {trainer.global_step} steps: loss {float(trainer.callback_metrics['loss']):.3f}", flush=True)


def run(steps: int, replicas: int, folder: Path, *, kill: bool) -> dict[str, torch.Tensor]:
    """Train on a cluster of this machine; return the parameters."""
    folder.mkdir()
    workers = SHARDS * replicas
    command = [Path(__file__), "--steps", str(steps), "--replicas", str(replicas), "--folder", folder]
    with LocalCluster(command, nodes=workers + kill, nnodes=f"{SHARDS}:{workers}", folder=folder) as cluster:
        if kill:
            step = cluster.wait_step(steps // 4, seconds=300)
            cluster.kill_worker(cluster.wait_workers(workers)[1])
            print(f"killed a worker after step {step}", flush=True)
        exits = cluster.wait_exit(seconds=600)
        assert set(exits.values()) == {0}, exits
        for event in cluster.events("incident_closed"):
            bill = event["fields"]
            if bill["stepped_at"] is None:
                continue  # the training ended first
            resumed, whole = bill["stepped_at"] - bill["fault_at"], event["at"] - bill["fault_at"]
            print(f"next step after {1e3 * resumed:.0f} ms, all replicas complete after {whole:.1f} s")
        print(*re.findall(r"finished \d+ steps.*", "".join(map(cluster.log, exits))))
    state: dict[str, torch.Tensor] = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    return state


def demo(steps: int, replicas: int) -> None:
    """Compare a training with a failure to one without."""
    with tempfile.TemporaryDirectory(prefix="sharded-") as name:
        print(f"{replicas} replicas of {SHARDS} workers, {steps} steps; a worker is killed")
        struck = run(steps, replicas, Path(name) / "struck", kill=True)
        print("the same training without a failure")
        calm = run(steps, replicas, Path(name) / "calm", kill=False)
    worst = max(float((struck[key] - calm[key]).abs().max()) for key in calm)
    print(f"largest difference of a parameter: {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of two workers")
    parser.add_argument("--folder", type=Path, help="folder for the last checkpoint")
    parser.add_argument("--demo", action="store_true", help="run a cluster on this machine, and kill a worker")
    options = parser.parse_args()
    if options.demo:
        demo(options.steps, options.replicas)
    else:
        train(options.steps, options.replicas, options.folder)


if __name__ == "__main__":
    main()
