"""The toy GPT under the strategy ``unicron_megatron``, for tests with real processes.

FOLDER/settings.json: see `SETTINGS`. FOLDER/schedule.json: a list of faults that strike in sequence, each in a complete
world on the worker at the given place: {"replica", "shard", "point"}, and "micro_batch" (counted among those that the
worker runs in the step, or the validation) for the points "forward" and "validate"; not before "from_step"; with
"at_once" in any world. With "breaks" connections break there, and no worker dies; with "hangs" the worker hangs.
With "after" the worker waits for that path in FOLDER before it dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed

import faulthandler  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from unicron_lightning.megatron import shim  # noqa: E402

faulthandler.register(signal.SIGUSR1)
if not torch.cuda.is_available():
    shim.install()
torch.compiler.set_stance("force_eager")  # each process would compile the routers' fused functions with a C++ compiler
torch.set_num_threads(1)

import doubled  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from unicron_lightning.local_cluster.processes import until  # noqa: E402
from unicron_lightning.megatron import toy  # noqa: E402
from unicron_lightning.worker.communication.communicator import CommunicatorAborted  # noqa: E402

MICRO_BATCH = 2
JUDGED = 3  # samples of a batch in validations
SECOND = 12  # samples of a second loader, which begins again in the second step
STREAMED = 27  # two replicas have streams of 7 and 6 micro-batches, whose fourth step has one
SEED = 1234
POINTS = "call", "reduce", "reduced", "gate", "commit", "committed", "checkpoint", "updated", "kept", "compared"
SETTINGS: dict[str, Any] = {
    "tp": 1,
    "pp": 1,
    "vpp": 1,  # virtual stages of a worker
    "cp": 1,  # workers that divide each sequence
    "ep": 1,
    "dp": 2,  # replicas
    "accumulation": 2,  # micro-batches of a replica's share
    "steps": 8,  # at least; then until FOLDER/finish exists, if configured
    "finish": False,
    "full": 0,  # workers of the complete world
    "slow": 0.0,  # most additional seconds of a step while the world is smaller; a newer epoch ends them
    "pace": 0.0,  # additional seconds of each step
    "save_every": 0,  # steps; into FOLDER/checkpoints
    "beside": False,  # written while training continues
    "memory": None,  # every so many steps, with so many partners: a state in the agents' memory
    "resume": None,  # path of a checkpoint
    "judged": 22,  # validation samples: two global batches, and the last batch is smaller
    "validate": 0,  # steps between validations, each with a checkpoint if it is the best one (of the first loader)
    "toy": {},
    "ddp": {},
    "optimizer": {},
    "redundancy": None,  # of the distributed optimizer's shards
    "several": False,  # whether half of each micro-batch is from a second, shorter loader
    "stream": False,  # whether the first `STREAMED` samples are an iterable data set, also before those of validations
    "chunks": None,  # path of the same samples as litData's chunks of `CHUNK`
    "witness": None,  # steps between two with witnesses
    "flips": None,  # [replica, shard, kind]: wrong gradients once the world was complete for three steps, up to the end
    "unfit": None,  # [tp, pp] in which building the model fails
    "accelerator": "cpu",
}


class Faults:
    """Faults planned for this worker."""

    def __init__(self, folder: Path, note: Any) -> None:
        self._folder = folder
        self._note = note
        self._schedule = json.loads((folder / "schedule.json").read_text())
        self.strategy: Any = None

    def point(self, point: str, step: int, micro_batch: int = 0) -> None:
        """Die here, if planned."""
        fabric = self.strategy.fabric
        due = (number for number in range(len(self._schedule)) if not self._struck(number).exists())
        number = next(due, None)
        if number is None:
            return
        fault, place = self._schedule[number], fabric.place
        if step < fault.get("from_step", 1):
            return
        here = {"replica": place.replica, "shard": fabric.shard, "point": point}
        whole = len(place.layout.replicas) == fabric.shape.replicas
        if not (here.items() <= fault.items() and fault.get("micro_batch", 0) == micro_batch):
            return
        before = self._struck(number - 1)
        later = number == 0 or step > int(before.read_text())
        if (whole and later) or fault.get("at_once"):
            self._note("fault", number=number, point=point, step=step, replica=place.replica, shard=fabric.shard)
            mark = self._folder / f"striking-{number}"
            mark.write_text(str(step))
            mark.rename(self._struck(number))  # renamed, since other processes may read it at any moment
            if after := fault.get("after"):
                until(f"{after} in time", (self._folder / after).exists)
                time.sleep(1.0)  # it is reported
            if fault.get("breaks"):
                raise CommunicatorAborted("a connection breaks on purpose")
            if fault.get("hangs"):
                time.sleep(3600.0)
            os.kill(os.getpid(), signal.SIGKILL)

    def mark(self, name: str) -> None:
        """Leave a file in the folder."""
        (self._folder / name).touch()

    def _struck(self, number: int) -> Path:
        return self._folder / f"struck-{number}"


class Model(pl.LightningModule):
    def __init__(self, settings: dict[str, Any], faults: Faults) -> None:
        super().__init__()
        self.settings = settings
        self.faults = faults
        self.toy = toy.Toy(**settings["toy"])
        self.count = (0, 0)
        self.judged = self.flips = 0
        self.whole = 0
        """Steps since the world has been complete."""
        self.wrong = False
        self.after = 0
        """Steps since a worker has begun to compute wrong gradients."""

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        tensor, pipeline = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size
        if [tensor, pipeline] == self.settings["unfit"]:
            raise ValueError(f"no model with tp={tensor}, pp={pipeline}")
        config = toy.config(
            self.toy,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=strategy.virtual_pipeline_model_parallel_size,
            context_parallel_size=strategy.context_parallel_size,
            expert_model_parallel_size=strategy.expert_model_parallel_size,
        )
        self.model = toy.model(self.toy, config)
        if self.settings["flips"]:
            layer = next(each for each in self.model.modules() if hasattr(each, "mlp")).mlp
            layer.register_forward_pre_hook(self._flip_weight)
            layer.linear_fc1.register_forward_hook(self._flip_activation)
            layer.linear_fc1.register_full_backward_hook(self._flip_gradient)

    def _strikes(self, kind: str) -> bool:
        """Whether this worker is to compute something wrong here."""
        fabric: Any = self.trainer.strategy.fabric
        step = self.trainer.global_step + 1
        here = [fabric.place.replica, fabric.own_shard, kind] == self.settings["flips"]
        if here and self.whole >= 3 and step % self.settings["witness"] == 0:
            self.faults.mark("flipped")
            self.wrong = True
        return self.wrong and kind == self.settings["flips"][2]

    def _flip_weight(self, module: nn.Module, _given: Any) -> None:
        """Flip a bit of a weight, once."""
        if self._strikes("weight") and not self.flips:
            self.flips = 1
            weight = module.linear_fc1.weight.detach()
            weight.view(torch.int64 if weight.dtype == torch.float64 else torch.int32).view(-1)[3] ^= 1 << 20

    def _flip_activation(self, _module: nn.Module, _given: Any, found: Any) -> Any:
        """Change an output in one of two calls."""
        self.flips += 1 if self._strikes("activation") else 0
        if not self._strikes("activation") or self.flips % 2 == 0:
            return None
        return found[0] * 1.125, *found[1:]

    def _flip_gradient(self, _module: nn.Module, given: Any, _found: Any) -> Any:
        """Change a gradient, each time in another way."""
        if not self._strikes("gradient") or given[0] is None:
            return None
        self.flips += 1
        return given[0] * (1.0 + 0.5 ** (6 + self.flips % 8)), *given[1:]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step, count = self.count
        count = count + 1 if step == self.trainer.global_step else 0
        self.count = self.trainer.global_step, count
        self.faults.point("forward", self.trainer.global_step, micro_batch=count)
        return toy.forward(self.part(), mixed(batch) if self.settings["several"] else batch)

    def part(self) -> Any:
        """The part of the model that runs now."""
        strategy: Any = self.trainer.strategy
        return self.model[strategy.virtual_stage] if isinstance(self.model, nn.ModuleList) else self.model

    def loss(self, output: Any, batch: Any) -> Any:
        loss = toy.loss(output)
        self.log("loss", loss, on_step=True)
        if self.toy.experts:
            self.log("balance", toy.balance(), on_step=True)
        return loss

    def on_validation_start(self) -> None:
        self.judged = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if not self.trainer.sanity_checking:
            self.faults.point("validate", self.trainer.global_step, micro_batch=self.judged)
        self.judged += 1
        return toy.forward(self.part(), batch)

    def validation_loss(self, output: Any, batch: Any) -> None:
        self.log("val_loss", toy.loss(output))
        self.log("samples", float(len(output)), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        config = OptimizerConfig(
            **{"optimizer": "adam", "lr": 1e-2, "clip_grad": 1.0, **self.settings["optimizer"]},
            bf16=self.toy.bf16,
            fp16=self.toy.fp16,
            params_dtype=self.toy.dtype,
        )
        return {
            "optimizer": config,
            "lr_scheduler": lambda optimizer: {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.99),
                "interval": "step",
            },
        }


class Streamed(IterableDataset[Any]):
    """The samples of a data set, divided among replicas."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        for number in range(dist.get_rank(), len(self._samples), dist.get_world_size()):
            yield self._samples[number]


class Unequal(Streamed):
    """Two thirds of the samples are the first of two replicas', which thus has global batches alone."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._samples)):
            if number % 3 % dist.get_world_size() == dist.get_rank():
                yield self._samples[number]


def mixed(batch: Any) -> Any:
    """The first half of the first loader's samples, and the second half of the second one's."""
    half = MICRO_BATCH // 2
    return {name: torch.cat([batch["first"][name][:half], batch["second"][name][half:]]) for name in batch["first"]}


class Watch(pl.Callback):
    def __init__(self, folder: Path, settings: dict[str, Any], note: Any) -> None:
        self._folder, self._settings, self._note = folder, settings, note

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        module.faults.strategy = strategy
        strategy.engine.fault = self._point
        self._module = module
        if strategy.session.joins:  # whatever hooks change there, it continues from the members' state
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(2)
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 7.0

    def _point(self, name: str, *where: Any) -> None:
        if name in POINTS:
            self._module.faults.point(name, where[0])

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        module.faults.point("update", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        world, place = strategy.engine.world, strategy.fabric.place
        about = {"rank": world.rank, "world": world.size, "epoch": world.epoch}
        grid = {"replica": place.replica, "shard": strategy.fabric.shard, "replicas": len(place.layout.replicas)}
        grid["tp"] = strategy.tensor_model_parallel_size
        values = {"loss": float(outputs["loss"]), "norm": strategy.grad_norm}
        if module.toy.experts:
            values["balance"] = float(trainer.callback_metrics["balance"])
        step = trainer.global_step - 1
        self._note("step", step=step, data_epoch=trainer.current_epoch, **about, **grid, **values)
        time.sleep(self._settings["pace"])
        module.whole = module.whole + 1 if len(place.layout.replicas) == strategy.fabric.shape.replicas else 0
        if self._settings["full"] and world.size < self._settings["full"] and not (self._folder / "flipped").exists():
            deadline = time.monotonic() + self._settings["slow"]
            while time.monotonic() < deadline and not strategy.engine.control.newer_than(world.epoch):
                time.sleep(0.01)
        enough = trainer.global_step >= self._settings["steps"]
        if self._settings["finish"] and enough:
            whole = len(place.layout.replicas) == strategy.fabric.shape.replicas
            module.after += (self._folder / "flipped").exists()
            over = module.after > 3 if self._settings["flips"] else whole and (self._folder / "finish").exists()
            ask = bool(strategy.broadcast(over, 0))
            trainer.should_stop = trainer.should_stop or ask

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        strategy: Any = trainer.strategy
        where = {"step": trainer.global_step, "sanity": trainer.sanity_checking, "shard": strategy.fabric.shard}
        self._note("validated", **where, ran=module.judged, **values)

    def on_fit_end(self, trainer: pl.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        place, shard = strategy.fabric.place, strategy.fabric.shard
        self._note("end", step=trainer.global_step, replica=place.replica, shard=shard)
        if place.replica is not None:
            state = {
                name: value.detach().double().cpu()
                for name, value in module.model.state_dict().items()
                if value is not None
            }
            name = f"final-{trainer.global_step}-{place.replica}-{shard}.pt"
            torch.save({"parameters": state, "lr": strategy.optimizers[0].param_groups[0]["lr"]}, self._folder / name)


def savers(folder: Path, settings: dict[str, Any]) -> list[pl.Callback]:
    """The callbacks that keep the state."""
    from unicron_lightning.callbacks import MemoryCheckpoint, UnicronCheckpoint

    saves: list[pl.Callback] = []
    saver = UnicronCheckpoint if settings["beside"] else ModelCheckpoint
    if every := settings["save_every"]:
        saves.append(saver(folder / "checkpoints", "{step}", every_n_train_steps=every, save_top_k=-1))
    if settings["validate"]:
        monitor = "val_loss/dataloader_idx_0" if settings["stream"] else "val_loss"
        saves.append(ModelCheckpoint(folder / "best", "{step}", monitor=monitor, save_top_k=1))
    if settings["memory"]:
        saves.append(MemoryCheckpoint(*settings["memory"]))
    return saves


def data_of(settings: dict[str, Any], length: int) -> Any:
    """The training data."""
    data: Any = DataLoader(toy.Text(length, limit=4096), batch_size=MICRO_BATCH, drop_last=True)
    if settings["stream"]:
        data = DataLoader(Streamed(toy.Text(length, limit=STREAMED)), batch_size=MICRO_BATCH, drop_last=True)
    if settings["chunks"]:
        import litdata

        data = DataLoader(litdata.StreamingDataset(settings["chunks"]), batch_size=MICRO_BATCH)
    if settings["several"]:
        data = {"first": data, "second": DataLoader(toy.Text(length, limit=SECOND), batch_size=MICRO_BATCH)}
    return data


def judged_of(settings: dict[str, Any], length: int) -> Any:
    """The validation data: with streams two loaders, the first one iterable."""
    if not settings["validate"]:
        return None
    samples, batch = toy.Text(length, limit=settings["judged"]), JUDGED
    loaders = [DataLoader(Unequal(samples), batch_size=batch, drop_last=True)] if settings["stream"] else []
    return [*loaders, DataLoader(samples, batch_size=batch)]


def main() -> None:
    folder = Path(sys.argv[1])
    settings = {**SETTINGS, **json.loads((folder / "settings.json").read_text())}
    node = os.environ.get("UNICRON_NODE", "alone")
    notes = (folder / f"notes-{node}-{os.getpid()}.jsonl").open("w", buffering=1)

    def note(what: str, **fields: Any) -> None:
        notes.write(json.dumps({"what": what, "at": time.time(), "node": node, "pid": os.getpid(), **fields}) + "\n")

    note("start")
    faults = Faults(folder, note)
    pl.seed_everything(SEED, verbose=False)
    options = toy.Toy(**settings["toy"])
    if not torch.cuda.is_available():
        doubled.install(settings)
    from unicron_lightning.replica.mirror import Redundancy
    from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy

    strategy = UnicronMegatronStrategy(
        tensor_model_parallel_size=settings["tp"],
        pipeline_model_parallel_size=settings["pp"],
        virtual_pipeline_model_parallel_size=settings["vpp"],
        context_parallel_size=settings["cp"],
        expert_model_parallel_size=settings["ep"],
        ddp=DistributedDataParallelConfig(**{"grad_reduce_in_fp32": options.bf16 or options.fp16, **settings["ddp"]}),
        redundancy=None if settings["redundancy"] is None else Redundancy(**settings["redundancy"]),
        digest_every=1,
        witness_every=settings["witness"],
    )
    saves, validate = savers(folder, settings), settings["validate"]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=settings["accelerator"],
        devices=1,
        num_nodes=settings["tp"] * settings["pp"] * max(settings["cp"], settings["ep"]) * settings["dp"],
        accumulate_grad_batches=settings["accumulation"],
        max_steps=-1 if settings["finish"] else settings["steps"],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in saves),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1 if validate else 0,
        val_check_interval=validate * settings["accumulation"] if validate else None,
        check_val_every_n_epoch=None if validate else 1,
        callbacks=[Watch(folder, settings, note), *saves],
    )
    data, judged = data_of(settings, options.length), judged_of(settings, options.length)
    trainer.fit(Model(settings, faults), data, judged, ckpt_path=settings["resume"])


if __name__ == "__main__":
    main()
