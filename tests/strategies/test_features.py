"""Features of Lightning under the strategy, in a world of one with several micro-batches per step."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import RunningStage
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.checkpoints.files import digest_of
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.state import join_state
from unicron_lightning.strategies.unicron import UnicronStrategy
from unicron_lightning.worker import codec

DEVICES = 2

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


class Net(pl.LightningModule):
    """A network with dropout and batch norm; keeps the losses and the data of its training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.net(batch[0]) - batch[1]).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def dataset(number: int = 48) -> TensorDataset:
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(number: int = 48, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset(number), **{"batch_size": 4, "shuffle": True} | settings)


def trainer(folder: Path, **settings: Any) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    basic: dict[str, Any] = {"accelerator": "cpu", "devices": DEVICES, "max_epochs": 3, "default_root_dir": folder}
    return pl.Trainer(**{"strategy": "unicron"} | basic | quiet | settings)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_by_name_without_an_import(tmp_path: Path) -> None:
    script = (
        "import lightning.pytorch as pl, sys\n"
        "trainer = pl.Trainer(strategy='unicron', accelerator='cpu', devices=2, logger=False)\n"
        "print(type(trainer.strategy).__name__)\n"
    )
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert "UnicronStrategy" in result.stdout, result.stderr[-2000:]


def test_the_last_step_of_an_odd_epoch(tmp_path: Path) -> None:
    """47 samples: every one once; the last step has fewer micro-batches, and is scaled as declared."""
    seen: list[int] = []

    class Seeing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch[0].sum(1).tolist())
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2)
    run.fit(Seeing(), loader(47))
    assert run.global_step == 3
    assert sorted(seen) == sorted(dataset(47).tensors[0].sum(1).tolist())


@pytest.mark.parametrize("where", ["epoch", "middle"])
def test_resuming_is_exact(tmp_path: Path, where: str) -> None:
    """From a checkpoint at an epoch's end or in the middle of one, to the same parameters and optimizer."""
    full = Net()
    every: dict[str, Any] = {"every_n_train_steps": 8} if where == "middle" else {"every_n_epochs": 1}
    saving = ModelCheckpoint(tmp_path / "ck", "{step}", save_top_k=-1, **every)
    whole = trainer(tmp_path, callbacks=[saving], enable_checkpointing=True)
    whole.fit(full, loader(), loader(16, shuffle=False))
    path = tmp_path / "ck" / f"step={8 if where == 'middle' else 6}.ckpt"
    assert path.exists(), sorted((tmp_path / "ck").iterdir())
    again = Net()
    resumed = trainer(tmp_path)
    resumed.fit(again, loader(), loader(16, shuffle=False), ckpt_path=path, weights_only=False)
    assert resumed.global_step == whole.global_step == 18 and resumed.current_epoch == 3
    assert again.losses == full.losses[-len(again.losses) :] and len(again.losses) == 18 - int(path.stem[5:])
    assert same(again, full)


class Looking(Net):
    """Reads batches in hooks, as image samplers and throughput monitors do."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[torch.Tensor] = []
        self.seen: list[list[torch.Tensor]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trained = []
        x, y = batch
        self.seen.append([x, y])
        self.log("largest", x.max(), on_epoch=True, on_step=False, reduce_fx="max")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch[0])
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert len(batch) == 2 and batch[0].shape == (8, 4) and len(list(batch)) == 2
        assert torch.equal(batch[0], torch.cat(self.trained)) and torch.equal(batch[0], self.seen[-1][0])
        self.log("mean", batch[1].mean(), on_epoch=True, on_step=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_hooks_see_the_ranks_samples(tmp_path: Path, workers: int) -> None:
    plain, module = Net(), Looking()
    trainer(tmp_path, max_epochs=1).fit(plain, loader(num_workers=workers))
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, loader(num_workers=workers))
    assert len(module.seen) == 6 and same(plain, module), "looking changes nothing"
    everything = dataset().tensors
    assert float(run.callback_metrics["largest"]) == pytest.approx(float(everything[0].max()))
    assert float(run.callback_metrics["mean"]) == pytest.approx(float(everything[1].mean()), abs=1e-6)


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`:UserWarning")
def test_a_throughput_monitor_counts_what_the_batch_function_says(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0), window_size=3)
    run = trainer(tmp_path, max_epochs=1, callbacks=[monitor], log_every_n_steps=1, logger=CSVLogger(tmp_path))
    run.fit(Net(), loader())
    assert monitor._samples[RunningStage.TRAINING] == 48


def test_loaders_and_strategy_have_what_callbacks_ask_for(tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    class Asking(Net):
        def on_train_start(self) -> None:
            train = self.trainer.train_dataloader
            asked.update(batch_size=train.batch_size, drop_last=train.drop_last, collate=train.collate_fn)
            asked["processes"] = self.trainer.strategy.num_processes  # type: ignore[attr-defined]

    mine = loader(drop_last=True)
    trainer(tmp_path, max_epochs=1).fit(Asking(), mine)
    assert asked == {"batch_size": 4, "drop_last": True, "collate": mine.collate_fn, "processes": DEVICES}


@pytest.mark.parametrize(
    ("settings", "sampler", "in_order"),
    [({}, None, False), ({"use_distributed_sampler": False}, None, True), ({}, range(47, -1, -1), True)],
)
def test_the_order_that_a_script_chooses(tmp_path: Path, settings: Any, sampler: Any, in_order: bool) -> None:
    """Shuffled as under ddp, unless the trainer is configured otherwise or the loader has a sampler of its own."""
    seen: list[Any] = []

    class Seeing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].sum(1))
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, max_epochs=1, devices=1, **settings)
    for _ in range(2):  # a trainer's second fit equals the first
        run.fit(Seeing(), loader(shuffle=None, sampler=sampler))
        run.fit_loop.epoch_progress.reset()
    data = dataset().tensors[0].sum(1)
    order = data if sampler is None else data.flip(0)
    first, second = torch.cat(seen).chunk(2)
    assert torch.equal(first, order) is torch.equal(second, order) is in_order
    assert torch.equal(first.sort().values, data.sort().values) and torch.equal(first, second)


def test_a_loader_that_iterates_in_its_own_way_is_refused(tmp_path: Path) -> None:
    class Prefetching(DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return super().__iter__()

    with pytest.raises(ConfigError, match="Prefetching is a DataLoader with an __iter__ of its own"):
        trainer(tmp_path, max_epochs=1).fit(Net(), Prefetching(dataset(), batch_size=4))


class Means(Net):
    """Keeps each epoch's mean of the loss, as a value and from a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[tuple[float, float]] = []
        self.object = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.object.update(loss)
        self.log("object", self.object, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.log("epoch", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        values: Any = self.trainer.fit_loop.epoch_loop._results.metrics(False)["callback"]
        self.means.append((float(values["mean"]), float(values["object"])))


def test_a_resumed_epochs_mean_is_that_of_the_whole_epoch(tmp_path: Path) -> None:
    full, again = Means(), Means()
    saving = ModelCheckpoint(tmp_path / "ck", "{step}", save_top_k=-1, every_n_train_steps=4)
    trainer(tmp_path, callbacks=[saving], enable_checkpointing=True).fit(full, loader(), loader(16, shuffle=False))
    path = tmp_path / "ck" / "step=8.ckpt"
    trainer(tmp_path).fit(again, loader(), loader(16, shuffle=False), ckpt_path=path, weights_only=True)
    assert len(full.means) == 3 and again.means == full.means[1:]


class Keeping(UnicronStrategy):
    """Writes a checkpoint before each step, or resumes from one as a new life does."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        super().__init__()
        self._folder, self._path = folder, path

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self._session is not None
        if self._path is not None:
            written = {"path": str(self._path), "digest": digest_of(str(self._path))}
            self._session.resume = (wire.Checkpoint(**written, step=0, life=1),)
        super().setup(trainer)

    @override
    def boundary(self, trainer: pl.Trainer) -> None:
        super().boundary(trainer)
        if self._path is None:
            rest: dict[str, Any] = self._membership.state(trainer)
            checkpoint = rest.pop("checkpoint")
            torch.save({**checkpoint, join_state.WHOLE: codec.encode(rest)}, self._folder / f"{trainer.global_step}")


class Told(Net):
    """Logs values that are aggregated over an epoch, and keeps Lightning's results."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.steps: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        loop: Any = self.trainer.fit_loop.epoch_loop
        self.steps.append(loop._batches_that_stepped)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def on_train_end(self) -> None:
        self.means.append(float(self.trainer.callback_metrics["mean"]))


def run_from(folder: Path, path: Path | None = None) -> Told:
    module = Told()
    fit = trainer(folder, strategy=Keeping(folder, path), val_check_interval=3)
    fit.fit(module, loader(), loader(16, shuffle=False))
    assert fit.global_step == 18 and fit.current_epoch == 3
    return module


def test_a_checkpoint_between_two_steps_is_resumed_exactly(tmp_path: Path) -> None:
    """As in a task that is restarted by an order, with all the state that a joiner gets."""
    full = run_from(tmp_path)
    assert full.steps == list(range(18)) and full.validated == list(range(3, 19, 3))
    for step in (1, 3, 5, 6, 7, 9, 12, 17):  # including after a validation, at an epoch's start and just before its end
        again = run_from(tmp_path, tmp_path / f"{step}")
        assert again.steps == list(range(step, 18)), step
        assert again.losses == full.losses[step:], step
        assert again.validated == [at for at in full.validated if at > step]
        assert again.means == full.means and same(again, full)


def test_two_fits_in_a_row_and_evaluation_alone(tmp_path: Path) -> None:
    module, run = Net(), trainer(tmp_path, max_epochs=1)
    before = run.validate(module, loader(20, shuffle=False), verbose=False)
    assert run.test(module, loader(20, shuffle=False), verbose=False)[0]["test"] == pytest.approx(before[0]["val"])
    run.fit(module, loader(), loader(20, shuffle=False))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(20, shuffle=False))
    assert run.global_step == 12
    after = run.validate(module, loader(20, shuffle=False), verbose=False)[0]["val"]
    assert after < before[0]["val"]
    reference = Net()
    trainer(tmp_path, max_epochs=1).fit(reference, loader(), loader(20, shuffle=False))
    assert len(module.losses) == 12 and module.losses[:6] == reference.losses


def test_evaluation_is_the_mean_over_samples(tmp_path: Path) -> None:
    module = Net()
    result = trainer(tmp_path).validate(module, loader(19, shuffle=False, batch_size=4), verbose=False)[0]["val"]
    module.eval()
    x, y = dataset(19).tensors
    with torch.no_grad():
        assert result == pytest.approx(float((module.net(x) - y).square().mean()), rel=1e-5)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_loader_workers_change_nothing(tmp_path: Path, workers: dict[str, Any]) -> None:
    module, reference = Net(), Net()
    trainer(tmp_path, max_epochs=2).fit(module, loader(**workers), loader(16, shuffle=False, **workers))
    trainer(tmp_path, max_epochs=2).fit(reference, loader(), loader(16, shuffle=False))
    assert module.losses == reference.losses and same(module, reference)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(4)
        return x, x.sum(0, keepdim=True)


def test_random_augmentation_does_not_depend_on_workers(tmp_path: Path) -> None:
    losses = []
    for workers in (0, 2):
        module = Net()
        trainer(tmp_path, max_epochs=1).fit(module, DataLoader(Augmented(), batch_size=4, num_workers=workers))
        losses.append(module.losses)
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_validation_after_the_learning_rate_finder(tmp_path: Path) -> None:
    """The finder validates before the sanity check."""

    class Rated(Net):
        lr = 0.02

    finder = LearningRateFinder(num_training_steps=8, early_stop_threshold=None)
    run = trainer(tmp_path, max_epochs=1, callbacks=[finder])
    run.fit(Rated(), loader(), loader(16, shuffle=False))
    assert finder.optimal_lr is not None and run.global_step == 6 and "val" in run.callback_metrics


class Reloading(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        self.made.append(self.trainer.current_epoch)
        return loader(num_workers=1)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(16, shuffle=False)

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}


def test_a_data_module_and_reloading(tmp_path: Path) -> None:
    data, module = Reloading(), Net()
    trainer(tmp_path, max_epochs=4, reload_dataloaders_every_n_epochs=2).fit(module, datamodule=data)
    assert data.made == [0, 2]
    assert len(module.losses) == 24


def test_batch_norm_statistics_are_those_of_the_global_batch(tmp_path: Path) -> None:
    """The mean of the micro-batches' statistics; a step counts as one batch."""
    module, x = Net(), dataset().tensors[0]
    trainer(tmp_path, max_steps=1, use_distributed_sampler=False).fit(module, loader(shuffle=False))
    fresh, parts = Net(), []
    for micro_batch in (x[0:8:2], x[1:8:2]):
        norm = nn.BatchNorm1d(8)
        norm(fresh.net[0](micro_batch))
        parts.append(torch.stack([norm.running_mean, norm.running_var]))  # type: ignore[list-item]
    norm_state = module.net[1]
    assert isinstance(norm_state, nn.BatchNorm1d) and norm_state.num_batches_tracked == 1
    assert torch.allclose(torch.stack([norm_state.running_mean, norm_state.running_var]), sum(parts) / 2)  # type: ignore[list-item]


class Scaled(Net):
    """Makes the gradients of one step infinite."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self.broken = broken
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if len(self.scales) == self.broken else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        scaler: Any = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scales.append(scaler.get_scale())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_scaler_skips_a_step_that_overflows(tmp_path: Path) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    module = Scaled(broken=2)
    states = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            states.append([p.detach().clone() for p in module.parameters()])

    trainer(tmp_path, max_epochs=1, plugins=[plugin], callbacks=[Watch()]).fit(module, loader())
    assert module.scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    changed = [not torch.equal(a[0], b[0]) for a, b in itertools.pairwise(states)]
    assert changed == [True, False, True, True, True]


def test_an_uneven_number_of_micro_batches(tmp_path: Path) -> None:
    """Whatever the accumulation, the same global batch gives the same parameters."""
    first, second = Net(), Net()
    trainer(tmp_path, devices=1, accumulate_grad_batches=3, max_epochs=1).fit(first, loader(shuffle=False))
    trainer(tmp_path, devices=1, accumulate_grad_batches=3, max_epochs=1, gradient_clip_val=1e9).fit(
        second, loader(shuffle=False)
    )
    assert same(first, second) and len(first.losses) == 4


@pytest.mark.parametrize("step", [2, 4, 8])
def test_a_checkpoint_of_another_strategy_counts_batches(tmp_path: Path, step: int) -> None:
    """Within an epoch and at its end, with accumulation: it is resumed at its place."""

    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    shape: dict[str, Any] = {"devices": 1, "accumulate_grad_batches": 3, "use_distributed_sampler": False}
    full, again = Plain(), Plain()
    whole = trainer(tmp_path, strategy="auto", callbacks=[saving], enable_checkpointing=True, **shape)
    whole.fit(full, loader(shuffle=False))
    resumed = trainer(tmp_path, **shape)
    resumed.fit(again, loader(shuffle=False), ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=False)
    assert (resumed.global_step, len(again.losses)) == (whole.global_step, 12 - step)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(full.parameters(), again.parameters(), strict=True))
