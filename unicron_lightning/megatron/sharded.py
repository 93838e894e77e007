"""One rank's shard of megatron-core's distributed optimizer (ZeRO-1): its layout, its copies on peers, its restoration.

Written for megatron-core 0.16; only this module depends on the internals of its `DistributedOptimizer` and
`DistributedDataParallel`. Both objects are kept when the layout changes (their constructors run again on them), so that
references to them and to their bound methods stay valid.

A step is committed only after every worker has done its update and has the copies (`Mirror.keep`). At any
moment the last committed version is therefore complete in host memory, own and mirrored, and no result of the next one
has been published. After a failure at any moment, the members of the new epoch return to, or stay at, the newest
version that one of them has committed; gradients of completed calls are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import _get_param_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from unicron_lightning import wire
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.gradients import MainGradients
from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.fabric import run_released, start_anew
from unicron_lightning.replica.mirror import (
    ROWS,
    Holding,
    Mirror,
    Piece,
    Redundancy,
    Stored,
)
from unicron_lightning.worker.communication.communicator import gather_rows
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.state_parts import RackAndNode

if TYPE_CHECKING:
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


def parameter_groups(ddps: Sequence[Any], config: Any) -> dict[int, int]:
    """Place of each parameter of a rank's model in its optimizer's ``param_groups``, whichever ranks hold pieces of it.

    Call it in the groups in which the optimizer is built: megatron-core aligns the places over the world.

    Args:
        ddps: as for `ShardedOptimizer`.
        config: megatron-core's `OptimizerConfig`.
    """
    numbers, found = _numbers(ddps), {}
    groups = _get_param_groups([*ddps], config, None)
    for of_experts in (False, True):  # whose optimizer has groups of its own
        own = [group for group in groups if group["is_expert_parallel"] is of_experts]
        found.update({numbers[parameter]: place for place, group in enumerate(own) for parameter in group["params"]})
    return found


def columns() -> int:
    """Columns of a replica in Megatron's present groups."""
    context, expert = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    return wire.Layout(tensor=1, pipeline=1, context=context, expert=expert).columns


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
    """A rank's model with its distributed optimizers: that of the parameters which its replica's columns have in
    common, divided over columns and replicas, and that of its own experts, divided over those that have the same.

    Parameters are numbered as in the model; to those of an expert the number of parameters is added for each earlier
    lane, so that each element of all lanes has a name, and the ranks of all lanes mirror and restore them together.

    Args:
        ddps: the `DistributedDataParallel` modules passed to `get_megatron_optimizer`, one for each part of the model.
        optimizer: its result.
        groups: `parameter_groups`; without it, only parameters with a piece on this rank are known.

    Raises:
        ConfigError: this kind of optimizer is not supported.
    """

    def __init__(self, ddps: Sequence[Any], optimizer: Any, groups: Mapping[int, int] | None = None) -> None:
        self._ddps = ddps
        self._optimizers: list[Any] = parts_of(optimizer)
        _check_supported(ddps[0], self._optimizers)
        self._parameters = parameters_of(ddps)
        self._numbers = _numbers(ddps)
        self._known_groups = dict(groups or {})
        self._lanes = parallel_state.get_expert_model_parallel_world_size()
        self.columns = columns()
        for each in self._optimizers:
            initialize_state(each)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._parameters[0].device

    @property
    def whole(self) -> tuple[Piece, ...]:
        """All trained elements of the stage, with the experts of all lanes."""
        count = len(self._parameters)
        return tuple(
            Piece(number + count * lane, 0, parameter.numel())
            for number, parameter in enumerate(self._parameters)
            for lane in range(self._lanes if _is_experts(parameter) else 1)
            if parameter.requires_grad
        )

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """This rank's shard in the present layout."""
        return tuple(
            Piece(self._numbers[parameter], stretch.start, stretch.end) for _, parameter, stretch in self._stretches()
        )

    @property
    def groups(self) -> dict[int, int]:
        """Place of each parameter in its optimizer's ``param_groups``, as far as this rank knows."""
        found = [item for each in self._optimizers for item in each.model_param_group_index_map.items()]
        return {**self._known_groups, **{self._numbers[parameter]: index for parameter, (index, _) in found}}

    @property
    def counts(self) -> tuple[float, ...]:
        """Steps that Adam has counted, for its bias correction, and the state of the loss scale, if there is one."""
        scales = self._optimizers[0].grad_scaler.state_dict() if self._optimizers[0].grad_scaler else {}
        return max(_steps(each.optimizer) for each in self._optimizers), *map(float, scales.values())

    def name(self, parameter: int) -> str:
        """A parameter's name, for messages."""
        names = [name for ddp in self._ddps for name, _ in ddp.module.named_parameters()]
        return str(names[parameter % len(names)])

    @torch.no_grad()
    def read(self, target: Tensor) -> None:
        """Copy the shard.

        Args:
            target: float32, [3, elements], in the order of `FIELDS` and `pieces`. If it is pinned host memory, the copy
                is asynchronous on the current stream.
        """
        position = 0
        for optimizer, parameter, stretch in self._stretches():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            for row, field in enumerate(FIELDS):
                target[row, position : position + stretch.size].copy_(tensors[field].view(-1), non_blocking=True)
            position += stretch.size

    @torch.no_grad()
    def write(self, source: Tensor, counts: Sequence[float]) -> None:
        """Set the shard to a copy made by `read`, this rank's part of the parameters to it, and `counts`."""
        position = 0
        for optimizer, parameter, stretch in self._stretches():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            for row, field in enumerate(FIELDS):
                tensors[field].view(-1).copy_(source[row, position : position + stretch.size])
            position += stretch.size
        for each in self._optimizers:
            _set_steps(each.optimizer, counts[0])
            _set_scale(each.grad_scaler, counts[1:])
            each._copy_main_params_to_model_params()

    def gather_parameters(self) -> None:
        """Send every rank's part of the parameters to all that have them. A collective of the data-parallel groups."""
        for ddp in self._ddps:
            ddp.start_param_sync(force_sync=True)

    def lay_out(self, groups: Mapping[int, int]) -> None:
        """Make new buffers and shards for the present groups of megatron-core's ``parallel_state``.

        Gradients (``main_grad``) and the factor that scales them are kept. Parameters keep their values. The
        optimizer's state is lost and must be restored by `write`. Old and new buffers never coexist: meanwhile
        gradients are in host memory, and parameters in storage of their own.

        Args:
            groups: `groups` of all ranks together.
        """
        factor = self._ddps[0].buffers[0].buckets[0].gradient_scaling_factor
        gradients: dict[Any, Tensor] = {p: p.main_grad.to("cpu", copy=True) for p in self._trained()}
        for optimizer in self._optimizers:
            optimizer.optimizer.state.clear()
            for group in optimizer.optimizer.param_groups:
                group["params"] = []  # in fp32 these are views, whose graphs would keep the old layout's hooks alive
            for name in HOLDERS_OF_BUFFERS:
                getattr(optimizer, name).clear()
        for number, ddp in enumerate(self._ddps):
            _take_apart(ddp)
            training = ddp.training
            type(ddp).__init__(ddp, ddp.config, ddp.ddp_config, ddp.module, disable_bucketing=number > 0)
            ddp.training = training  # not of the model: in an evaluation it has a mode of its own
            for bucket in _buckets(ddp):
                bucket.gradient_scaling_factor = factor
        for optimizer, of_experts in zip(self._optimizers, (False, True), strict=False):
            self._lay_out_optimizer(optimizer, groups, of_experts=of_experts)
        for parameter, gradient in gradients.items():
            parameter.main_grad.copy_(gradient)

    def _lay_out_optimizer(self, optimizer: Any, groups: Mapping[int, int], *, of_experts: bool) -> None:
        adam = optimizer.optimizer
        own = [(p, groups.get(self._numbers[p])) for p in self._parameters if _is_experts(p) is of_experts]
        for index, group in enumerate(adam.param_groups):
            group["params"] = [parameter for parameter, place in own if place == index]
        with_gloo = optimizer.data_parallel_group_gloo is not None
        found = ProcessGroupCollection.setup_process_groups_for_optimizer(None, [*self._ddps], with_gloo)
        over = "intra_expt_dp_group" if of_experts else "intra_dp_cp_group"
        kind = "expert_parallel_buffers" if of_experts else "buffers"
        type(optimizer).__init__(
            optimizer,
            adam,
            optimizer.config,
            optimizer.grad_scaler,
            optimizer.init_state_fn,
            model_chunks=[*self._ddps],
            per_model_buffers={number: getattr(ddp, kind) for number, ddp in enumerate(self._ddps)},
            data_parallel_group=found[over],
            data_parallel_group_gloo=found[f"{over}_gloo"],
            data_parallel_group_idx=optimizer.data_parallel_group_idx,
            distributed_optimizer_instance_id=optimizer.distributed_optimizer_instance_id,
        )
        optimizer.grad_stats_parallel_group = found["intra_dist_opt_group"]
        optimizer.tp_group = parallel_state.get_tensor_model_parallel_group()
        initialize_state(optimizer)

    def _trained(self) -> Iterator[Any]:
        """Parameters that have gradients."""
        return (parameter for parameter in self._parameters if parameter.requires_grad)

    def _stretches(self) -> Iterator[tuple[Any, nn.Parameter, Any]]:
        """This rank's parameters with their optimizers and ranges, in the order of the layout."""
        for optimizer in self._optimizers:
            for parameter in optimizer.model_param_gbuf_map:
                yield optimizer, parameter, optimizer._get_model_param_range_map(parameter)["param"]


def _is_experts(parameter: nn.Parameter) -> bool:
    """Whether a parameter is that of experts which only this lane has."""
    return not getattr(parameter, "allreduce", True)


def parameters_of(ddps: Sequence[Any]) -> list[nn.Parameter]:
    """Return a rank's parameters in the order of their numbers."""
    return [parameter for ddp in ddps for parameter in ddp.module.parameters()]


def _numbers(ddps: Sequence[Any]) -> dict[nn.Parameter, int]:
    """Number a rank's parameters, see `ShardedOptimizer`."""
    parameters = parameters_of(ddps)
    first = len(parameters) * parallel_state.get_expert_model_parallel_rank()
    return {each: number + (first if _is_experts(each) else 0) for number, each in enumerate(parameters)}


def _check_supported(ddp: Any, optimizers: Sequence[Any]) -> None:
    config, kinds = optimizers[0].config, [False, True][: len(optimizers)]
    divided = [{group["is_expert_parallel"] for group in each.param_groups} for each in optimizers]
    refused = {
        "a chain of optimizers for one kind of parameters": divided != [{kind} for kind in kinds],
        "use_distributed_optimizer=False": not config.use_distributed_optimizer,
        "use_precision_aware_optimizer=True": config.use_precision_aware_optimizer,
        "optimizer_cpu_offload=True": config.optimizer_cpu_offload,
        "use_megatron_fsdp=True": ddp.ddp_config.use_megatron_fsdp,
        "num_distributed_optimizer_instances>1": ddp.ddp_config.num_distributed_optimizer_instances > 1,
        f"optimizer={config.optimizer!r}": config.optimizer != "adam",
    }
    if found := [name for name, is_so in refused.items() if is_so]:
        raise ConfigError(f"{', '.join(found)}: optimizer shards can be mirrored and moved only without; expected Adam "
                          "with use_distributed_optimizer=True")  # fmt: skip


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


def _set_scale(scaler: Any, values: Sequence[float]) -> None:
    """Set the state of a loss scale; a constant one has none."""
    if values:
        old, (scale, *trackers) = scaler.state_dict(), values
        new = [torch.full_like(old["scale"], scale), *map(int, trackers)]
        scaler.load_state_dict(dict(zip(old, new, strict=True)))


def _take_apart(ddp: Any) -> None:
    """Free a module's buffers and hooks, and give its parameters storage of their own."""
    if ddp.use_forward_hook:
        ddp.disable_forward_pre_hook(param_sync=False)
    # The graph of an interrupted step may keep these nodes alive: the next layout's hooks would stand beside theirs.
    for node in ddp.grad_accs:
        node.register_hook(lambda *_: None).hooks_dict_ref().clear()
    ddp.param_to_bucket_group.clear()
    ddp.grad_accs.clear()
    for part in (*ddp.buffers, *ddp.expert_parallel_buffers, *_buckets(ddp)):
        part.grad_data = part.param_data = None
    for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
        group.cached_grad_buffer_shard_list.clear()
        group.cached_param_buffer_shard_list.clear()
    for parameter in ddp.module.parameters():
        if parameter.requires_grad:
            del parameter.main_grad
            parameter.data = parameter.data.clone()
    ddp.buffers, ddp.bucket_groups, ddp.expert_parallel_buffers, ddp.expert_parallel_bucket_groups = [], [], [], []


def _buckets(ddp: Any) -> list[Any]:
    groups = (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
    return [bucket for group in groups for bucket in group.buckets]


class ShardKeeper:
    """A worker's optimizer shard, its copies, and those that it keeps for others.

    Args:
        optimizer: the shard, in the layout in which it was built.
        gradients: of the same buffers.
        redundancy: number of copies.

    Attributes:
        mirror: has the copies of this worker's shard and of others', by data-parallel ranks.
        founded: set by the strategy once all workers have the task's initial state.
        saved: steps in the newest checkpoint, set by the strategy after writing one; None without a checkpoint.
        ahead: number of a version above that of its steps; a further fit counts versions on.
    """

    def __init__(self, optimizer: ShardedOptimizer, gradients: MainGradients, redundancy: Redundancy) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._redundancy = redundancy
        self.mirror = Mirror(optimizer, redundancy)
        self.founded = False
        self.saved: int | None = None
        self.ahead = 0

    def found(self, engine: Engine, channels: Channels) -> None:
        """Distribute the shards over the present replicas at the task's start. A collective of the workers that
        exchange copies (`Channels.exchange`).
        """
        assert channels.exchange is not None
        self.mirror.place = _place(engine)
        self.mirror.forget(-1)
        try:
            self._optimizer.lay_out(self._optimizer.groups)
        finally:
            self._gradients.rebind()
        self.mirror.join(channels.exchange)

    def keep(self, version: int) -> None:
        """Return when the present shard is safe. A collective of the workers that exchange copies.

        Raises:
            CommunicatorAborted: one of them failed.
        """
        self.mirror.keep(version)

    def replace(self, version: int, step: int) -> None:
        """`keep` a state from a checkpoint of a step, which may have the number of a kept version."""
        self.mirror.forget(version - 1)
        self.keep(version)
        self.saved = step

    def present(self) -> Stored:
        """Return a copy of this worker's shard as it is now, also after the end of the run."""
        pieces = self._optimizer.pieces
        data = torch.empty(ROWS, sum(map(len, pieces)))
        self._optimizer.read(data)
        return Stored(holding=Holding(version=0, pieces=pieces), data=data, layout=0)

    def plain_state(self) -> dict[str, Any]:
        """Return this worker's shard as plain data: its pieces, values as of `ShardedOptimizer.read`, and counts."""
        own = self.present()
        pieces = [[each.parameter, each.start, each.stop] for each in own.holding.pieces]
        ring = self.mirror.ring
        place = [ring.rank, len(ring.layouts)]
        return {"pieces": pieces, "data": own.data, "counts": self._optimizer.counts, "place": place}

    def load_plain(self, states: Sequence[Mapping[str, Any]], version: int) -> None:
        """Load the parts of all workers that have had this shard, however many there are now. A collective of those
        and, with experts, of the other lanes' workers.

        Raises:
            CommunicatorAborted: one of them failed.
        """
        stored = [
            Stored(
                holding=Holding(version=version, pieces=tuple(Piece(*each) for each in state["pieces"])),
                data=state["data"],
                layout=0,
            )
            for state in states
        ]
        run_released(lambda: self.mirror.load(stored, max(tuple(state["counts"]) for state in states)))
        self.mirror.forget(version - 1)
        self.keep(version)

    def complete(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether there are the parts of all workers that have had this shard."""
        whole: int = states[0]["place"][1]
        found: int = len({state["place"][0] for state in states}) * self._optimizer.columns
        return found == whole

    def enter(self, engine: Engine, channels: Channels | None, version: int) -> None:
        """Set state, parameters and layout for an epoch's replicas. All members of the epoch call this.

        Args:
            engine: has the epoch's communicator.
            channels: None for a spare.
            version: highest number of optimizer steps that any member has committed.

        Raises:
            CommunicatorAborted: a member failed.
        """
        mirror = self.mirror
        mirror.place = _place(engine)
        mirror.pause()
        mirror.forget(version)  # an uncommitted attempt, which will be repeated
        lacks = False
        if channels is not None:
            assert channels.exchange is not None
            self._gradients.recover()
            lacks = version not in mirror.survey(channels.exchange)
        lacking, founded = gather_rows(engine.communicator, [float(lacks), float(self.founded)]).sum(0).tolist()
        if lacking:
            if founded:
                start_anew(self._loss(version, mirror.lost() if lacks else ""))
            return  # the initial state is created again
        if channels is None:
            return
        try:
            run_released(lambda: mirror.restore(version))
        finally:
            self._gradients.rebind()
        self.keep(version)

    def close(self) -> None:
        """Drop all copies."""
        self.mirror.close()

    def _loss(self, version: int, found: str) -> str:
        """Description of the loss for a log line."""
        place = parallel_state.get_data_parallel_rank() if parallel_state.is_initialized() else None
        why = found or "reported by workers of another shard of the model"
        step = version - self.ahead
        back = (
            f"the task continues from the checkpoint of step {self.saved}; steps lost: {step - self.saved}"
            if self.saved is not None
            else f"no checkpoint was written in this run; steps lost: up to {step}"
        )
        return (
            f"the optimizer's shards of step {step} are incomplete, as a worker has died together with "
            f"all holders of its copy (copies={self._redundancy.copies}): {why} (data-parallel rank {place}); {back}"
        )


def _place(engine: Engine) -> RackAndNode:
    """Return this worker's rack and node."""
    world = engine.world
    return world.places[world.rank] if world.nodes else ("", "")


def check_redundancy(redundancy: Redundancy | None, *, distributed: bool) -> Redundancy | None:
    """The user's or the default redundancy; None without optimizer shards.

    Raises:
        ConfigError: the strategy does not support it.
    """
    if not distributed:
        if redundancy is not None:
            raise ConfigError(
                f"redundancy={redundancy!r} is for optimizer shards: expected "
                "ddp=DistributedDataParallelConfig(use_distributed_optimizer=True) with it"
            )
        return None
    return Redundancy() if redundancy is None else redundancy
