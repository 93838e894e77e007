"""A small GPT on English text under the strategy ``unicron_fsdp``, for tests with real processes.

FOLDER/settings.json: see `SETTINGS`. FOLDER/schedule.json: a list of faults that strike in sequence, see `strikes`.
Without an agent the same training runs in this process alone, under Lightning's own strategy: the reference.
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
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
from experts import DividedExperts, Experts
from preconditioned import PRECONDITIONED

BATCH = 2
LENGTH = 16
SECOND = 11  # samples of the second loader
SETTINGS: dict[str, Any] = {
    "shards": 2,
    "slices": 1,
    "experts": 0,  # of a mixture in place of each block's two layers, divided among the workers of a lane
    "replicas": 2,
    "accumulation": 2,  # batches per device in a step
    "rounds": {},  # the same by data epoch, with an accumulation of 1
    "steps": 12,  # at least; then until all faults have struck in a complete world, which is there again
    "full": 4,
    "slow": 0.3,  # additional seconds of a step while the world is smaller
    "validate": 0,  # steps between validations
    "save_every": 0,
    "beside": False,  # whether UnicronCheckpoint saves
    "resume": None,
    "finish": False,  # whether to train on until FOLDER/finish exists
    "pace": 0.0,  # additional seconds of a step in a complete world
    "tests": False,  # whether a test follows
    "options": {},  # of the strategy
    "configures": True,  # whether the module shards itself
    "compile": "",  # back-end that compiles the blocks
    "clip": 0.5,
    "clips": "norm",  # or "value"
    "eps": 1e-8,  # of AdamW
    "own": "",  # whether the LightningModule has parameters of its own, which are whole, or "sharded"
    "muon": False,  # whether Muon updates the matrices, and the rest is frozen
    "preconditioner": "",  # optimizer of whole matrices with other states, see `preconditioned`
    "groups": 1,  # of its parameters: 2: those with one dimension are decayed less
    "samples": 4096,
    "stream": None,  # options of a loader of an iterable data set, see `streamed.stream`; None: the data have an index
    "several": False,  # whether a second, shorter loader of batches has as much weight
    "dropout": 0.0,
    "tied": True,  # whether the head's weight is the embedding's
    "reference": "auto",  # strategy of the run without an agent; "unicron" has the same dropout
    "memory": None,  # [every_n_steps, partners] of MemoryCheckpoint
    "drag": [0, 0.0],  # a replica, additional seconds of its micro-batches, and perhaps only one of its shards
    "precision": None,  # of the trainer
    "accelerator": "cpu",
    "flips": None,  # [replica, step from 1]: from then on its first block's outputs are wrong, in other ways each time
    "stand_in": False,  # groups that behave as NCCL's do, on the CPU
    "dtype": "float64",  # Adam amplifies the rounding of gradients that are nearly zero
}


class Text(Dataset[Any]):
    """Windows of the standard library's help texts, as bytes."""

    def __init__(self, number: int) -> None:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
        self._bytes = torch.frombuffer(bytearray(text[: number * LENGTH + 1]), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> Any:
        window = self._bytes[index * LENGTH : (index + 1) * LENGTH + 1]
        return window[:-1], window[1:]


class Batches(list[Any]):
    """A list that Lightning takes as one loader."""


class Block(nn.Module):
    def __init__(self, width: int, dropout: float, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.Dropout(dropout)
        )
        if experts:
            self.mlp = nn.Sequential(Experts(width, width, experts), nn.Dropout(dropout))
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        out: Tensor = x + self.mlp(x)
        return out


class Network(nn.Module):
    def __init__(self, width: int, dropout: float, *, tied: bool, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, dropout, experts) for _ in range(2))
        self.head = nn.Linear(width, 256, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Model(pl.LightningModule):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.flips = 0
        torch.manual_seed(7)
        self.net = Network(32, settings["dropout"], tied=settings["tied"], experts=settings["experts"])
        if settings["own"]:
            self.last = nn.LayerNorm(256) if settings["configures"] else nn.Identity()
            self.shift, self.odd = nn.Parameter(torch.zeros(256)), nn.Parameter(torch.ones(1))
            self.register_buffer("even", torch.ones(256))
        for each in self.parameters() if settings["muon"] else ():
            each.requires_grad_(each.dim() == 2)
        if settings["compile"]:
            for block in self.net.blocks:
                block.compile(backend=settings["compile"])
        if settings["flips"]:
            self.net.blocks[0].mlp.register_forward_hook(self._flip)

    def _flip(self, _module: nn.Module, _given: Any, found: Tensor) -> Tensor | None:
        """Change the output of a replica from a step on, each time in another way."""
        replica, step = self.settings["flips"]
        fabric = getattr(self.trainer.strategy, "fabric", None)
        if fabric is None or fabric.place.replica != replica or self.trainer.global_step + 1 < step:
            return None
        self.flips += 1
        return found * (1.0 + 0.5 ** (10 + self.flips % 30))

    def configure_model(self) -> None:
        if self.settings["configures"] and self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            lane, slices = self.device_mesh["tensor_parallel"], self.settings["slices"]
            assert lane.size() == slices
            for block in self.net.blocks if slices > 1 else ():
                plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(block.mlp, lane, {"0": DividedExperts()} if self.settings["experts"] else plan)
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)
            if self.settings["own"] == "sharded":
                fully_shard(self, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        place, seconds, *shards = self.settings["drag"]
        if hasattr(strategy, "fabric") and strategy.fabric.place.replica == place:
            time.sleep(seconds if strategy.fabric.shard in shards or not shards else 0.0)
        if self.settings["several"]:
            batch, second = batch["text"], batch["second"]
            batch = [torch.cat(pair) for pair in zip(batch, second, strict=True)]
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        place = getattr(getattr(self.trainer.strategy, "fabric", None), "place", None)
        used = [each for each in self.parameters() if each.requires_grad and each is not getattr(self, "odd", None)]
        norms = [float(local(each.grad).norm()) for each in used]
        assert any(norms) == (place is None or place.replica is not None), "a spare has zeros"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)
        self.log("val_samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def _loss(self, batch: Any) -> Tensor:
        tokens, following = batch
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        if self.settings["own"]:
            logits = self.last(logits) + self.even * self.shift
            odd = self.training and tokens.sum() % 2  # batches of a validation differ from those of one process
            if odd or self.settings["own"] == "sharded":  # FSDP2 wants the same parameters in all lanes
                logits = logits * self.odd
        return logits

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        groups: list[dict[str, Any]] = [{"params": [each for each in parameters if each.dim() > 1]}]
        groups.append({"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 1e-4})
        given = groups if self.settings["groups"] == 2 else [{"params": parameters}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(given, lr=1e-3, eps=self.settings["eps"])
        if self.settings["muon"]:
            optimizer = torch.optim.Muon(groups[0]["params"], lr=1e-3)
        if self.settings["preconditioner"]:
            optimizer = PRECONDITIONED[self.settings["preconditioner"]](parameters, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def local(tensor: Tensor | None) -> Tensor:
    """This worker's part of a gradient."""
    assert tensor is not None
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def places_of(tensor: Tensor) -> list[list[int]]:
    """The range of this worker's part of a parameter, along each axis."""
    if not hasattr(tensor, "to_local"):
        return [[0, size] for size in tensor.shape]
    from unicron_lightning.fsdp.mesh import region

    return [[part.start, part.stop] for part in region(tensor)]


class Watch(pl.Callback):
    def __init__(self, folder: Path, settings: dict[str, Any], note: Any, faults: Any) -> None:
        self._folder, self._settings, self._note, self._faults = folder, settings, note, faults

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        strategy: Any = trainer.strategy
        if hasattr(strategy, "fabric"):
            self._faults.attend(trainer, module.net.blocks)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "fabric"):
            return
        self._faults.point("hooks")
        world, place = strategy.engine.world, strategy.fabric.place
        about = {"rank": world.rank, "world": world.size, "epoch": world.epoch, "replica": place.replica}
        values = {"loss": float(outputs["loss"]), "norm": strategy.grad_norm, "shard": strategy.fabric.shard}
        self._note("step", step=trainer.global_step, replicas=len(place.layout.replicas), **about, **values)
        whole = world.size == self._settings["full"]
        time.sleep(self._settings["pace" if whole else "slow"])
        # When it is to stop between validations, Lightning validates once more; a run that reaches `steps` does not.
        validates = trainer.global_step % (self._settings["validate"] or 1) == 0
        if trainer.global_step >= self._settings["steps"] and validates:
            finishes = not self._settings["finish"] or (self._folder / "finish").exists()
            over = bool(strategy.broadcast(whole and finishes and self._faults.over(), 0))
            trainer.should_stop = trainer.should_stop or over

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        self._note("validated", step=trainer.global_step, sanity=trainer.sanity_checking, **values)

    def on_test_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._note("tested", **{name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_fit_end(self, trainer: pl.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        local = [each.to_local() if hasattr(each, "to_local") else each for each in module.parameters()]
        data = {
            "parameters": [each.detach().clone() for each in local],
            "places": [places_of(each) for each in module.parameters()],
            "buffers": [each.clone() for each in module.buffers()],
            "metrics": metrics,
            "step": trainer.global_step,
        }
        place, shard = (
            (0, 0) if not hasattr(strategy, "fabric") else (strategy.fabric.place.replica, strategy.fabric.shard)
        )
        if place is not None:
            torch.save(data, self._folder / f"final-{place}-{shard}.pt")
        self._note("end", step=trainer.global_step, replica=place, shard=shard)


def main(make: type[Model] = Model) -> None:
    """Train.

    Args:
        make: makes the module from the settings.
    """
    folder = Path(sys.argv[1])
    settings = {**SETTINGS, **json.loads((folder / "settings.json").read_text())}
    alone = "UNICRON_AGENT" not in os.environ
    node = os.environ.get("UNICRON_NODE", "alone")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    notes = (folder / f"notes-{node}-{os.getpid()}.jsonl").open("w", buffering=1)

    def note(what: str, **fields: Any) -> None:
        notes.write(json.dumps({"what": what, "at": time.time(), "node": node, "pid": os.getpid(), **fields}) + "\n")

    note("start")
    pl.seed_everything(5, verbose=False)
    from strikes import Faults

    lanes = settings["shards"] * settings["replicas"]
    workers = lanes * settings["slices"]
    validate, rounds = settings["validate"], settings["accumulation"]
    trainer = pl.Trainer(
        use_distributed_sampler=not alone,
        strategy=strategy_of(settings, alone=alone),
        accelerator=settings["accelerator"],
        devices=1,
        num_nodes=1 if alone else workers,
        accumulate_grad_batches=rounds * lanes if alone else rounds,
        max_steps=settings["steps"] if alone else -1,
        max_epochs=-1,
        precision=settings["precision"],
        gradient_clip_val=settings["clip"],
        gradient_clip_algorithm=settings["clips"],
        logger=False,
        enable_checkpointing=settings["save_every"] > 0,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=validate * rounds * (lanes if alone else 1) if validate else None,
        check_val_every_n_epoch=None if validate else 1,
        default_root_dir=folder,
        callbacks=[
            Watch(folder, settings, note, Faults(folder, note)),
            *saving(folder, settings, alone=alone),
            *scheduled(settings),
        ],
    )
    judged = judged_of(folder, settings, alone=alone) if validate else None
    module = make(settings)
    given = data_of(folder, settings, lanes, alone=alone)
    trainer.fit(module, both(given) if settings["several"] else given, judged, ckpt_path=settings["resume"])
    if settings["tests"]:
        trainer.test(module, judged, verbose=False)


def saving(folder: Path, settings: dict[str, Any], *, alone: bool) -> list[pl.Callback]:
    """The callbacks that keep states on disk and in the agents' memory."""
    from unicron_lightning.callbacks import MemoryCheckpoint, UnicronCheckpoint

    every, memory = settings["save_every"], settings["memory"]
    saver: Any = UnicronCheckpoint if settings["beside"] and not alone else ModelCheckpoint
    saves = [saver(folder / "checkpoints", "{step}", every_n_train_steps=every, save_top_k=-1)]
    return [*(saves if every else []), *([MemoryCheckpoint(*memory)] if memory and not alone else [])]


def scheduled(settings: dict[str, Any]) -> list[pl.Callback]:
    """The callback that changes the number of a step's batches with the data epoch."""
    rounds = {int(epoch): number for epoch, number in settings["rounds"].items()}
    return [GradientAccumulationScheduler(rounds)] if rounds else []


def strategy_of(settings: dict[str, Any], *, alone: bool) -> Any:
    """The strategy, or that of the reference."""
    from unicron_lightning import UnicronFSDPStrategy, UnicronStrategy

    if settings["stand_in"]:
        import stand_in

        import unicron_lightning.strategies.fsdp.parallel as parallel

        parallel.accelerator_for = stand_in.accelerator_for
    if not alone:
        sizes = {"shard_size": settings["shards"], "tensor_parallel_size": settings["slices"]}
        return UnicronFSDPStrategy(**sizes, **settings["options"])
    return "auto" if settings["reference"] == "auto" else UnicronStrategy()


def data_of(folder: Path, settings: dict[str, Any], workers: int, *, alone: bool) -> Any:
    """The training data, in the reference in the order of the distributed run."""
    from streamed import in_order, stream

    samples, options = Text(settings["samples"]), settings["stream"]
    if options is None:
        data = DataLoader(samples, batch_size=BATCH, shuffle=False)
        return ordered(data, workers) if alone else data
    if alone:
        return Batches(in_order(samples, BATCH, options, workers))
    return stream(samples, BATCH, options, folder)


def judged_of(folder: Path, settings: dict[str, Any], *, alone: bool) -> Any:
    """The validation data: streams, if the training data are some, of 6, 6, 5 and 5 batches."""
    from streamed import stream

    if settings["stream"] is None or alone:
        return DataLoader(Text(22), batch_size=3)
    return stream(Text(22), 1, settings["stream"], folder)


def ordered(loader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    """The micro-batches in the order of the distributed run: the shuffle of ddp for seed 5."""
    from unicron_lightning.data.order import DataOrder, StepShape

    order = DataOrder(loader, StepShape(devices=workers, accumulation=1), 5, shuffle=True)
    batches = [order.indices(*order.place(0, number)) for number in range(order.num_micro_batches(0))]
    return DataLoader(loader.dataset, batch_sampler=batches)


def both(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader, and a shorter one of batches."""
    samples = (loader.dataset[number] for number in range(SECOND))
    return {"text": loader, "second": Batches([part[None] for part in sample] for sample in samples)}


if __name__ == "__main__":
    main()
