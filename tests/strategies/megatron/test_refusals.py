"""Each unsupported setting of the Megatron strategy is refused by one error that names it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs.data_worker import Reopenable
from programs.stream_worker import Numbers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("megatron.core.package_info")

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from unicron_lightning.data.sources import as_loader
from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.performance.description import TransformerProfile
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.strategies.megatron.checks import (
    check_experts,
    check_megatron_config,
    check_megatron_layout,
    check_megatron_loader,
    check_validation_loader,
)
from unicron_lightning.strategies.megatron.parallel import make_scheduler, preset_of, shape_of, split_configuration
from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy


class Config:
    """A `TransformerConfig` with the attributes that are read."""

    def __init__(self, **fields: Any) -> None:
        sizes = {"context_parallel_size": 1, "expert_model_parallel_size": 1}
        self.__dict__.update({**sizes, "virtual_pipeline_model_parallel_size": None, **fields})


@pytest.mark.parametrize(
    ("config", "ddp", "optimizer", "message"),
    [
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
        ({"fp16": True}, {}, {"bf16": True}, r"fp16=True\) is not supported .* expected False"),
        ({}, {}, {"loss_scale": 8.0}, r"OptimizerConfig\(loss_scale=8.0\) is ignored in float32"),
    ],
)
def test_configurations(config: dict, ddp: dict, optimizer: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_megatron_config(
            Config(**config), DistributedDataParallelConfig(**ddp), OptimizerConfig(lr=0.1, **optimizer)
        )


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (
            {},
            {"tensor": 2},
            r"tensor_model_parallel_size=2 with num_moe_experts=8: .* expected .*sequence_parallel=T",
        ),
        (
            {"expert_tensor_parallel_size": 1, "sequence_parallel": True},
            {"tensor": 2},
            "expert_tensor_parallel_size=1 with num_moe_experts=8: TP slices the experts, too; expected 2",
        ),
        ({"moe_token_dispatcher_type": "flex"}, {}, r"'flex'.* expected 'allgather' or 'alltoall'"),
        ({"moe_router_force_load_balancing": True}, {}, "draws by rank"),
        ({"moe_shared_expert_overlap": True}, {}, "moe_shared_expert_overlap=True"),
        ({"moe_enable_routing_replay": True}, {}, "moe_enable_routing_replay=True"),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, {}, "would depend on those of other replicas"),
        ({"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, {}, r"\['aux_loss', 'global_aux"),
    ],
)
def test_experts(config: dict, shape: dict, message: str) -> None:
    fields = {
        "num_moe_experts": 8,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_force_load_balancing": False,
        "moe_shared_expert_overlap": False,
        "moe_enable_routing_replay": False,
        "moe_router_load_balancing_type": "aux_loss",
        "sequence_parallel": False,
    }
    there = Shape(**{"tensor": 1, "expert": 2, "replicas": 2, **shape})
    fields["expert_tensor_parallel_size"] = there.tensor  # as `TransformerConfig` sets it by default
    grid = Shape(tensor=2, expert=2, pipeline=2, replicas=2)
    check_experts(Config(**{**fields, "expert_tensor_parallel_size": 1}), replace(grid, tensor=1))
    sliced = {"sequence_parallel": True, "expert_tensor_parallel_size": 2}
    check_experts(Config(**{**fields, **sliced}), grid)
    check_experts(Config(num_moe_experts=None), there)
    with pytest.raises(ConfigError, match=message):
        check_experts(Config(**{**fields, **config}), there)


def test_a_model_for_another_layout_than_the_task_has() -> None:
    config = Config(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    check_megatron_layout(config, Shape(tensor=1, pipeline=2, replicas=2))
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=1\), but the task has 2 now"):
        check_megatron_layout(config, Shape(tensor=2, pipeline=2, replicas=1))
    config.expert_model_parallel_size = 4
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size=4\), but the task has 2 now"):
        check_megatron_layout(config, Shape(tensor=1, pipeline=2, expert=2, replicas=1))
    config = Config(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"context_parallel_size=1\), but the task has 2 now"):
        check_megatron_layout(config, Shape(tensor=1, pipeline=2, context=2, replicas=1))
    with pytest.raises(ConfigError, match=r"virtual_pipeline_model_parallel_size=None\), but the task has 2 now"):
        check_megatron_layout(config, Shape(tensor=1, pipeline=2, virtual=2, replicas=1))


def test_what_is_supported_passes() -> None:
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    check_megatron_config(Config(sequence_parallel=True, bf16=True), ddp, OptimizerConfig(lr=0.1, bf16=True))


def test_sizes() -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=0"):
        UnicronMegatronStrategy(tensor_model_parallel_size=0)


def test_redundancy() -> None:
    shards = DistributedDataParallelConfig(use_distributed_optimizer=True)
    UnicronMegatronStrategy(ddp=shards)
    UnicronMegatronStrategy(ddp=shards, redundancy=Redundancy(copies=2))
    with pytest.raises(ConfigError, match=r"expected ddp=.*use_distributed_optimizer=True"):
        UnicronMegatronStrategy(redundancy=Redundancy())


def test_loaders() -> None:
    data = TensorDataset(torch.zeros(5))
    with pytest.raises(ConfigError, match=r"5 samples.*batch_size=2.*drop_last"):
        check_megatron_loader(DataLoader(data, batch_size=2), 1)
    with pytest.raises(ConfigError, match="has no batch_size"):
        check_megatron_loader(DataLoader(data, batch_size=None), 1)
    with pytest.raises(ConfigError, match="the training data, a list, has no batch_size"):
        check_megatron_loader(as_loader([torch.zeros(2, 1)], 1), 1)
    assert check_megatron_loader(DataLoader(data, batch_size=2, drop_last=True), 2, 2) == 2
    stream = Numbers(3)
    with pytest.raises(
        ConfigError, match=r"a Numbers, is iterable, .* batch of 2 samples .* use DataLoader\(drop_last"
    ):
        check_megatron_loader(DataLoader(stream, batch_size=2), 1)
    with pytest.raises(ConfigError, match="a Reopenable, has no batch_size"):
        check_megatron_loader(as_loader(Reopenable(), 1), 1)
    assert check_megatron_loader(DataLoader(stream, batch_size=2, drop_last=True), 2, 2) == 2
    with pytest.raises(ConfigError, match="batch_size=3 and with batch_size=2"):
        check_megatron_loader(DataLoader(data, batch_size=2, drop_last=True), 1, 3)
    with pytest.raises(ConfigError, match="batch_size=3 and with batch_size=2"):
        check_megatron_loader(DataLoader(stream, batch_size=2, drop_last=True), 1, 3)
    six = DataLoader(TensorDataset(torch.zeros(6)), batch_size=2)
    assert check_megatron_loader(six, 3) == 2
    with pytest.raises(ConfigError, match=r"6 samples.*batch_size=2 x 2 replicas.*drop_last"):
        check_megatron_loader(six, 2)
    with pytest.raises(ConfigError, match="validation DataLoader has no batch_size"):
        check_validation_loader(DataLoader(data, batch_size=None))
    check_validation_loader(DataLoader(data, batch_size=2))
    with pytest.raises(ConfigError, match=r"is no multiple of the 2 lanes .*drop_last=True"):
        check_validation_loader(DataLoader(data, batch_size=2), lanes=2)
    check_validation_loader(DataLoader(data, batch_size=2, drop_last=True), lanes=2)
    with pytest.raises(ConfigError, match=r"the validation data, a Numbers, is iterable, .* use DataLoader\(drop_last"):
        check_validation_loader(DataLoader(stream, batch_size=2))
    with pytest.raises(ConfigError, match="validation DataLoader has no batch_size"):
        check_validation_loader(as_loader(Reopenable(), 1))
    check_validation_loader(DataLoader(stream, batch_size=2, drop_last=True))


def test_optimizers() -> None:
    config = OptimizerConfig(lr=0.1)
    assert split_configuration(config) == (config, None)
    assert split_configuration({"optimizer": config, "lr_scheduler": list}) == (config, list)
    for returned in (None, {"optimizer": config, "lr_scheduler": 3}, torch.optim.SGD([torch.zeros(1)], lr=0.1)):
        with pytest.raises(ConfigError, match="configure_optimizers"):
            split_configuration(returned)


def groups(config: OptimizerConfig) -> Any:
    """An optimizer with Megatron's groups: one with a decoupled rate, if there is one."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    plain = {"lr": config.lr, "max_lr": config.lr, "min_lr": config.min_lr, "wd_mult": 1.0}
    other = {**plain, "max_lr": config.decoupled_lr or config.lr}
    return torch.optim.SGD(
        [{**each, "params": [p]} for each, p in zip((plain, other), parameters, strict=True)], lr=0.1
    )


def megatrons(optimizer: Any, **changes: Any) -> OptimizerParamScheduler:
    given: dict[str, Any] = {"init_lr": 0.0, "max_lr": 0.1, "min_lr": 0.01, "lr_warmup_steps": 80,
                             "lr_decay_steps": 400, "lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1,
                             "wd_incr_steps": 400,
                             "wd_incr_style": "constant"}  # fmt: skip
    return OptimizerParamScheduler(optimizer, **{**given, **changes})


@pytest.mark.parametrize("minimum", [None, 0.01])
@pytest.mark.parametrize("warmup", [0, 80])
def test_megatrons_scheduler_counts_samples_and_resumes(minimum: float | None, warmup: int) -> None:
    config = OptimizerConfig(lr=0.1, min_lr=minimum, decoupled_lr=0.2)
    ours, theirs = groups(config), groups(OptimizerConfig(lr=0.1, min_lr=0.01, decoupled_lr=0.2))
    made = make_scheduler(lambda optimizer: megatrons(optimizer, lr_warmup_steps=warmup), ours, config, lambda: 16)
    assert (made["interval"], config.min_lr) == ("step", 0.01)
    plain = megatrons(theirs, lr_warmup_steps=warmup)
    rates = lambda optimizer: [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]  # noqa: E731
    for _ in range(30):
        assert rates(ours) == rates(theirs)
        made["scheduler"].step()
        plain.step(16)
    assert made["scheduler"].state_dict()["num_steps"] == 480
    made["scheduler"].load_state_dict({**made["scheduler"].state_dict(), "num_steps": 160})
    again = megatrons(theirs, lr_warmup_steps=warmup)
    again.step(160)
    assert rates(ours) == rates(theirs)


def test_rates_that_nothing_would_use_are_refused() -> None:
    torchs = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)  # noqa: E731
    for field in ("min_lr", "decoupled_lr", "decoupled_min_lr"):
        config = OptimizerConfig(lr=0.1, **{field: 0.05})
        for factory, kind in ((None, "none"), (torchs, "StepLR")):
            words = rf"OptimizerConfig\({field}=0.05\) is used by .*OptimizerParamScheduler only; .* got {kind}"
            with pytest.raises(ConfigError, match=words):
                make_scheduler(factory, groups(config), config, lambda: 1)
    for field, changes in (("lr", {"max_lr": 0.3}), ("min_lr", {"min_lr": 0.02})):
        config = OptimizerConfig(lr=0.1, min_lr=0.01)
        with pytest.raises(ConfigError, match=rf"OptimizerConfig\({field}=.*expected equal values"):
            make_scheduler(
                lambda optimizer, changes=changes: megatrons(optimizer, **changes), groups(config), config, int
            )
    config = OptimizerConfig(lr=0.1)
    assert make_scheduler(None, groups(config), config, int) is None
    made = make_scheduler(lambda optimizer: {"scheduler": torchs(optimizer)}, groups(config), config, int)
    assert isinstance(made["scheduler"], torch.optim.lr_scheduler.StepLR)


def test_a_models_shape_is_reported_as_jobs_state_it() -> None:
    config = Config(num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, gated_linear_unit=True)
    model = nn.Module()
    model.vocab_size, model.position_embedding_type = 256, "rope"
    wrapped = nn.Module()
    wrapped.module = model
    shape = shape_of(config, wrapped, 16)
    profile = TransformerProfile(**shape, global_batch_size=8)
    assert (profile.num_layers, profile.kv_heads, profile.ffn, profile.gated) == (4, 2, 128, True)
    assert (profile.vocabulary_size, profile.sequence_length, profile.learned_positions) == (256, 16, False)
    assert shape_of(config, nn.Module(), 16) == {}


def test_the_shape_of_a_mixture_of_experts_is_reported_too() -> None:
    model = nn.Module()
    model.vocab_size = 256
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 16}
    moe = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "expert_model_parallel_size": 2}
    profile = TransformerProfile(**shape_of(Config(**sizes, **moe), model, 16), global_batch_size=8)
    assert (profile.num_experts, profile.experts_per_token, profile.ffn, profile.expert_parallel) == (8, 2, 64, 2)
    assert (profile.query_size, profile.kv_size, profile.shared_expert_size) == (64, 64, 0)
    assert shape_of(Config(**sizes, **moe, moe_layer_freq=2), model, 16) == {}


@pytest.mark.parametrize(
    ("name", "gigabytes", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", 85, "A100"),
        ("NVIDIA A100-SXM4-40GB", 42, None),
        ("NVIDIA H100 80GB HBM3", 85, "H100"),
        ("NVIDIA H200", 150, "H200"),
        ("NVIDIA GH200 480GB", 102, None),
    ],
)
def test_accelerators_are_recognized_by_name_and_memory(name: str, gigabytes: int, preset: str | None) -> None:
    assert preset_of(SimpleNamespace(name=name, total_memory=gigabytes * 10**9)) == preset


def test_the_reproducible_mode() -> None:
    with pytest.raises(ConfigError, match=r"reproducible=True: Megatron adds .* expected False, or unicron_fsdp"):
        UnicronMegatronStrategy(reproducible=True)
