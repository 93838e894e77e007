"""Settings that the Megatron strategy refuses, each with one error that names the value and the alternative."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.data.order import check_loader
from unicron_lightning.data.sources import Batches, Reopened, name_of
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.layout import Shape


def check_megatron_trainer(trainer: pl.Trainer) -> None:
    """Refuse trainer settings that belong to Megatron's configuration.

    Raises:
        ConfigError: naming the setting.
    """
    if trainer.gradient_clip_val:
        raise ConfigError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val!r}): under unicron_megatron the norm is that of all "
            "shards; set OptimizerConfig(clip_grad=...) instead"
        )
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise ConfigError(
            "trainer.predict: under unicron_megatron the outputs of a batch are on the last stage alone; expected "
            "trainer.test, with test_loss(output, batch) in the module"
        )
    if str(trainer.precision) != "32-true":
        raise ConfigError(
            f"Trainer(precision={trainer.precision!r}): under unicron_megatron set TransformerConfig(bf16=True, "
            "params_dtype=torch.bfloat16) and OptimizerConfig(bf16=True) instead, or fp16=True with torch.float16"
        )


def find_megatron_module(module: pl.LightningModule, virtual: int = 1) -> nn.Module:
    """Return the Megatron model that ``configure_model`` has built, or the `ModuleList` of its virtual stages.

    Args:
        module: the user's.
        virtual: virtual pipeline stages of this worker.

    Raises:
        ConfigError: there is none, or another number.
    """
    from megatron.core.transformer.module import MegatronModule

    children = list(module.children())
    names = [type(child).__qualname__ for child in children]
    stages = children
    if len(children) == 1 and isinstance(children[0], nn.ModuleList):
        stages = list(children[0])
        names = [f"ModuleList{[type(child).__qualname__ for child in stages]}"]
    whole = len(children) == 1 and all(isinstance(stage, MegatronModule) for stage in stages)
    if not whole or len(stages) != virtual:
        wanted = f"a ModuleList of {virtual} Megatron models, its virtual stages" if virtual > 1 else "a Megatron model"
        raise ConfigError(
            f"{type(module).__qualname__} has the submodules {names} after configure_model(); the unicron_megatron "
            f"strategy needs one, {wanted} such as GPTModel: this stage's part"
        )
    return children[0]


def check_same(what: str, was: object, now: object) -> None:
    """Refuse a run of a script for another object than that of its first run.

    Raises:
        ConfigError: naming it.
    """
    if now is not was:
        raise ConfigError(
            f"{what} in a further run of the script is not that of the first one; unicron_megatron supports one "
            "Trainer and one module, whose configure_model() leaves a model that it has built as it is"
        )


def check_same_optimizer(was: Any, now: Any) -> None:
    """Refuse an `OptimizerConfig` of a further fit that differs from the first one's.

    Raises:
        ConfigError: naming the fields.
    """
    names = [field.name for field in fields(was) if getattr(was, field.name) != getattr(now, field.name)]
    if names:
        raise ConfigError(
            f"OptimizerConfig({', '.join(f'{name}={getattr(now, name)!r}' for name in names)}) in a further run of the "
            f"script; expected {', '.join(repr(getattr(was, name)) for name in names)} as in the first one: Megatron "
            "builds its optimizer once"
        )


def check_megatron_config(config: Any, ddp: Any, optimizer: Any) -> None:
    """Refuse settings that cannot be recovered exactly, or are untested.

    Args:
        config: Megatron's `TransformerConfig`.
        ddp: its `DistributedDataParallelConfig`.
        optimizer: its `OptimizerConfig`.

    Raises:
        ConfigError: naming the field.
    """
    wanted: list[tuple[Any, str, Any]] = [
        (config, "mtp_num_layers", None),
        (config, "fp8", None),
        (config, "fp4", None),
        (config, "enable_cuda_graph", False),
        (config, "calculate_per_token_loss", False),
        (ddp, "average_in_collective", False),
        (ddp, "use_megatron_fsdp", False),
        (ddp, "overlap_param_gather", False),
        (ddp, "num_distributed_optimizer_instances", 1),
        (config, "fp16", optimizer.fp16),
        (optimizer, "fp16", getattr(config, "fp16", False)),
        (optimizer, "use_distributed_optimizer", ddp.use_distributed_optimizer),
        (optimizer, "overlap_param_gather_with_optimizer_step", False),
        (optimizer, "log_num_zeros_in_grad", False),
        (optimizer, "use_precision_aware_optimizer", False),
        (optimizer, "optimizer_cpu_offload", False),
    ]
    if ddp.use_distributed_optimizer and not optimizer.use_distributed_optimizer:
        raise ConfigError(
            "DistributedDataParallelConfig(use_distributed_optimizer=True) with "
            "OptimizerConfig(use_distributed_optimizer=False): expected both or neither"
        )
    _check_loss_scale(optimizer)
    for owner, field, value in wanted:
        found = getattr(owner, field, value)
        if found != value and not (found is None or found is False):
            raise ConfigError(
                f"{type(owner).__qualname__}({field}={found!r}) is not supported by the unicron_megatron strategy; "
                f"expected {value!r}"
            )


def _check_loss_scale(optimizer: Any) -> None:
    """Refuse a loss scale where it is ignored."""
    scale = optimizer.loss_scale
    if scale is not None and not (optimizer.fp16 or optimizer.bf16):
        raise ConfigError(f"OptimizerConfig(loss_scale={scale!r}) is ignored in float32; expected None, or fp16=True")


def check_megatron_layout(config: Any, shape: Shape) -> None:
    """Refuse a model built for another layout than the task's present one.

    Raises:
        ConfigError: naming the field, and the source of the right size.
    """
    for field, size in (
        ("tensor_model_parallel_size", shape.tensor),
        ("pipeline_model_parallel_size", shape.pipeline),
        ("virtual_pipeline_model_parallel_size", shape.virtual if shape.virtual > 1 else None),
        ("context_parallel_size", shape.context),
        ("expert_model_parallel_size", shape.expert),
    ):
        found = getattr(config, field, 1)
        if found != size:
            raise ConfigError(
                f"{type(config).__qualname__}({field}={found!r}), but the task has {size} now; expected "
                f"self.trainer.strategy.{field} in configure_model()"
            )


def check_virtual_stages(config: Any, shape: Shape, device: torch.device) -> None:
    """Refuse settings beside virtual pipeline stages that are untested.

    Args:
        config: Megatron's `TransformerConfig`.
        shape: of the present world.
        device: of the model.

    Raises:
        ConfigError: naming the setting.
    """
    if shape.virtual == 1:
        return
    two = shape.pipeline == 2
    for name, found, expected, reason in (
        ("overlap_p2p_comm", config.overlap_p2p_comm, True if two else config.overlap_p2p_comm, _CONFUSED),
        ("batch_p2p_comm", config.batch_p2p_comm, not config.overlap_p2p_comm, "it contradicts overlap_p2p_comm"),
        ("accelerator", device.type, "cpu" if two else device.type, _WORLDWIDE),
    ):
        _refuse_beside(f"virtual_pipeline_model_parallel_size={shape.virtual}", name, found, (expected,), reason)


def check_context(config: Any, shape: Shape) -> None:
    """Refuse a setting beside context parallelism that is untested.

    Args:
        config: Megatron's `TransformerConfig`.
        shape: of the present world.

    Raises:
        ConfigError: naming the setting.
    """
    name = "hierarchical_context_parallel_sizes"
    if shape.context > 1:
        _refuse_beside(f"context_parallel_size={shape.context}", name, getattr(config, name), (None,), "it is untested")


def _refuse_beside(setting: str, name: str, found: Any, expected: tuple[Any, ...], reason: str) -> None:
    if found not in expected:
        raise ConfigError(f"{name}={found!r} with {setting}: {reason}; expected {' or '.join(map(repr, expected))}")


def check_megatron_loader(loader: DataLoader[Any], replicas: int, size: int | None = None) -> int:
    """Refuse micro-batches of different sizes: pipeline stages exchange tensors of one shape.

    Args:
        loader: of training data; one of them, if there are several.
        replicas: of the declared world, among which a round of samples is divided.
        size: of the other loaders' micro-batches; None: this is the first one.

    Returns:
        The size of its micro-batches.

    Raises:
        ConfigError: naming the alternative.
    """
    check_loader(loader)
    assert isinstance(loader, DataLoader)
    own: int | None = loader.batch_size
    if own is None:
        no_loader = isinstance(loader.dataset, Batches | Reopened)
        given = f"data, a {name_of(loader)}," if no_loader else "DataLoader"
        raise ConfigError(
            f"the training {given} has no batch_size; the unicron_megatron strategy takes it as Megatron's "
            "micro_batch_size: use DataLoader(batch_size=...)"
        )
    if size not in (None, own):
        raise ConfigError(
            f"the training data has loaders with batch_size={size} and with batch_size={own}, but Megatron has one "
            "micro_batch_size: give all of them the same batch_size"
        )
    if isinstance(loader.dataset, IterableDataset):
        _check_stream(loader, "training")
        return own
    samples = len(loader.sampler)  # type: ignore[arg-type]
    if not loader.drop_last and samples % (own * replicas):
        raise ConfigError(
            f"the training data ({samples} samples) is no multiple of batch_size={own} x {replicas} replicas, so the "
            "last micro-batches would be smaller, which pipeline stages cannot exchange: use DataLoader(drop_last=True)"
        )
    return own


def check_validation_loader(loader: DataLoader[Any], *, lanes: int = 1) -> None:
    """Refuse batches of unknown size; the last one of a pass may be smaller, but not that of a stream.

    Args:
        loader: of validation data.
        lanes: of a replica, which compute a batch each together; a round's rest is divided among all lanes.

    Raises:
        ConfigError: naming the alternative.
    """
    check_loader(loader)
    assert isinstance(loader, DataLoader)
    if loader.batch_sampler is None:
        raise ConfigError(
            "the validation DataLoader has no batch_size; pipeline stages have to know the size of what they exchange: "
            "use DataLoader(batch_size=...)"
        )
    if isinstance(loader.dataset, IterableDataset):
        _check_stream(loader, "validation")
        return
    samples = len(loader.sampler)  # type: ignore[arg-type]
    if samples % lanes and not loader.drop_last:
        raise ConfigError(
            f"the validation data ({samples} samples) is no multiple of the {lanes} lanes of a replica, so one of the "
            "last batches would be smaller than those with which it shares experts: use DataLoader(drop_last=True)"
        )


def _check_stream(loader: DataLoader[Any], stage: str) -> None:
    if not loader.drop_last:
        raise ConfigError(
            f"the {stage} data, a {name_of(loader)}, is iterable, so that the last batch of {loader.batch_size} "
            "samples may be smaller, which pipeline stages cannot exchange: use DataLoader(drop_last=True)"
        )


def check_experts(config: Any, shape: Shape) -> None:
    """Refuse settings of models with experts that cannot be recovered exactly, or are untested.

    Args:
        config: Megatron's `TransformerConfig`.
        shape: of the present world.

    Raises:
        ConfigError: naming the setting.
    """
    if getattr(config, "num_moe_experts", None) is None:
        return
    for name, found, expected, reason in (
        ("expert_tensor_parallel_size", config.expert_tensor_parallel_size, (shape.tensor,), _SLICED),
        ("moe_token_dispatcher_type", config.moe_token_dispatcher_type, ("allgather", "alltoall"), _UNSEEN),
        ("moe_router_force_load_balancing", config.moe_router_force_load_balancing, (False,), "it draws by rank"),
        ("moe_shared_expert_overlap", config.moe_shared_expert_overlap, (False,), "it is untested"),
        ("moe_enable_routing_replay", config.moe_enable_routing_replay, (False,), "it is untested"),
    ):
        _refuse_beside(f"num_moe_experts={config.num_moe_experts}", name, found, expected, reason)
    if shape.tensor > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"tensor_model_parallel_size={shape.tensor} with num_moe_experts={config.num_moe_experts}: Megatron routes "
            "each worker's part of the sequence; expected TransformerConfig(sequence_parallel=True)"
        )
    balancing = config.moe_router_load_balancing_type
    if "global_aux_loss" in ([balancing] if isinstance(balancing, str) else balancing):
        raise ConfigError(
            f"moe_router_load_balancing_type={balancing!r}: a micro-batch's loss would depend on those of other "
            "replicas; expected 'aux_loss', 'seq_aux_loss', 'sinkhorn' or 'none'"
        )


def check_witness(every: int, config: Any) -> None:
    """Refuse models whose gradients no other replica can repeat.

    Args:
        every: steps between two with a witness; 0: there are none.
        config: Megatron's `TransformerConfig`.

    Raises:
        ConfigError: naming the setting.
    """
    if every:
        for name, reason in (
            ("num_moe_experts", "repeating a row would count its tokens for the experts' balance again"),
            ("virtual_pipeline_model_parallel_size", "the interleaved schedule cannot run a single row"),
        ):
            _refuse_beside(f"witness_every={every}", name, getattr(config, name, None), (None,), reason)


_SLICED = "TP slices the experts, too"
_UNSEEN = "its messages go beside torch's process groups, where a failure would not end them"

_CONFUSED = "messages in both directions between two stages would be confused in one batch"
_WORLDWIDE = "with two stages some messages go through NCCL's group of all replicas, which any failure ends"
