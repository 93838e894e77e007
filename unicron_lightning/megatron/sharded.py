"""One rank's shard of megatron-core's distributed optimizer: reading, writing, and a new layout for another group size.

Written for megatron-core 0.16; only this module depends on the internals of its `DistributedOptimizer` and
`DistributedDataParallel`. Both objects are kept when the layout changes (their constructors run again on them), so that
references to them and to their bound methods stay valid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import _get_param_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.mirror import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from megatron.core.optimizer import OptimizerConfig
    from torch import nn

FIELDS: Final = ("param", "exp_avg", "exp_avg_sq")
"""Values kept for each element, float32: its main value and Adam's moments."""


HOLDERS_OF_BUFFERS: Final = (
    "buffers",
    "per_model_buffers",
    "per_model_bucket_groups",
    "opt_group_ranges",
    "shard_float16_groups",
    "shard_fp32_groups",
    "shard_fp32_from_float16_groups",
)
"""Attributes of a DistributedOptimizer that would keep the old layout's memory alive."""


def parameter_groups(chunks: Sequence[Any], config: Any) -> dict[int, int]:
    """Place of each parameter of a stage in the optimizer's ``param_groups``, whichever ranks hold pieces of it.

    Call it in the groups in which the optimizer is built: megatron-core aligns the places over the world.

    Args:
        chunks: as for `ShardedOptimizer`.
        config: megatron-core's `OptimizerConfig`.
    """
    numbers = {p: number for number, p in enumerate(p for chunk in chunks for p in chunk.module.parameters())}
    groups = enumerate(_get_param_groups(list(chunks), config, None))
    return {numbers[parameter]: place for place, group in groups for parameter in group["params"]}


def parts_of(optimizer: Any) -> list[Any]:
    """List the optimizers in megatron-core's: those of a chain, or itself alone."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def init_momentum(optimizer: torch.optim.Optimizer, _: OptimizerConfig | None = None) -> None:
    """Initialize the state of a fresh SGD, for which megatron-core has no such function."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def initialize_state(part: Any) -> None:
    """Initialize a fresh optimizer's state, which megatron-core needs for loading.

    Megatron-core itself would create it by an optimizer step, which decays the weights.

    Args:
        part: one of `parts_of`; one without parameters on this rank is left as it is.
    """
    if part.optimizer is None:
        return
    part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.Adam):  # Transformer Engine's Adam counts steps in its groups
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))


class ShardedOptimizer:
    """A rank's model chunks with their distributed optimizer.

    Args:
        chunks: the `DistributedDataParallel` modules passed to `get_megatron_optimizer`.
        optimizer: its result.
        groups: `parameter_groups`; without it, only parameters with a piece on this rank are known.

    Raises:
        ConfigError: this kind of optimizer is not supported.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, groups: Mapping[int, int] | None = None) -> None:
        self._chunks = tuple(chunks)
        self._optimizer = _only(optimizer)
        _check_supported(self._chunks, self._optimizer)
        self._parameters: list[nn.Parameter] = [p for chunk in self._chunks for p in chunk.module.parameters()]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._known_groups = dict(groups or {})
        initialize_state(self._optimizer)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._parameters[0].device

    @property
    def whole(self) -> tuple[Piece, ...]:
        """All trained elements of the stage."""
        return tuple(Piece(n, 0, p.numel()) for n, p in enumerate(self._parameters) if p.requires_grad)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """This rank's shard in the present layout."""
        return tuple(
            Piece(self._numbers[parameter], stretch.start, stretch.end) for parameter, stretch in self._stretches()
        )

    @property
    def groups(self) -> dict[int, int]:
        """Place of each parameter in the optimizer's ``param_groups``, as far as this rank knows."""
        found = self._optimizer.model_param_group_index_map
        return {**self._known_groups, **{self._numbers[parameter]: index for parameter, (index, _) in found.items()}}

    @property
    def steps(self) -> float:
        """Steps that Adam has counted, for its bias correction."""
        return _steps(self._optimizer.optimizer)

    def name(self, parameter: int) -> str:
        """A parameter's name, for messages."""
        names: list[str] = [name for chunk in self._chunks for name, _ in chunk.module.named_parameters()]
        return names[parameter]

    @torch.no_grad()
    def read(self, target: Tensor) -> None:
        """Copy the shard.

        Args:
            target: float32, [3, elements], in the order of `FIELDS` and `pieces`. If it is pinned host memory, the copy
                is asynchronous on the current stream.
        """
        position = 0
        for parameter, stretch in self._stretches():
            tensors = self._optimizer._get_main_param_and_optimizer_states(parameter)
            for row, field in enumerate(FIELDS):
                target[row, position : position + stretch.size].copy_(tensors[field].view(-1), non_blocking=True)
            position += stretch.size

    @torch.no_grad()
    def write(self, source: Tensor, steps: float) -> None:
        """Set the shard to a copy made by `read`, and this rank's part of the parameters to it."""
        position = 0
        for parameter, stretch in self._stretches():
            tensors = self._optimizer._get_main_param_and_optimizer_states(parameter)
            for row, field in enumerate(FIELDS):
                tensors[field].view(-1).copy_(source[row, position : position + stretch.size])
            position += stretch.size
        _set_steps(self._optimizer.optimizer, steps)
        self._optimizer._copy_main_params_to_model_params()

    def gather_parameters(self) -> None:
        """Send every rank's part of the parameters to all. A collective of the data-parallel group."""
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)

    def lay_out(self, groups: Mapping[int, int]) -> None:
        """Make new buffers and shards for the present groups of megatron-core's ``parallel_state``.

        Gradients (``main_grad``) and the factor that scales them are kept. Parameters keep their values. The
        optimizer's state is lost and must be restored by `write`. Old and new buffers never coexist: meanwhile
        gradients are in host memory, and parameters in storage of their own.

        Args:
            groups: `groups` of all ranks together.
        """
        factor = self._chunks[0].buffers[0].buckets[0].gradient_scaling_factor
        gradients: dict[Any, Tensor] = {p: p.main_grad.to("cpu", copy=True) for p in self._trained()}
        self._optimizer.optimizer.state.clear()
        for group in self._optimizer.optimizer.param_groups:
            group["params"] = []  # in fp32 these are views, whose graphs would keep the old layout's hooks alive
        for name in HOLDERS_OF_BUFFERS:
            getattr(self._optimizer, name).clear()
        for chunk in self._chunks:
            _take_apart(chunk)
        for index, chunk in enumerate(self._chunks):
            training = chunk.training
            type(chunk).__init__(chunk, chunk.config, chunk.ddp_config, chunk.module, disable_bucketing=index > 0)
            chunk.train(training)
            for bucket in _buckets(chunk):
                bucket.gradient_scaling_factor = factor
        self._lay_out_optimizer(groups)
        for parameter, gradient in gradients.items():
            parameter.main_grad.copy_(gradient)

    def _lay_out_optimizer(self, groups: Mapping[int, int]) -> None:
        optimizer, adam = self._optimizer, self._optimizer.optimizer
        for index, group in enumerate(adam.param_groups):
            group["params"] = [self._parameters[number] for number in sorted(groups) if groups[number] == index]
        with_gloo = optimizer.data_parallel_group_gloo is not None
        found = ProcessGroupCollection.setup_process_groups_for_optimizer(None, list(self._chunks), with_gloo)
        type(optimizer).__init__(
            optimizer,
            adam,
            optimizer.config,
            optimizer.grad_scaler,
            optimizer.init_state_fn,
            model_chunks=list(self._chunks),
            per_model_buffers={index: chunk.buffers for index, chunk in enumerate(self._chunks)},
            data_parallel_group=found["intra_dp_cp_group"],
            data_parallel_group_gloo=found["intra_dp_cp_group_gloo"],
            data_parallel_group_idx=optimizer.data_parallel_group_idx,
            distributed_optimizer_instance_id=optimizer.distributed_optimizer_instance_id,
        )
        optimizer.grad_stats_parallel_group = found["intra_dist_opt_group"]
        optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
        initialize_state(optimizer)

    def _trained(self) -> Iterator[Any]:
        """Parameters that have gradients."""
        return (parameter for parameter in self._parameters if parameter.requires_grad)

    def _stretches(self) -> Iterator[tuple[nn.Parameter, Any]]:
        """This rank's parameters with their ranges, in the order of the layout."""
        for parameter in self._optimizer.model_param_gbuf_map:
            yield parameter, self._optimizer._get_model_param_range_map(parameter)["param"]


def _only(optimizer: Any) -> Any:
    """The single distributed optimizer."""
    parts = parts_of(optimizer)
    if len(parts) != 1:
        raise ConfigError(
            f"the optimizer is a chain of {len(parts)}, as with expert parallelism and "
            "overlap_param_gather_with_optimizer_step; expected one DistributedOptimizer for all parameters"
        )
    return parts[0]


def _check_supported(chunks: Sequence[Any], optimizer: Any) -> None:
    config = optimizer.config
    refused = {
        "use_distributed_optimizer=False": not config.use_distributed_optimizer,
        "use_precision_aware_optimizer=True": config.use_precision_aware_optimizer,
        "optimizer_cpu_offload=True": config.optimizer_cpu_offload,
        "fp16=True": config.fp16,
        "use_megatron_fsdp=True": any(chunk.ddp_config.use_megatron_fsdp for chunk in chunks),
        "num_distributed_optimizer_instances>1": any(
            chunk.ddp_config.num_distributed_optimizer_instances > 1 for chunk in chunks
        ),
        "expert parallelism": any(chunk.expert_parallel_buffers for chunk in chunks),
        f"optimizer={config.optimizer!r}": config.optimizer != "adam",
    }
    if found := [name for name, is_so in refused.items() if is_so]:
        raise ConfigError(f"{', '.join(found)}: optimizer shards can be mirrored and moved only without; expected Adam "
                          "with use_distributed_optimizer=True in fp32 or bf16")  # fmt: skip


def _steps(adam: Any) -> float:
    """The step count, which all parameters share."""
    for group in adam.param_groups:
        if "step" in group:
            return float(group["step"])
    return next((float(state["step"]) for state in adam.state.values() if "step" in state), 0.0)


def _set_steps(adam: Any, steps: float) -> None:
    for group in adam.param_groups:
        if "step" in group:
            group["step"] = int(steps)
    for state in adam.state.values():
        if "step" in state:
            state["step"].fill_(steps)


def _take_apart(chunk: Any) -> None:
    """Free a chunk's buffers and hooks, and give its parameters storage of their own."""
    if chunk.use_forward_hook:
        chunk.disable_forward_pre_hook(param_sync=False)
    # The graph of an interrupted step may keep these nodes alive: the next layout's hooks would stand beside theirs.
    for node in chunk.grad_accs:
        node.register_hook(lambda *_: None).hooks_dict_ref().clear()
    chunk.param_to_bucket_group.clear()
    chunk.grad_accs.clear()
    for part in (*chunk.buffers, *_buckets(chunk)):
        part.grad_data = part.param_data = None
    for group in chunk.bucket_groups:
        group.cached_grad_buffer_shard_list.clear()
        group.cached_param_buffer_shard_list.clear()
    for parameter in chunk.module.parameters():
        if parameter.requires_grad:
            del parameter.main_grad
            parameter.data = parameter.data.clone()
    chunk.buffers, chunk.bucket_groups = [], []


def _buckets(chunk: Any) -> list[Any]:
    return [bucket for group in chunk.bucket_groups for bucket in group.buckets]
