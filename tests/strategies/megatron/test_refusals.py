"""Each unsupported setting of the Megatron strategy is refused by one error that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("megatron.core.package_info")

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.grid import Shape
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.strategies.megatron.checks import (
    check_megatron_config,
    check_megatron_layout,
    check_megatron_loader,
    check_validation_loader,
)
from unicron_lightning.strategies.megatron.optimizer import split_configuration
from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy


class Config:
    """A `TransformerConfig` with the attributes that are read."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update({"context_parallel_size": 1, "expert_model_parallel_size": 1, **fields})


@pytest.mark.parametrize(
    ("config", "ddp", "optimizer", "message"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, {}, {}, r"virtual_pipeline_model_parallel_size=2"),
        ({"context_parallel_size": 2}, {}, {}, r"context_parallel_size=2.* expected 1"),
        ({"num_moe_experts": 8}, {}, {}, r"num_moe_experts=8"),
        ({"fp8": "hybrid"}, {}, {}, r"fp8='hybrid'"),
        ({}, {"average_in_collective": True}, {}, r"DistributedDataParallelConfig\(average_in_collective=True\)"),
        ({}, {"use_distributed_optimizer": True}, {}, r"use_distributed_optimizer=False.*expected both"),
        ({}, {}, {"use_distributed_optimizer": True}, r"use_distributed_optimizer=True.*expected False"),
        (
            {},
            {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True},
            {"use_distributed_optimizer": True},
            r"overlap_param_gather=True",
        ),
        ({}, {}, {"fp16": True}, r"OptimizerConfig\(fp16=True\)"),
    ],
)
def test_configurations(config: dict, ddp: dict, optimizer: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_megatron_config(
            Config(**config), DistributedDataParallelConfig(**ddp), OptimizerConfig(lr=0.1, **optimizer)
        )


def test_a_model_for_another_layout_than_the_task_has() -> None:
    config = Config(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    check_megatron_layout(config, Shape(tensor=1, pipeline=2, replicas=2))
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=1\), but the task has 2 now"):
        check_megatron_layout(config, Shape(tensor=2, pipeline=2, replicas=1))


def test_what_is_supported_passes() -> None:
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    check_megatron_config(Config(sequence_parallel=True, bf16=True), ddp, OptimizerConfig(lr=0.1, bf16=True))


def test_sizes() -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=0"):
        UnicronMegatronStrategy(tensor_model_parallel_size=0)


def test_redundancy() -> None:
    shards = DistributedDataParallelConfig(use_distributed_optimizer=True)
    UnicronMegatronStrategy(ddp=shards)
    UnicronMegatronStrategy(ddp=shards, redundancy=Redundancy(copies=2, overlap=False))
    with pytest.raises(ConfigError, match=r"overlap=True.*expected overlap=False and every=1"):
        UnicronMegatronStrategy(ddp=shards, redundancy=Redundancy())
    with pytest.raises(ConfigError, match=r"expected ddp=.*use_distributed_optimizer=True"):
        UnicronMegatronStrategy(redundancy=Redundancy(overlap=False))


def test_loaders() -> None:
    data = TensorDataset(torch.zeros(5))
    with pytest.raises(ConfigError, match=r"5 samples.*batch_size=2.*drop_last"):
        check_megatron_loader(DataLoader(data, batch_size=2))
    with pytest.raises(ConfigError, match="has no batch_size"):
        check_megatron_loader(DataLoader(data, batch_size=None))
    assert check_megatron_loader(DataLoader(data, batch_size=2, drop_last=True)) == 2
    with pytest.raises(ConfigError, match="validation DataLoader has no batch_size"):
        check_validation_loader(DataLoader(data, batch_size=None))
    check_validation_loader(DataLoader(data, batch_size=2))


def test_optimizers() -> None:
    config = OptimizerConfig(lr=0.1)
    assert split_configuration(config) == (config, None)
    assert split_configuration({"optimizer": config, "lr_scheduler": list}) == (config, list)
    for returned in (None, {"optimizer": config, "lr_scheduler": 3}, torch.optim.SGD([torch.zeros(1)], lr=0.1)):
        with pytest.raises(ConfigError, match="configure_optimizers"):
            split_configuration(returned)
