"""A replica's shard of the model with Megatron's data parallelism and optimizer, and the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.experts import Experts
from unicron_lightning.megatron.gradients import MainGradients
from unicron_lightning.megatron.references import replace_groups, stale_groups
from unicron_lightning.megatron.sharded import (
    ShardedOptimizer,
    ShardKeeper,
    init_momentum,
    initialize_state,
    parameter_groups,
    parts_of,
)
from unicron_lightning.megatron.world import Groups
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.worker.delivery import divided_shard
from unicron_lightning.worker.state_parts import DividedState

ForwardStep = Callable[[int, int], tuple[Tensor, Callable[[Tensor], Tensor]]]
"""Forward of a row's micro-batch, or of a batch, on this stage, given its number and the virtual stage: its output, and
a function from that to the loss on the last stage."""


class ShardModel:
    """One worker's part of the model, built in the declared world (`world.build_world`).

    Args:
        module: Megatron's module, in `Float16Module` if its precision requires it; a `ModuleList` of one for each
            virtual pipeline stage.
        ddp_config: of Megatron's data parallelism.
        optimizer_config: of its optimizer.
        lanes: declared data-parallel lanes of all replicas: workers that compute micro-batches of their own.
        context: workers that divide each sequence.
        sequence_length: of the tensors that pipeline stages exchange.
        groups: the groups that it was built with, by role.
        redundancy: of the optimizer's shards; None if each replica has the whole state (no distributed optimizer).

    Attributes:
        micro_batch_size: of the tensors that pipeline stages exchange, in samples.
        grad_norm: of the last finalized gradients, before clipping.
        overflowed: whether some of these gradients are not finite, so that the step is skipped; the same on all workers
            of all replicas. Only with a loss scale; the norm then is NaN.
        keeper: of the optimizer's shards, if any.
        experts: the state of the routers that a step changes.
        before_update: called before parameters and optimizer change.
    """

    def __init__(
        self,
        module: nn.Module,
        ddp_config: DistributedDataParallelConfig,
        optimizer_config: OptimizerConfig,
        *,
        lanes: int,
        context: int = 1,
        sequence_length: int,
        groups: Groups,
        redundancy: Redundancy | None = None,
    ) -> None:
        self.module = module
        parts = virtual_stages(module)
        self.config: Any = get_model_config(parts[0])
        self.ddps: list[Any] = [
            # Megatron-LM gives the later parts one bucket each, too
            DistributedDataParallel(self.config, ddp_config, part, disable_bucketing=number > 0)
            for number, part in enumerate(parts)
        ]
        self.optimizer: Any = get_megatron_optimizer(optimizer_config, self.ddps, use_gloo_process_groups=False)
        for part in parts_of(self.optimizer):
            part.init_state_fn = part.init_state_fn or init_momentum
        self.config.grad_scale_func = self._scaled
        self.config.finalize_model_grads_func = None  # finalization is called separately, after the gate
        self.config.no_sync_func = None
        self.experts = Experts(module, self.config)
        self.gradients = MainGradients(self.ddps, lanes * context, self.experts.reduce)
        self.keeper: ShardKeeper | None = None
        if redundancy is not None:
            known = parameter_groups(self.ddps, optimizer_config)
            optimizer = ShardedOptimizer(self.ddps, self.optimizer, known)
            self.keeper = ShardKeeper(optimizer, self.gradients, redundancy)
        self._scalers = [part.grad_scaler for part in parts_of(self.optimizer) if getattr(part, "grad_scaler", None)]
        self._first_scales = self._scales()
        self._options = [_options(group) for group in self.optimizer.param_groups]
        """Of the parameter groups, as Megatron has made them."""
        self.before_update: Callable[[], None] = lambda: None
        self.grad_norm, self.overflowed = 0.0, False
        self._lanes, self._context = lanes, context
        self._scale = 1.0
        self._sequence_length = sequence_length
        self.micro_batch_size = 1
        self._groups = groups

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.module.parameters()).device

    # ---- a step

    @property
    def stages(self) -> bool:
        """Whether the update is before the commit: with the distributed optimizer, whose replicas gather parameters."""
        return self.keeper is not None

    def stage(self) -> None:
        """Step the distributed optimizer; the keeper has the version before."""
        self._step()

    def begin(self) -> None:
        """Reset the gradients."""
        self.gradients.begin()
        self.experts.begin()
        self.optimizer.zero_grad()

    def recover(self, reduced: int) -> None:
        """After a failure: restore the gradients of this worker's completed calls; no bucket is kept."""
        self.gradients.recover()
        self.experts.recover()
        self.optimizer.zero_grad()  # after finalization `grad` is `main_grad`, and backward would add to it twice

    def call(
        self,
        forward: ForwardStep,
        rows: Sequence[int],
        *,
        divisor: float,
        last: bool,
        idle: Collection[int] = (),
    ) -> None:
        """Run forward and backward of this worker's micro-batches of some rows by Megatron's schedule; gradients
        accumulate.

        Each micro-batch's loss is divided by ``divisor`` in the sum over the declared lanes, however many are run in
        the call. With experts, fewer than the interleaved schedule takes must be one (`alone`).

        Args:
            forward: runs this stage, given the row.
            rows: by number.
            divisor: as above.
            last: whether reductions may start.
            idle: rows whose micro-batch here does not count.
        """
        padded, _ = interleaving(len(rows), self.config) if len(self.ddps) > 1 else (len(rows), 0)
        # With experts all runs of a call have one weight: other runs are between a run's forward and its backward,
        # which takes the routers' losses with the weight of the latest.
        runs = padded if self.experts else len(rows)
        # Megatron sums the gradients of a sequence's parts, whose losses are means over the parts
        factor = padded * len(rows) / runs * self._lanes / divisor / self._context

        def step(places: Any, _: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            place, virtual = next(places)
            number = rows[min(place, len(rows) - 1)]
            weight = factor if place < runs and number not in idle else 0.0
            self.experts.start_micro_batch(counts=place < len(rows) and number not in idle)
            output, loss = forward(number, virtual)
            # Megatron takes the routers' losses of a sequence's parts as parts of a sum
            self._scale = weight * self._context if self.experts else 1.0

            def scaled(result: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                if not self.experts:
                    return loss(result) * weight, {}
                self.experts.sum_losses()
                return loss(result) / self._context, {}

            return output, scaled

        with self.gradients.calling(last=last) as no_sync:
            self.config.no_sync_func = no_sync
            try:
                self._schedule(len(rows), step, self.micro_batch_size, forward_only=False)
            finally:
                self.config.no_sync_func = None
        self.experts.take()

    def _scaled(self, loss: Tensor) -> Tensor:
        """Scale a loss, and thereby Megatron's auxiliary losses of the experts' routers, which it adds in the
        backward.
        """
        scaled: Tensor = self.optimizer.scale_loss(loss) * self._scale
        return scaled

    def evaluate(self, forward: ForwardStep, batches: Sequence[int], size: int) -> None:
        """Run some batches of ``size`` samples each forward by Megatron's schedule, without gradients."""

        def step(places: Any, _: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            place, virtual = next(places)
            output, loss = forward(batches[min(place, len(batches) - 1)], virtual)
            return output, lambda result: (loss(result), {})

        with torch.no_grad():
            self._schedule(len(batches), step, size, forward_only=True)

    def _schedule(self, number: int, step: Callable[[Any, Any], Any], size: int, *, forward_only: bool) -> None:
        """Run some micro-batches by Megatron's schedule, the interleaved one with as many as it needs at least.

        Args:
            number: of micro-batches.
            step: forward of one, given an iterator of (place among the micro-batches, virtual stage).
            size: samples of each.
            forward_only: whether no backward follows.
        """
        config, virtual = self.config, len(self.ddps)
        group = config.microbatch_group_size_per_vp_stage
        if virtual > 1:
            number, config.microbatch_group_size_per_vp_stage = interleaving(number, config)
        places = [iter([(place, stage) for place in range(number)]) for stage in range(virtual)]
        try:
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=places if virtual > 1 else places[0],
                model=self.ddps,
                num_microbatches=number,
                seq_length=self._sequence_length,
                micro_batch_size=size,
                forward_only=forward_only,
            )
        finally:
            config.microbatch_group_size_per_vp_stage = group

    def finalize(self) -> None:
        """Apply Megatron's processing of reduced gradients within a replica and compute their norm: all but the
        update.
        """
        with self.experts.without_update():
            finalize_model_grads([_Reduced(each) for each in self.ddps])
        scales = self._scales()
        self.overflowed = self.optimizer.prepare_grads()
        for scaler, state in zip(self._scalers, scales, strict=True):
            scaler.load_state_dict(state)  # it has been updated already, and this step may be interrupted
        self.grad_norm = math.nan if self.overflowed else float(self.optimizer.get_grad_norm())

    def update(self) -> None:
        """After the commit: step the optimizer, unless that was staged, and change the routers' biases, of which no
        copies are kept.
        """
        if not self.stages:
            self._step()
        if not self.overflowed:
            self.experts.update()

    def _step(self) -> None:
        """Clip, and step the optimizer, as Megatron's own ``step`` does after the norm; only change the loss scale if
        some gradient is not finite.
        """
        self.before_update()
        for scaler in self._scalers:
            scaler.update(self.overflowed)
        if self.overflowed:
            return
        for optimizer in parts_of(self.optimizer):
            parameters = [] if optimizer.is_stub_optimizer else optimizer.get_parameters()
            if parameters and optimizer.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=optimizer.config.clip_grad, total_norm=self.grad_norm, use_decoupled_grad=False
                )
        self.optimizer.step_with_ready_grads()

    @property
    def scales(self) -> bool:
        """Whether there is a loss scale, so that steps may be skipped."""
        return bool(self._scalers)

    def _scales(self) -> list[dict[str, Any]]:
        """The states of the loss scales; a scaler replaces its tensor, and does not change it."""
        return [scaler.state_dict() for scaler in self._scalers]

    # ---- further fits

    @property
    def is_entered(self) -> bool:
        """Whether the process is in this model's groups; no other trainer has replaced them."""
        return self._groups["world"] is dist.group.WORLD

    def reset_groups(self) -> None:
        """Give the groups of parameters the options of a new optimizer, for a further fit."""
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(options, params=parameters)

    def renew_optimizer(self, version: int) -> None:
        """Give the optimizer the state of a new one, for a further fit; with a keeper a collective of this shard.

        Args:
            version: number of the new state.

        Raises:
            CommunicatorAborted: a worker of this shard has failed.
        """
        for part in parts_of(self.optimizer):
            if not part.is_stub_optimizer:
                part.optimizer.state.clear()
                if self.keeper is not None:
                    initialize_state(part)
        for scaler, state in zip(self._scalers, self._first_scales, strict=True):
            scaler.load_state_dict(state)
        self.optimizer.reload_model_params()
        if self.keeper is not None:
            self.keeper.keep(version)

    # ---- other worlds

    def adopt(self, groups: Groups) -> int:
        """Replace the groups of the previous epoch by those of a new one; return the number of replaced references."""
        mapping = {id(old): groups[role] for role, old in self._groups.items() if role in groups}
        count = replace_groups(self._roots(), mapping)
        assert not stale_groups(self._roots(), groups.values()), "Megatron holds a group that has no role"
        self._groups = groups
        return count

    def unify(self) -> None:
        """Equalise parameters at the start.

        The last stage gets the first one's tied embeddings, which construction without peers has left at zero; all
        replicas get the first one's parameters.
        """
        for part in virtual_stages(self.module):
            inner = unwrapped(part, "setup_embeddings_and_output_layer")
            if getattr(inner, "share_embeddings_and_output_weights", False):
                inner.setup_embeddings_and_output_layer()
        for ddp in self.ddps:
            ddp.broadcast_params()
        self.optimizer.reload_model_params()

    def state(self, *, whole: bool = False) -> DividedState:
        """Divide `plain_state`."""
        number = 0 if self.keeper is not None and not whole else len(list(self.module.parameters()))
        return divided_shard(self.plain_state(whole=whole), number)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the `plain_state` of another worker of this shard."""
        self.load_plain(state)

    def plain_state(self, *, whole: bool = False) -> dict[str, Any]:
        """Parameters, buffers and optimizer of this shard, as plain data that shares their memory; if the keeper holds
        the rest, only buffers, and parameters if ``whole``.
        """
        tensors = [each.detach() for each in self._own(whole=whole)]
        return {"tensors": tensors, **({} if self.keeper is not None else {"optimizer": self.optimizer.state_dict()})}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether the tensors of a `plain_state` have the shapes of this worker's."""
        return [each.shape for each in self._own()] == [each.shape for each in state["tensors"]]

    def load_plain(self, state: Mapping[str, Any]) -> None:
        """Load the `plain_state` of another worker of this shard, or of one in an earlier life."""
        with torch.no_grad():
            own = self._own(whole=len(state["tensors"]) > len(self._own()))
            for tensor, value in zip(own, state["tensors"], strict=True):
                tensor.copy_(value)
        if self.keeper is None:
            self.optimizer.load_state_dict(state["optimizer"])

    def _own(self, *, whole: bool = False) -> list[Tensor]:
        """The module's tensors that the keeper does not hold, or all."""
        held = self.keeper is not None and not whole
        return [*([] if held else self.module.parameters()), *self.module.buffers()]

    def kept(self) -> Iterator[Tensor]:
        """The optimizer's tensors, which change in updates only."""
        for part in (part for part in parts_of(self.optimizer) if not part.is_stub_optimizer):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def tensors(self) -> Iterator[Tensor]:
        """Parameters, buffers and the optimizer's tensors."""
        yield from (*self.module.parameters(), *self.module.buffers(), *self.kept())

    def _roots(self) -> list[object]:
        return [*self.ddps, self.optimizer, self.config]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def virtual_stages(module: nn.Module) -> list[nn.Module]:
    """The parts of the model on a worker, one for each virtual pipeline stage."""
    return [*module] if isinstance(module, nn.ModuleList) else [module]


def interleaving(number: int, config: Any) -> tuple[int, int]:
    """Arrange a call of Megatron's interleaved schedule, which accepts only some numbers of micro-batches.

    It runs groups of micro-batches, one virtual stage after the other, none smaller than the pipeline. Larger groups
    than configured keep more activations, so the group is the smallest that divides the call well. The order in which
    gradients of a virtual stage add up does not depend on it.

    Args:
        number: of micro-batches to run.
        config: Megatron's.

    Returns:
        The number in the call, at least one for each stage, and the size of its groups.
    """
    stages = config.pipeline_model_parallel_size
    number = max(number, stages)
    first = min(max(config.microbatch_group_size_per_vp_stage, stages), number)
    sizes = range(first, number + 1)
    return number, next(size for size in sizes if not 0 < number % size < stages)


def unwrapped(module: nn.Module, attribute: str) -> Any:
    """Return a model without the wrappers around the one that has an attribute; None if there is none."""
    inner: Any = module
    while inner is not None and not hasattr(inner, attribute):
        inner = getattr(inner, "module", None)
    return inner


def sequence_length(module: nn.Module) -> int:
    """The longest sequence that a model accepts.

    Raises:
        ConfigError: the model does not specify it.
    """
    inner = unwrapped(module, "max_sequence_length")
    if inner is None:
        raise ConfigError(
            f"{type(module).__qualname__} has no max_sequence_length; give the strategy sequence_length=..."
        )
    return int(inner.max_sequence_length)


class _Reduced:
    """Megatron's data parallelism after its reduction, for finalization after the gate."""

    def __init__(self, ddp: Any) -> None:
        self.module = ddp.module
        self._ddp = ddp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ddp, name)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Do nothing."""
