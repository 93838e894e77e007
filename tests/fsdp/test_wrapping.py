"""The choice of a model's blocks, and settings that are refused when a trainer starts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsdp.train import SETTINGS, Model
from torch import nn

from unicron_lightning import UnicronFSDPStrategy
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.fsdp import parallel
from unicron_lightning.strategies.fsdp.parallel import blocks_of, place_rest


def names_of(module: pl.LightningModule, blocks: tuple[str, ...] | int) -> list[str]:
    names = {id(each): name for name, each in module.named_modules()}
    return [names[id(each)] for each in blocks_of(module, blocks)]


def test_blocks_by_class_by_size_and_by_default() -> None:
    module = Model(SETTINGS)
    both = ["net.blocks.0", "net.blocks.1"]
    assert names_of(module, ()) == names_of(module, ("Block",)) == both
    size = sum(each.numel() for each in module.net.blocks[0].parameters())
    assert names_of(module, size) == both
    attention = sum(each.numel() for each in module.net.blocks[0].attention.parameters())
    smaller = [f"net.blocks.{block}.{part}" for block in range(2) for part in ("attention", "mlp")]
    assert names_of(module, attention) == smaller, "attention reads its projection's weight itself"


def test_tied_parameters_are_in_no_block_and_too_large_a_size_is_refused() -> None:
    module = Model(SETTINGS)
    assert not {"net.tokens", "net.head"} & set(names_of(module, 1))
    with pytest.raises(ConfigError, match=r"blocks=1000000: .* below Model's submodules .* the largest has \d+"):
        blocks_of(module, 1_000_000)


def test_a_module_without_parts_has_no_block_of_a_size() -> None:
    module = pl.LightningModule()
    module.net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="the largest has 0"):
        blocks_of(module, 1)


def test_buffers_are_placed_and_the_module_knows_its_device() -> None:
    module = pl.LightningModule()
    module.net = torch.nn.BatchNorm1d(2, affine=False)
    place_rest(module, torch.device("meta"))
    assert all(each.is_meta for each in module.buffers())
    assert module.device.type == "meta"


def test_offload_is_refused_on_the_cpu() -> None:
    strategy = UnicronFSDPStrategy(shard_size=1, cpu_offload=True)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False)
    with pytest.raises(ConfigError, match=r"cpu_offload=True: .* are in host memory already; expected False"):
        trainer.fit(Model(SETTINGS), *[torch.utils.data.DataLoader(range(4))] * 2)


def test_a_trainer_after_one_with_another_strategy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "control_of_process", object)  # as an earlier trainer's session leaves it
    strategy = UnicronFSDPStrategy(shard_size=1)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False)
    with pytest.raises(ConfigError, match=r"a further Trainer of this script .*, the first one another strategy"):
        trainer.fit(Model(SETTINGS), *[torch.utils.data.DataLoader(range(4))] * 2)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_trainer_has_a_strategy_of_its_own(copied: Callable[[Any], Any]) -> None:
    strategy = UnicronFSDPStrategy(shard_size=1)
    other = copied(pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False)).strategy
    assert other is not strategy and other.parallelism.evaluation._strategy is other
    other.parallelism._holder = type("Holder", (), {"member": "own"})
    assert other.parallelism.division._member() == "own"
