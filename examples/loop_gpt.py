"""A small GPT over the standard library's documentation, trained by a loop of its own, without Lightning.

    python examples/loop_gpt.py --demo           # three workers; one is killed while they train

The loop is explained in docs/loop.md. The demonstration trains twice, with and without the failure, and compares the
parameters.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unicron_lightning import LocalCluster, Run

WORKERS = 3
BLOCK, WIDTH = 32, 48


class Text(Dataset[Any]):
    """Pieces of the documentation, as bytes."""

    def __init__(self) -> None:
        words = "".join(topics.topics[key] for key in sorted(topics.topics)).encode()[:200_000]
        self.bytes = torch.frombuffer(bytearray(words), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // BLOCK

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.bytes[index * BLOCK : (index + 1) * BLOCK + 1]
        return piece[:-1], piece[1:]


class Gpt(nn.Module):
    """A decoder of two layers; returns the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        words, targets = batch
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)
        values = self.token(words) + self.place.weight
        logits = self.head(self.blocks(values, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(steps: int, folder: Path) -> None:
    """Train on this worker."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    run = Run(Text(), micro_batch_size=4, global_batch_size=24, seed=1, checkpoints=folder)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    run.register(model=model, optimizer=optimizer, schedule=schedule)
    loss = torch.tensor(0.0)
    for step in run.steps(steps):
        loss = step.run(model)
        step.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step.log(loss=loss)
    run.save(folder / "last.ckpt")
    if run.is_global_zero:
        print(f"finished {run.global_step} steps: loss {loss.item():.3f}", flush=True)


def on_cluster(steps: int, folder: Path, *, kill: bool) -> dict[str, Tensor]:
    """Train on a cluster of this machine; return the parameters."""
    folder.mkdir()
    command = [Path(__file__), "--steps", str(steps), "--folder", folder]
    with LocalCluster(command, nodes=WORKERS, nnodes=f"1:{WORKERS}", folder=folder) as cluster:
        if kill:
            step = cluster.wait_step(steps // 4, seconds=300)
            cluster.kill_worker(cluster.wait_workers(WORKERS)[1])
            print(f"killed a worker after step {step}", flush=True)
        exits = cluster.wait_exit(seconds=600)
        assert set(exits.values()) == {0}, exits
        print(*re.findall(r"finished \d+ steps.*", "".join(map(cluster.log, exits))))
    state: dict[str, Tensor] = torch.load(folder / "last.ckpt", weights_only=True)["model"]
    return state


def demo(steps: int) -> None:
    """Compare a training with a failure to one without."""
    with tempfile.TemporaryDirectory(prefix="loop-") as name:
        print(f"{WORKERS} workers, {steps} steps; a worker is killed")
        struck = on_cluster(steps, Path(name) / "struck", kill=True)
        print("the same training without a failure")
        calm = on_cluster(steps, Path(name) / "calm", kill=False)
    worst = max(float((struck[key] - calm[key]).abs().max()) for key in calm)
    print(f"largest difference of a parameter: {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="folder of the checkpoints")
    parser.add_argument("--demo", action="store_true", help="run a cluster on this machine, and kill a worker")
    options = parser.parse_args()
    if options.demo:
        demo(options.steps)
    else:
        train(options.steps, options.folder)


if __name__ == "__main__":
    main()
