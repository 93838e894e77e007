"""A small but real training run that records all its work and kills itself according to its schedule.

Run by torchrun agents, or alone (`python train.py FOLDER`) as the failure-free reference: the same global batches in a
world of one. Notes go to a file of JSON lines per process, one `os.write` a line, so that a SIGKILL loses nothing. The
pace is set by sleeping: slow while workers are missing, so that they rejoin within few steps. It computes in float64,
where rounding cannot hide a miscounted sample, unless the settings differ.

The schedule is a list of groups of faults in FOLDER/schedule.json, each fault a sentence of docs/faults.md. A group is
armed at the start of a step in which all earlier groups are done and the world has the group's size; each of its faults
then strikes once, at its point. The victims of an ordered group wait for the faults listed before theirs: a death can
change the ranks that later faults name. Those of a group that strikes together wait for all: a death can keep others
from their points.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

SAMPLES = 222
"""Nine full steps of 24 and one of six: the last step of an epoch is smaller."""
BATCH = 4
VALIDATION_BATCHES = 5
FLOPS_PER_STEP = 1e9
"""Reported value, which is made up."""
SETTLED_STEPS = 3
"""Steps in a world before the next group of faults is armed, so that earlier faults have been recovered from."""


class Numbered(Dataset[Any]):
    """Samples that carry their number."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.x = torch.randn(number, 8, generator=generator)
        self.y = torch.tanh(self.x.sum(1, keepdim=True)) + 0.1 * torch.randn(number, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Notes:
    """The file of JSON lines of this process."""

    def __init__(self, folder: Path, node: str) -> None:
        self._about = {"pid": os.getpid(), "node": node}
        path = folder / f"notes-{node}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **fields: Any) -> None:
        line = json.dumps({"what": what, "at": time.time(), **self._about, **fields})
        os.write(self._file, line.encode() + b"\n")


class Schedule:
    """Injects the sentences of the schedule by the product's own injector, group after group.

    Two features are not part of the language. Sentences are independent of each other, so the groups, which strike in
    sequence in a recovered world, are armed here. Strikes are recorded in a folder instead of the coordinator, which in
    many tests is dead when the next fault is due.
    """

    def __init__(self, folder: Path, node: str, notes: Notes) -> None:
        path = folder / "schedule.json"
        self.groups: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._done = folder / "done"
        self._armed = folder / "armed"
        self._notes = notes
        self._heard = 0
        self._injector: Any = None
        self.engine: Any = None

    def hear(self, engine: Any) -> None:
        """Use this engine's points; call this before any other listener is added."""
        from unicron_lightning.worker.injector import Injector

        self.engine, self._injector = engine, Injector(engine, self._claim)

    def step_begins(self, step: int, settled_steps: int) -> None:
        world = self.engine.world
        number = next((number for number in range(len(self.groups)) if not self._is_done(number)), None)
        if number is None:
            return
        group = self.groups[number]
        if "step" in group:
            due = step == group["step"] and world.size >= group["world"]
        else:
            due = world.size == group["world"] and settled_steps >= group.get("settled", SETTLED_STEPS)
        if due and world.epoch > self._struck_in(number - 1):
            self._mark(self._armed, f"{number}")

    def point(self, name: str, *where: Any) -> None:
        """A point of the engine."""
        from unicron_lightning.faults.fault import parse

        while self._heard < len(self.groups) and (self._armed / f"{self._heard}").exists():
            for place, words in enumerate(self.groups[self._heard]["faults"]):
                self._injector.add(f"{self._heard}-{place}", parse(words))
            self._heard += 1
        self._injector(name, *where)

    def script(self, name: str) -> None:
        """A point of this script."""
        self.point("script", name)

    def all_done(self) -> bool:
        return all(self._is_done(number) for number in range(len(self.groups)))

    def _is_done(self, number: int) -> bool:
        return all((self._done / f"{number}-{place}").exists() for place in range(len(self.groups[number]["faults"])))

    def _struck_in(self, number: int) -> int:
        """The newest world in which a fault of this group has struck; a late rank may still be in it."""
        epochs = [int(path.read_text() or sys.maxsize) for path in self._done.glob(f"{number}-*")]
        return max(epochs, default=-1)

    def _claim(self, key: str, fault: Any, point: Any) -> bool:
        """Record the fault in place of the coordinator, and cause effects that a worker cannot cause itself."""
        from unicron_lightning.faults.fault import text

        world, group = self.engine.world, int(key.partition("-")[0])
        if self.groups[group].get("ordered"):
            self._wait_for(group, int(key.partition("-")[2]))
        if not self._mark(self._done, key, f"{world.epoch}"):
            return False
        if self.groups[group].get("together"):
            self._wait_for(group, len(self.groups[group]["faults"]))
        about = {"rank": point.rank, "world": world.size, "epoch": world.epoch, "step": point.step}
        self._notes.write("fault", group=group, fault=text(fault), kind=fault.kind, **about)
        match fault.kind:
            case "kill agent":
                os.kill(os.getppid(), fault.signal)
                os.kill(os.getpid(), signal.SIGKILL)  # it dies with its agent, and must not continue until then
            case "kill coordinator":
                os.kill(json.loads(Path(os.environ["COORDINATOR_FILE"]).read_text())["pid"], fault.signal)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        return True

    def _wait_for(self, group: int, place: int) -> None:
        """Wait until the faults before this place in a group have struck."""
        end = time.monotonic() + 20.0
        while not all((self._done / f"{group}-{earlier}").exists() for earlier in range(place)):
            assert time.monotonic() < end, f"an earlier fault of group {group} has not struck"
            time.sleep(0.002)

    @staticmethod
    def _mark(folder: Path, name: str, words: str = "") -> bool:
        """Create a mark; return whether this call created it."""
        folder.mkdir(exist_ok=True)
        try:
            with (folder / name).open("x") as file:
                file.write(words)
        except FileExistsError:
            return False
        return True


class TwoHalves(TorchCheckpointIO):
    """Writes a checkpoint in two halves, with a point for a death between them."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        data = buffer.getvalue()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            self._schedule.script("checkpoint_write")
            file.write(data[len(data) // 2 :])


class Model(pl.LightningModule):
    """Dropout, batch norm, logged values, Adam, a schedule per step."""

    def __init__(self, notes: Notes, schedule: Schedule, full: int, pace: float, slow: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            *(torch.nn.Linear(8, 32, bias=False), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Dropout(0.1)),
            *(torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
        )
        self.notes, self.schedule, self.full, self.pace, self.slow = notes, schedule, full, pace, slow
        self.fused = False
        self.assert_at: list[int] | None = None
        self.last_ids: list[int] = []
        self.flops_per_step = FLOPS_PER_STEP

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, ids = batch
        self.last_ids = ids.tolist()
        missing = self.schedule.engine.world.size < self.full
        time.sleep(self.slow if missing else self.pace)
        self.schedule.script("training_step")
        if self.assert_at == [self.schedule.engine.world.rank, self.trainer.global_step]:
            self.assert_on_device()
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", float(len(ids)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def assert_on_device(self) -> None:
        """Fail an assertion on the accelerator, once in one worker."""
        try:
            (Path(self.trainer.default_root_dir) / "asserted").touch(exist_ok=False)
        except FileExistsError:
            return
        here = torch.zeros(1, device=self.device)
        here[torch.tensor([5], device=self.device)].cpu()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.schedule.script("validation_step")
        self.log("val", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        # The closure computes the gradients up to the commit; the optimizer's own work follows.
        closure = kwargs.pop("optimizer_closure", None) or args[3]

        def then_point() -> Any:
            result = closure()
            self.schedule.script("optimizer_step")
            return result

        super().optimizer_step(*args[:3], optimizer_closure=then_point)
        self.schedule.script("optimizer_stepped")

    def configure_optimizers(self) -> Any:
        settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
        parameters = self.parameters()
        optimizer = (
            torch.optim.AdamW(parameters, fused=True, **settings)
            if self.fused
            else torch.optim.Adam(parameters, **settings)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def decay(step: int) -> float:
    """Factor of the learning rate. At a constant rate rounding grows a hundredfold in 400 steps, as training is
    chaotic.
    """
    return 1 / (1 + step / 50)


class Watch(pl.Callback):
    """Records each finished step; ends the run once all workers agree that it is complete."""

    def __init__(self, folder: Path, notes: Notes, schedule: Schedule, full: int, alone: bool) -> None:
        self._folder, self._notes, self._schedule = folder, notes, schedule
        self._full, self._alone = full, alone
        self._computed: list[list[int]] = []
        self._epoch = 0
        self._since = 0

    def _point(self, module: Model, name: str, *where: Any) -> None:
        if name == "micro_batch":
            world = self._schedule.engine.world
            self._computed.append(module.last_ids)
            place = {"step": where[0], "place": where[1], "rank": world.rank, "world": world.size}
            self._notes.write("computed", **place, life=self._life(), ids=module.last_ids)
        self._schedule.point(name, *where)

    def _life(self) -> int:
        control = self._schedule.engine.control
        return 1 if control is None else int(control.welcome.life)

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        self._schedule.hear(engine)
        engine.fault = lambda *point: self._point(module, *point)
        self._notes.write("begin", joiner=not engine.has_state, life=self._life())

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self._alone and trainer.current_epoch > 0:
            self._keep(trainer, module, self._folder / f"epochs-{trainer.current_epoch}.npz")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        world = self._schedule.engine.world
        self._computed = []
        self._since = self._since + 1 if world.epoch == self._epoch else 0
        self._epoch = world.epoch
        self._schedule.step_begins(trainer.global_step, self._since)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        world = self._schedule.engine.world
        about = {"rank": world.rank, "world": world.size, "epoch": world.epoch, "life": self._life()}
        losses = {"loss": float(outputs["loss"]), "logged": float(trainer.callback_metrics["loss_step"])}
        place = {"step": trainer.global_step - 1, "data_epoch": trainer.current_epoch}
        self._notes.write("step", **place, **about, **losses, ids=self._computed)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._notes.write("validated", step=trainer.global_step, val=float(trainer.callback_metrics["val"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._alone or self._full == 0 or trainer.max_epochs != -1:
            return
        world = self._schedule.engine.world
        enough = self._schedule.all_done() and self._may_finish(world.size)
        trainer.should_stop = bool(trainer.strategy.broadcast(enough, 0))

    def _may_finish(self, size: int) -> bool:
        if (self._folder / "finish_in_any_world").exists():
            return True
        return size == self._full and (self._folder / "finish").exists()

    def on_fit_end(self, trainer: pl.Trainer, module: Any) -> None:
        name = f"epochs-{trainer.current_epoch}.npz" if self._alone else f"final-{os.getpid()}.npz"
        self._keep(trainer, module, self._folder / name)
        self._schedule.script("fit_end")
        self._notes.write("end", step=trainer.global_step, data_epoch=trainer.current_epoch, life=self._life())

    @staticmethod
    def _keep(trainer: pl.Trainer, module: Any, path: Path) -> None:
        values = {name: value.cpu().numpy() for name, value in module.state_dict().items()}
        metrics = {f"metric/{name}": numpy.asarray(float(v)) for name, v in trainer.callback_metrics.items()}
        rates = {"rate": numpy.asarray(trainer.optimizers[0].param_groups[0]["lr"])}
        numpy.savez(path, **values, **metrics, **rates)


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    alone = "UNICRON_AGENT" not in os.environ
    node = os.environ.get("UNICRON_NODE", "alone")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    notes = Notes(folder, node)
    notes.write("start", round=int(os.environ.get("UNICRON_ROUND", "0")))
    schedule = Schedule(folder, node, notes)
    pl.seed_everything(5, verbose=False)
    full = settings["full"]
    lag = settings["lag"].get(node, 0.0)
    pace, slow = (0.0, 0.0) if alone else (settings["pace"] + lag, settings["slow"] + lag)
    module = Model(notes, schedule, full, pace, slow)
    module.fused, module.assert_at = settings["fused"], settings["assert_at"]
    if settings["compile"]:
        module.net.compile(mode=None if settings["compile"] is True else settings["compile"])
    filled = fill(settings["fill"])
    checkpoints = saver(settings, alone)(
        folder / "checkpoints", save_last=True, monitor="val", save_top_k=settings["keep"]
    )
    trainer = pl.Trainer(
        strategy=pl_strategy(settings["rebalance"]),
        accelerator=settings["accelerator"],
        precision=settings["precision"],
        devices=settings["devices"],
        num_nodes=settings["nodes"],
        accumulate_grad_batches=settings["accumulation"],
        max_epochs=settings["epochs"],
        gradient_clip_val=None if settings["fused"] else 0.5,  # Lightning refuses both together
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[TwoHalves(schedule)],
        callbacks=[
            Watch(folder, notes, schedule, full, alone),
            *injection(settings),
            *scheduled(settings),
            checkpoints,
        ],
    )
    training = DataLoader(Numbered(SAMPLES), batch_size=BATCH, shuffle=True)
    validation = DataLoader(Numbered(VALIDATION_BATCHES * BATCH), batch_size=BATCH)
    trainer.fit(module, training, validation, ckpt_path=None if alone else settings.get("resume"))
    del filled


def fill(part: float) -> Any:
    """Allocate a part of the accelerator's memory."""
    if not part:
        return None
    return torch.empty(int(part * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")


def injection(settings: dict[str, Any]) -> list[pl.Callback]:
    """Callbacks that inject the settings' faults, and keep states in memory; none for the reference."""
    from unicron_lightning.callbacks import FaultInjection, MemoryCheckpoint

    if "UNICRON_AGENT" not in os.environ:
        return []
    texts, memory = settings.get("faults", []), settings.get("memory")
    return [*([FaultInjection(texts)] if texts else []), *([MemoryCheckpoint(*memory)] if memory else [])]


def scheduled(settings: dict[str, Any]) -> list[pl.Callback]:
    """The callback that changes the number of a step's batches with the data epoch."""
    rounds = {int(epoch): number for epoch, number in settings.get("rounds", {}).items()}
    return [GradientAccumulationScheduler(rounds)] if rounds else []


def saver(settings: dict[str, Any], alone: bool) -> Any:
    """The class of the callback that saves."""
    from unicron_lightning.callbacks import UnicronCheckpoint

    return UnicronCheckpoint if settings.get("beside") and not alone else ModelCheckpoint


def pl_strategy(rebalance: bool) -> Any:
    from unicron_lightning.strategies.unicron import UnicronStrategy

    return UnicronStrategy(bucket_mib=0.001, rebalance=rebalance)  # several buckets, for faults between them


if __name__ == "__main__":
    main()
