"""torch's default process group under the strategy: what it has, and what it refuses by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.strategies.collectives import default_group
from unicron_lightning.strategies.collectives.operations import CollectiveInStep
from unicron_lightning.strategies.collectives.process_group import UNSUPPORTED, CollectiveRefused, DefaultGroup


class Line(pl.LightningModule):
    """Runs a function in a hook or in the step."""

    def __init__(self, where: str, act: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.where, self.act = where, act
        self.prepared: bool | None = None

    def prepare_data(self) -> None:
        self.prepared = dist.is_initialized()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "step":
            self.act()
        return self.layer(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        if self.where == "epoch_end":
            self.act()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, where: str, act: Callable[[], Any]) -> Line:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings |= {"default_root_dir": folder, "max_epochs": 1, "accelerator": "cpu", "devices": 1}
    trainer = pl.Trainer(strategy="unicron", enable_model_summary=False, **settings)
    module = Line(where, act)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4))
    return module


def test_torch_has_what_a_registration_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_group.supported()
    assert issubclass(DefaultGroup, dist.ProcessGroup)
    assert hasattr(pl.Trainer(accelerator="cpu", logger=False).fit_loop.epoch_loop, "_broadcast_sigterm_tensor")
    monkeypatch.delattr(c10d, "_update_default_pg")
    assert not default_group.supported()


def test_the_group_is_there_in_hooks_and_gone_afterwards(tmp_path: Path) -> None:
    seen = []
    module = fit(
        tmp_path, "epoch_end", lambda: seen.append((dist.get_rank(), dist.get_world_size(), dist.get_backend()))
    )
    assert seen == [(0, 1, "unicron")]
    assert module.prepared is False, "Lightning would make a group of gloo's around prepare_data"
    assert not dist.is_initialized()
    assert not c10d._world.pg_map and not c10d._world.pg_names


def test_a_collective_in_a_step_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CollectiveInStep, match=r"torch\.distributed\.all_reduce\(\) was called inside training_step"):
        fit(tmp_path, "step", lambda: dist.all_reduce(torch.ones(1)))
    default_group.unregister()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_what_it_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    refused: dict[str, str] = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        with pytest.raises(CollectiveRefused) as caught:
            act()
        refused[name] = str(caught.value)

    def act() -> None:
        tensor = torch.ones(2)
        attempt("new_group", lambda: dist.new_group([0], backend="gloo"))
        attempt("reduce_scatter", lambda: dist.reduce_scatter_tensor(tensor, tensor))
        attempt("recv", lambda: dist.recv(tensor))
        attempt("ReduceOp", lambda: dist.all_reduce(tensor, op=dist.ReduceOp.BAND))
        thread = threading.Thread(target=attempt, args=("thread", dist.barrier))
        thread.start()
        thread.join()

    fit(tmp_path, "epoch_end", act)
    assert set(refused) == {"new_group", "reduce_scatter", "recv", "ReduceOp", "thread"}
    for name in ("new_group", "reduce_scatter", "recv", "ReduceOp"):
        assert name in refused[name]
    assert "only where it trains" in refused["thread"]
    for name in UNSUPPORTED:
        if hasattr(dist.ProcessGroup, name):
            assert getattr(DefaultGroup, name) is not getattr(dist.ProcessGroup, name)


def test_a_group_of_the_script_itself_is_left_alone(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own, seen = id(dist.group.WORLD), []
        fit(tmp_path, "epoch_end", lambda: seen.append(id(dist.group.WORLD)))
        assert seen == [own]
        assert id(dist.group.WORLD) == own
    finally:
        dist.destroy_process_group()
