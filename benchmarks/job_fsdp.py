"""One worker of `fsdp_overhead`: alternates `Trainer.fit` under the strategy with a loop over plain FSDP2 (HSDP).

With ``"memory"`` in the settings it runs one of them only, the plain one if it has no agent, and measures its memory.
"""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset, default_collate

from unicron_lightning import UnicronFSDPStrategy

BATCH, LENGTH = 4, 64
SETTINGS: dict[str, int] = json.loads((Path(sys.argv[1]) / "settings.json").read_text())
SHARDS, REPLICAS, SHARE = SETTINGS["shards"], SETTINGS["replicas"], SETTINGS["share"]
WORKERS = SHARDS * REPLICAS
WARM_UP = 2
"""Steps at the start of a segment that are not counted."""


class Text(Dataset[Tensor]):
    """Windows of the standard library's help texts, as bytes."""

    def __init__(self) -> None:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self._bytes[index * LENGTH : (index + 1) * LENGTH + 1]


class Network(nn.Module):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = SETTINGS["hidden"]
        self.token = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(SETTINGS["layers"])
        )
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text[:, :-1])
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def divide(net: Network, mesh: DeviceMesh) -> None:
    """Shard block by block."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


class Gpt(pl.LightningModule):
    """The module as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    def configure_model(self) -> None:
        divide(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Plain:
    """A loop as in torchtitan: the replicas' gradients are reduced in the last micro-batch."""

    def __init__(self, rank: int) -> None:
        self.net: Any = Network()
        divide(self.net, init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard")))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.data, self.rank = Text(), rank

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for place in range(SHARE):
            first = ((number * SHARE + place) * WORKERS + self.rank) * BATCH
            batch = default_collate([self.data[s % len(self.data)] for s in range(first, first + BATCH)])
            assert isinstance(self.net, FSDPModule)
            self.net.set_requires_all_reduce(place == SHARE - 1)
            (self.net(batch) / SHARE).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()


class Turns(pl.Callback):
    """Runs a segment of the plain loop after each segment under the strategy."""

    def __init__(self, folder: Path) -> None:
        self.ours: list[float] = []
        self.plain: list[float] = []
        self._folder = folder
        self._loop: Plain | None = None
        self._before = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now, steps = time.perf_counter(), SETTINGS["steps"]
        place = (trainer.global_step - 1) % steps
        if place >= WARM_UP:
            self.ours.append(now - self._before)
        if place == steps - 1 and not SETTINGS["memory"]:
            self._run_plain(trainer.global_rank, trainer.global_step)
        self._before = time.perf_counter()

    def _run_plain(self, rank: int, first: int) -> None:
        if self._loop is None:
            store = dist.FileStore(str(self._folder / "plain"), WORKERS)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
            self._loop = Plain(rank)
        for number in range(SETTINGS["steps"]):
            started = time.perf_counter()
            self._loop.step(first + number)
            if number >= WARM_UP:
                self.plain.append(time.perf_counter() - started)


def resident(name: str) -> int:
    """A value of this process' memory in MiB: VmRSS, or VmHWM for the peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) >> 10


def run_alone() -> None:
    """Run the plain loop under torchrun."""
    dist.init_process_group("gloo")
    loop = Plain(dist.get_rank())
    for number in range(SETTINGS["steps"]):
        loop.step(number)
    dist.destroy_process_group()


def run_both(folder: Path) -> None:
    """Train under the strategy, and in turns alone."""
    turns = Turns(folder)
    strategy = UnicronFSDPStrategy(shard_size=SHARDS)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        num_nodes=WORKERS,
        devices=1,
        accumulate_grad_batches=SHARE,
        gradient_clip_val=1.0,
        max_steps=SETTINGS["steps"] * SETTINGS["pairs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    trainer.fit(Gpt(), DataLoader(Text(), batch_size=BATCH, drop_last=True))
    if strategy.is_global_zero:
        (folder / "times.json").write_text(json.dumps([turns.ours, turns.plain]))


def main() -> None:
    """Run the worker.

    Its argument is the folder with the settings, to which the results are written.
    """
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    if "UNICRON_AGENT" in os.environ:
        run_both(folder)
    else:
        run_alone()
    name = "ours" if "UNICRON_AGENT" in os.environ else "plain"
    (folder / f"memory-{name}-{os.getpid()}").write_text(str(resident("VmHWM") - before))


if __name__ == "__main__":
    main()
