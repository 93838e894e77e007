"""What joiners get of Lightning's callbacks beyond their states."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

from unicron_lightning.strategies.state import callbacks
from unicron_lightning.worker import codec


class Searching(LearningRateFinder):
    def lr_find(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise AssertionError("searched")


class Net(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)


def trainer(folder: Path, lr: float, *more: pl.Callback) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    savers = [ModelCheckpoint(folder, save_last=True), ModelCheckpoint(folder, every_n_train_steps=2)]
    made = pl.Trainer(accelerator="cpu", devices=1, callbacks=[*savers, *more], **quiet)
    made.strategy._lightning_module = Net(lr)  # type: ignore[assignment]
    return made


def test_a_joiner_saves_when_the_members_do(tmp_path: Path) -> None:
    member, joiner = (trainer(tmp_path, lr, Searching()) for lr in (0.5, 0.1))
    first, second = member.checkpoint_callbacks
    vars(first).update(_last_checkpoint_saved="last.ckpt", _last_global_step_saved=7)
    vars(second).update(_defer_save_until_validation=True)
    callbacks.restore(joiner, codec.decode(codec.encode(callbacks.state(member))))
    assert callbacks.state(joiner) == callbacks.state(member)
    assert joiner.checkpoint_callbacks[0]._last_checkpoint_saved == "last.ckpt"  # type: ignore[attr-defined]
    assert joiner.lightning_module.hparams["lr"] == 0.5, "the rate that the members have found"


def test_a_finder_without_an_attribute_has_nothing_to_hand_over(tmp_path: Path) -> None:
    assert callbacks.state(trainer(tmp_path, 0.1, LearningRateFinder(update_attr=False)))["rates"] == []


def test_a_new_life_removes_what_the_one_before_would_have_replaced(tmp_path: Path) -> None:
    """After the checkpoint from which it resumes; never one of a callback that keeps all."""
    made = trainer(tmp_path, 0.1)
    all_of, newest = (ModelCheckpoint(tmp_path, save_top_k=number) for number in (-1, 1))
    made.callbacks = [all_of, newest]  # type: ignore[attr-defined]
    known: list[str] = []
    for step in range(3):
        for saver, name in ((all_of, "all"), (newest, "newest")):
            saver.best_model_path = str(tmp_path / f"{name}-{step}.ckpt")
            Path(saver.best_model_path).touch()
            if step < 2:
                known += callbacks.replaceable_paths(made)
    callbacks.note_saved(made, str(tmp_path / "newest-2.ckpt"), known)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        *("all-0.ckpt", "all-1.ckpt", "all-2.ckpt", "newest-2.ckpt")
    ]


def test_a_joiner_does_not_search(tmp_path: Path) -> None:
    made = trainer(tmp_path, 0.1, Searching())
    (finder,) = (each for each in made.callbacks if isinstance(each, Searching))  # type: ignore[attr-defined]
    callbacks.skip_search(made)
    for each in (finder, copy.deepcopy(finder), pickle.loads(pickle.dumps(finder))):
        each.on_fit_start(made, made.lightning_module)
    callbacks.allow_search(made)
    assert "lr_find" not in vars(finder) and not callbacks.searches(made)
