"""UnicronCheckpoint saves when, and under which names, ModelCheckpoint does."""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.callbacks import UnicronCheckpoint
from unicron_lightning.checkpoints.beside import CheckpointLost
from unicron_lightning.checkpoints.files import is_folder
from unicron_lightning.checkpoints.index import read_checkpoint
from unicron_lightning.checkpoints.pieces import stage
from unicron_lightning.errors import ConfigError
from unicron_lightning.local_cluster.processes import until
from unicron_lightning.strategies.state.checkpointing import Persisting


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        if self.global_step == 10:
            first = Path(self.trainer.checkpoint_callback.dirpath) / "epoch=1-step=5.ckpt"
            until("the first checkpoint", first.exists)  # the writer has started
            raise ArithmeticError("in the last step")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(
    saver: ModelCheckpoint, strategy: str = "unicron", steps: int = 9, module: type[pl.LightningModule] = Line
) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    shown: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=steps, callbacks=[saver], **shown)
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    trainer.fit(module(), DataLoader(data, batch_size=8))
    return trainer


def found(saver: ModelCheckpoint, folder: Path) -> dict[str, Any]:
    """Names of checkpoints, and the callback's view of them."""
    scores = {Path(path).name: float(score) for path, score in saver.best_k_models.items()}
    links = {path.name: path.resolve().name for path in folder.iterdir() if path.is_symlink()}
    names = {path.name for path in folder.iterdir()}
    return {"names": names, "best": Path(saver.best_model_path).name, "scores": scores, "links": links}


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "loss", "save_top_k": 2, "every_n_train_steps": 1},
        {"monitor": "loss", "mode": "max", "filename": "{epoch}-{loss:.3f}", "save_top_k": -1},
        {"every_n_train_steps": 3, "save_last": "link"},
        {"train_time_interval": timedelta(0), "save_last": True},
        {"every_n_epochs": 1, "save_weights_only": True},
        {"filename": "same", "every_n_train_steps": 4, "enable_version_counter": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_names_are_those_of_modelcheckpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    savers = [kind(tmp_path / kind.__name__, **options) for kind in (ModelCheckpoint, UnicronCheckpoint)]
    for saver in savers:
        trained(saver)
    expected, own = (found(saver, tmp_path / type(saver).__name__) for saver in savers)
    assert own == expected and own["names"]
    for path in (tmp_path / "UnicronCheckpoint").iterdir():
        assert is_folder(path), path
    state = torch.load(savers[0].best_model_path, weights_only=True)
    read = read_checkpoint(savers[1].best_model_path)
    assert ("optimizer_states" in read) == ("optimizer_states" in state) and read["global_step"] == state["global_step"]
    torch.testing.assert_close(read["state_dict"], state["state_dict"], rtol=0, atol=0)


class Kept(UnicronCheckpoint):
    """Keeps the parameters of each save, and doubles them in a hook before the next step if asked."""

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self.saved: list[torch.Tensor] = []
        self.doubles_at = -1

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.saved.append(trainer.lightning_module.net.weight.detach().clone())

    def on_train_batch_start(self, trainer: pl.Trainer, *others: Any) -> None:
        super().on_train_batch_start(trainer, *others)
        if trainer.global_step == self.doubles_at:
            with torch.no_grad():
                trainer.lightning_module.net.weight.mul_(2)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes longer than a step."""

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return stage(*arguments)

    monkeypatch.setattr("unicron_lightning.checkpoints.beside.stage", slow)


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("doubles_at", [-1, 2])
def test_the_optimizer_waits_for_the_copy(tmp_path: Path, doubles_at: int) -> None:
    saver = Kept(tmp_path, every_n_train_steps=2, save_top_k=-1, overlap=True)
    saver.doubles_at = doubles_at
    trained(saver, steps=8)
    names = {2: "epoch=0-step=2.ckpt", 4: "epoch=0-step=4.ckpt", 6: "epoch=1-step=6.ckpt", 8: "epoch=1-step=8.ckpt"}
    for (step, name), weight in zip(names.items(), saver.saved, strict=True):
        assert is_folder(tmp_path / name) == (step != doubles_at), name
        if step != doubles_at:
            torch.testing.assert_close(
                read_checkpoint(tmp_path / name)["state_dict"]["net.weight"], weight, rtol=0, atol=0
            )


@pytest.mark.usefixtures("slow_copies")
def test_a_checkpoint_whose_successor_fails_is_removed_with_the_next(tmp_path: Path) -> None:
    saver = Kept(tmp_path, every_n_train_steps=2, save_top_k=1)
    saver.doubles_at = 6
    trained(saver, steps=9)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1-step=8.ckpt"]


def test_a_process_with_a_thousand_open_files(tmp_path: Path) -> None:
    """As one of a large world has: select() would refuse the writer's."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with ExitStack() as stack:
        for _ in range(1024):
            stack.enter_context(Path(os.devnull).open())
        trained(UnicronCheckpoint(tmp_path, every_n_train_steps=3), steps=3)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-step=3.ckpt"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.chaos), True])
def test_a_run_whose_newest_checkpoint_nobody_can_write_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """Another worker holds half of the checkpoint, and has died."""
    agree, saves = Persisting._agree, list[Any]()

    def agree_with_another(self: Persisting) -> Any:
        saves.append(agree(self))
        if len(saves) != (2 if last else 1):
            return saves[-1]
        return replace(saves[-1], workers=["", "other"], parts=["", ""], holders=[[0], [1]])

    monkeypatch.setattr(Persisting, "_agree", agree_with_another)
    monkeypatch.setattr(Persisting, "_members", lambda self: {""})
    saver = UnicronCheckpoint(tmp_path / "saved", every_n_train_steps=3, save_top_k=-1)
    named = r"step=6.ckpt: all holders of the parts \[1\] were lost before"
    with pytest.raises(CheckpointLost, match=named) if last else nullcontext():
        trained(saver, steps=6)
    names = [path.name for path in (tmp_path / "saved").glob("*.ckpt")]
    assert names == ["epoch=0-step=3.ckpt" if last else "epoch=1-step=6.ckpt"]


def never_starts(folder: Path) -> str:
    """Make a program in place of the writer's."""
    never = folder / "never"
    never.write_text("#!/bin/sh\nexec sleep 600\n")
    never.chmod(0o700)
    return str(never)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("every", [3, 100])
def test_the_end_of_a_run_does_not_wait_for_the_writers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr("unicron_lightning.checkpoints.client.sys.executable", never_starts(tmp_path))
    trained(UnicronCheckpoint(tmp_path / "saved", every_n_train_steps=every, save_top_k=-1), steps=6)
    assert len(list((tmp_path / "saved").glob("*"))) == (2 if every == 3 else 0)


class Pausing(Line):
    """Ends a life as a pause does, between two steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.trainer.strategy.persisting.finish(40.0)
            self.saved = os.listdir(self.trainer.checkpoint_callback.dirpath)


@pytest.mark.timeout(60)
def test_a_pause_does_not_wait_for_the_writers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_lightning.checkpoints.client.sys.executable", never_starts(tmp_path))
    saver = UnicronCheckpoint(tmp_path / "saved", every_n_train_steps=3, save_top_k=-1)
    assert trained(saver, steps=6, module=Pausing).lightning_module.saved == ["epoch=0-step=3.ckpt"]


class Frozen(Line):
    """With frozen parameters, some of which each step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(4, 1, bias=False).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.teacher.weight.lerp_(self.net.weight.detach(), 0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("slow_copies")
def test_frozen_parameters_are_copied_while_steps_write_to_them(tmp_path: Path) -> None:
    saver = UnicronCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trained(saver, steps=6, module=Frozen)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch=0-step=2.ckpt",
        "epoch=0-step=4.ckpt",
        "epoch=1-step=6.ckpt",
    ]
    plain = ModelCheckpoint(tmp_path / "plain", every_n_train_steps=2, save_top_k=-1)
    trained(plain, steps=6, module=Frozen)
    for path in tmp_path.glob("*.ckpt"):
        expected = torch.load(tmp_path / "plain" / path.name, weights_only=True)
        torch.testing.assert_close(read_checkpoint(path)["state_dict"], expected["state_dict"], rtol=0, atol=0)


def test_an_exception_saves(tmp_path: Path) -> None:
    saver = UnicronCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, save_on_exception=True)
    with pytest.raises(ArithmeticError):
        trained(saver, steps=20)
    assert "epoch=2-step=10.ckpt" in {path.name for path in tmp_path.iterdir()}


def test_other_strategies_and_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'UnicronCheckpoint needs Trainer\(strategy="unicron"\)'):
        trained(UnicronCheckpoint(tmp_path), strategy="auto")
    with pytest.raises(ConfigError, match=r"partners=-1\): expected 0 or more"):
        UnicronCheckpoint(tmp_path, partners=-1)
