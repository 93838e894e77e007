"""Megatron's parallelism: replicas of TP x max(CP, EP) x PP workers hold the model together.

Its optimizer has torch's interface, for Lightning and for learning-rate schedulers.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import re
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _configure_schedulers_automatic_opt, do_nothing_closure
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from unicron_lightning import wire
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.model import ShardModel, sequence_length, unwrapped, virtual_stages
from unicron_lightning.megatron.world import build_world, current_groups, enter_world, leave_world
from unicron_lightning.planner.performance.description import PRESETS
from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.fabric import ReplicaFabric
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.strategies.megatron.batches import StageSteps, seed_micro_batch, stage_evaluation
from unicron_lightning.strategies.megatron.checkpoints import GridCheckpoints, GridDivision, LoadShard
from unicron_lightning.strategies.megatron.checks import (
    check_context,
    check_experts,
    check_megatron_config,
    check_megatron_layout,
    check_megatron_trainer,
    check_same,
    check_same_optimizer,
    check_validation_loader,
    check_virtual_stages,
    check_witness,
    find_megatron_module,
)
from unicron_lightning.strategies.parallelism import Parallelism
from unicron_lightning.strategies.passes.evaluation import GlobalPasses
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.session import Session, control_of_process

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class MegatronOptimizer(Optimizer):
    """Adapter whose parameter groups are those of Megatron's present optimizer.

    Args:
        current: returns Megatron's optimizer.
        update: steps it, after the closure.
    """

    def __init__(self, current: Callable[[], Any], update: Callable[[], None]) -> None:
        # Not the base class's: it would copy the groups, and wrap `step` in hooks that know other optimizers.
        self._current = current
        self._update = update
        self.defaults = {}
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self._patch_step_function: Any = lambda: None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Megatron's own groups: it uses the values that a scheduler sets here."""
        groups: list[dict[str, Any]] = self._current().param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Empty: Megatron's state is moved and saved separately."""
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients start from zero in each step, and Lightning calls this after the step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the step's operation, which is the closure, then the update."""
        loss = None if closure is None else closure()
        self._update()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, see `state`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state, see `state`."""

    def rates(self) -> list[dict[str, Any]]:
        """Return plain values of each group, such as its learning rate, for a worker that joins."""
        plain = (bool, int, float, str)
        return [{k: v for k, v in group.items() if isinstance(v, plain) or v is None} for group in self.param_groups]

    def set_rates(self, rates: list[dict[str, Any]]) -> None:
        """Restore the values of `rates`."""
        for group, values in zip(self.param_groups, rates, strict=False):  # a stage may lack a group
            group.update(values)


class SampleScheduler:
    """Megatron's `OptimizerParamScheduler` with the interface that Lightning expects of a scheduler.

    Megatron counts samples, so each optimizer step advances it by the samples of a global batch.

    Args:
        scheduler: Megatron's.
        samples: returns those of a global batch.
    """

    def __init__(self, scheduler: Any, samples: Callable[[], int]) -> None:
        self.scheduler, self.samples = scheduler, samples
        self.optimizer = scheduler.optimizer

    def step(self) -> None:
        """Advance by an optimizer step."""
        self.scheduler.step(increment=self.samples())

    def state_dict(self) -> dict[str, Any]:
        """Return Megatron's state, which is plain data."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; Megatron adds the stored number of samples to the present one."""
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state_dict)


def make_scheduler(
    factory: Callable[[Optimizer], Any] | None, optimizer: Optimizer, config: Any, samples: Callable[[], int]
) -> Any:
    """Return a module's scheduler in a form that Lightning takes; None without one.

    Args:
        factory: of `split_configuration`.
        optimizer: its argument.
        config: Megatron's `OptimizerConfig`, whose rates Megatron stores in the optimizer's groups.
        samples: returns those of a global batch.

    Raises:
        ConfigError: the configuration and the scheduler contradict each other, or without Megatron's scheduler
            nothing would use rates of the configuration.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    without = [group for group in optimizer.param_groups if group.get("min_lr", 0.0) is None]
    for group in without:
        group["min_lr"] = 0.0  # until the scheduler exists: it reads the groups in its constructor
    made = None if factory is None else factory(optimizer)
    options = dict(made) if isinstance(made, dict) else {}
    scheduler = options.get("scheduler", made)
    if not isinstance(scheduler, OptimizerParamScheduler):
        for name in _ONLY_MEGATRONS:
            if (value := getattr(config, name, None)) is not None:
                raise ConfigError(
                    f"OptimizerConfig({name}={value!r}) is used by megatron-core's OptimizerParamScheduler only; "
                    f"expected it as lr_scheduler, got {type(scheduler).__name__ if scheduler is not None else 'none'}"
                )
        for group in without:
            group["min_lr"] = None
        return made
    pairs = [("lr", "max_lr"), *([] if config.min_lr is None else [("min_lr", "min_lr")])]
    for field, name in pairs:
        if getattr(config, field) != getattr(scheduler, name):
            raise ConfigError(
                f"OptimizerConfig({field}={getattr(config, field)!r}) and OptimizerParamScheduler({name}="
                f"{getattr(scheduler, name)!r}): expected equal values"
            )
    config.min_lr = scheduler.min_lr
    for group in without:
        group["min_lr"] = scheduler.min_lr
    scheduler.step(0)
    return {"interval": "step", **options, "scheduler": SampleScheduler(scheduler, samples)}


_ONLY_MEGATRONS: Final = ("min_lr", "decoupled_lr", "decoupled_min_lr")
"""Rates that nothing but Megatron's scheduler reads."""


def split_configuration(returned: Any) -> tuple[Any, Callable[[Optimizer], Any] | None]:
    """Split the value of a module's ``configure_optimizers``: Megatron's configuration, and the scheduler's factory.

    Raises:
        ConfigError: the value has another form.
    """
    from megatron.core.optimizer import OptimizerConfig

    config, scheduler = returned, None
    if isinstance(returned, dict):
        config, scheduler = returned.get("optimizer"), returned.get("lr_scheduler")
    if not isinstance(config, OptimizerConfig) or not (scheduler is None or callable(scheduler)):
        raise ConfigError(
            f"configure_optimizers() returned {returned!r}; under unicron_megatron expected megatron-core's "
            'OptimizerConfig, or {"optimizer": OptimizerConfig, "lr_scheduler": function of the optimizer that returns '
            "what Lightning takes as lr_scheduler}"
        )
    return config, scheduler


logger = logging.getLogger(__name__)


class MegatronParallel(Parallelism):
    """Megatron's parallelism through failures.

    Args:
        strategy: the strategy that it belongs to.
        shape: TP, PP, its virtual stages, CP and EP as the script gives them, of one replica.
        ddp: configuration of Megatron's data parallelism.
        sequence_length: length of the tensors between pipeline stages; None: the model's longest sequence.
        redundancy: redundancy of the optimizer's shards, if it has some.
        divergence: compares the parameters of the replicas.
    """

    whole = False
    one_size = True
    scheduled = False
    virtual_stage = 0
    """Virtual pipeline stage whose forward runs now, on this worker."""
    shuffles = False
    steps: StageSteps

    def __init__(
        self,
        strategy: FaultTolerantStrategy,
        *,
        shape: Shape,
        ddp: DistributedDataParallelConfig,
        sequence_length: int | None,
        redundancy: Redundancy | None,
        divergence: Divergence,
    ) -> None:
        self.strategy = strategy
        self.steps = StageSteps(self, divergence)
        self.evaluation = GlobalPasses(strategy, self._check_validation, partial(stage_evaluation, self))
        self.checkpoints = GridCheckpoints(self)
        self.division: GridDivision = GridDivision(self)
        self._script = shape
        self.shards = shape.shards // shape.width
        self._ddp = ddp
        self._sequence_length = sequence_length
        self._redundancy = redundancy
        self._member: ReplicaMember[ShardModel] | None = None
        self._module: pl.LightningModule | None = None
        """That of the script's runs, once there was one."""
        self._config: OptimizerConfig | None = None
        """Of the module's first run."""
        self._founded = False
        """Whether the task has begun with this worker's shard."""

    @property
    def member(self) -> ReplicaMember[ShardModel]:
        """This worker's connections and shard."""
        assert self._member is not None, "no run has begun"
        return self._member

    @property
    def coordinate(self) -> tuple[int, int]:
        """Tensor-parallel rank and pipeline stage of this worker."""
        return self.shape.coordinate(self.member.fabric.own_shard)

    @property
    def lane(self) -> int:
        """Lane of this worker: the place of its micro-batch in each row."""
        return self.shape.lane(self.member.fabric.own_shard)

    @property
    def tells(self) -> bool:
        """Whether this worker, the first of its lane's last stage, reports the results of the lane's micro-batches."""
        return self.is_last and self.coordinate[0] == self.context_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this worker is in the last stage, and so has the loss."""
        return self.coordinate[1] == self.shape.pipeline - 1

    @property
    def context_rank(self) -> int:
        """Part of each sequence that this worker has."""
        return self.shape.column(self.member.fabric.own_shard) % self.shape.context

    @property
    def shape(self) -> Shape:
        """The present layout, for which the model is built."""
        return self._script if self._member is None else self._member.fabric.shape

    # ---- a run's start

    def check(self, trainer: pl.Trainer) -> None:
        check_megatron_trainer(trainer)

    def _check_validation(self, loader: DataLoader[Any]) -> None:
        check_validation_loader(loader, lanes=self.shape.width)

    def open(self, device: torch.device, shape: StepShape, on_world: Callable[[World], None]) -> tuple[Session, bool]:
        if control_of_process() is not None:
            check_same("the Trainer", None, self)
        width = self._script.width
        if shape.devices % width:
            raise ConfigError(
                f"{shape.devices} data-parallel lanes (devices x num_nodes / (TP x CP x PP)) are no multiple of "
                f"the {width} lanes of a replica, EP / CP"
            )
        grid = replace(self._script, replicas=shape.devices // width)
        fabric = ReplicaFabric(grid, copies=None if self._redundancy is None else self._redundancy.copies)
        self._member = ReplicaMember(fabric, self._connect, leave_world)
        session, is_new = Session.of_process(device, grid.workers, on_world, fabric)
        fabric.begin(session.control, joins=session.is_joiner)
        return session, is_new

    def begin(self, session: Session) -> None:
        strategy, fabric = self.strategy, self.member.fabric
        _keep_to_itself(strategy.module.trainer)
        if self._module is not None:
            check_same("the module", self._module, strategy.module)
            return
        self._module, self._founded = strategy.module, session.is_joiner
        atexit.register(_close, weakref.ref(self.member))
        if session.is_joiner:
            fabric.take_shard(strategy.local_rank)
        build_world(fabric.shape, fabric.own_shard, strategy.root_device)
        tensor_parallel.model_parallel_cuda_manual_seed(strategy.seed & 0x7FFFFFFF)

    def set_up_optimizers(self, trainer: pl.Trainer, default: Callable[[pl.Trainer], None]) -> None:
        """Set up Megatron's data parallelism around the module's model, and its optimizer."""
        strategy = self.strategy
        config, scheduler = self._build(trainer)
        self.steps.begin_fit()
        self._optimizer = MegatronOptimizer(lambda: self.member.model.optimizer, self.member.update)

        def samples() -> int:
            if self.member.model.scales and math.isnan(self.steps.grad_norm):
                return 0  # Megatron-LM's scheduler leaves out steps that are skipped; a spare knows their norm only
            return strategy.shape.micro_batches * self.member.model.micro_batch_size

        found = make_scheduler(scheduler, self._optimizer, config, samples)
        made = [] if found is None else [found]
        strategy.optimizers = [self._optimizer]
        strategy.lr_scheduler_configs = _configure_schedulers_automatic_opt(made, None)

    def _build(self, trainer: pl.Trainer) -> tuple[OptimizerConfig, Callable[[Optimizer], Any] | None]:
        """Build this worker's shard in the script's first run, or reset its optimizer's options; return the module's
        configuration of the optimizer, and its scheduler's factory.

        Raises:
            ConfigError: the model or the configuration is not that of the first run.
        """
        strategy = self.strategy
        returned = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=strategy.module)
        config, scheduler = split_configuration(returned)
        if self.member.fabric.built:
            self._check_model()
            check_same_optimizer(self._config, config)
            self.member.model.reset_groups()
            return config, scheduler
        self._config = copy.copy(config)
        self.member.model = build_shard(
            strategy.module,
            self._ddp,
            config,
            self.member.fabric,
            micro_batches=strategy.shape.micro_batches,
            length=self._sequence_length,
            redundancy=self._redundancy,
            witness_every=strategy.witness.every,
        )
        self.member.model.before_update = strategy.persisting.settle
        return config, scheduler

    def _check_model(self) -> None:
        """Refuse another model than that of the first run, and a world of another trainer."""
        model = self.member.model
        check_same("the model", model.module, find_megatron_module(self.strategy.module, self.shape.virtual))
        if self.member.fabric.channels is not None and not model.is_entered:
            check_same("the Trainer", None, self)

    def found(self, *, resumes: bool) -> None:
        strategy, member = self.strategy, self.member
        fits = strategy.trainer.state.fn == TrainerFn.FITTING
        if not member.fabric.built:
            self._build(strategy.trainer)
        elif not fits:
            self._check_model()
        if not self._founded:
            self._founded = True
            member.found(strategy.engine)
        elif fits:
            rates, step = self._optimizer.rates(), strategy.trainer.global_step
            strategy.engine.run(LoadShard("new_optimizer", member, member.model.renew_optimizer, step))
            self._optimizer.set_rates(rates)

    def finish(self) -> None:
        self.member.finish(self.strategy.engine)

    # ---- worlds

    @property
    def spares(self) -> int:
        return 0 if self._member is None else self._member.spares

    def enter(self, world: World) -> None:
        if world.epoch > 0:
            self.member.enter(self.strategy.engine)

    def _connect(self, model: ShardModel, channels: Channels) -> None:
        engine = self.strategy.engine
        model.adopt(enter_world(channels, self.shape, self.strategy.root_device, engine.check))

    def begin_stage(self, place: tuple[int, ...], virtual: int) -> None:
        """Begin a micro-batch's forward in a virtual stage: set all random state.

        Args:
            place: of the micro-batch in the run: inputs of the random state.
            virtual: number of the virtual stage on this worker.
        """
        self.virtual_stage = virtual
        tensor, stage = self.coordinate
        number = stage + self.shape.pipeline * (virtual + self.shape.virtual * self.context_rank)
        seed_micro_batch(self.strategy.seed, place, tensor, number, self.strategy.root_device)

    def share(self, micro_batches: range) -> list[int]:
        width, lane = self.shape.width, self.lane
        rows = self.member.share(range(-(-len(micro_batches) // width)))
        return [micro_batches[row * width + lane] for row in rows if row * width + lane < len(micro_batches)]

    def at_boundary(self) -> None:
        self.member.fabric.leave_if_surplus()

    def state(self, trainer: pl.Trainer) -> dict[str, Any]:
        return {"rates": self._optimizer.rates()}

    def admitted(self, state: dict[str, Any]) -> None:
        self.division.settle()
        self.member.founded()
        self._optimizer.set_rates(state["rates"])

    def snapshot(self) -> Callable[[], None]:
        fabric, model, rates = self.member.fabric, self.member.model, self._optimizer.rates()
        at, kept = fabric.at, [(tensor, tensor.detach().clone()) for tensor in model.tensors()]

        def restore() -> None:
            if fabric.at == at:  # otherwise another worker has sent a newer one
                with torch.no_grad():
                    for tensor, value in kept:
                        tensor.copy_(value)
            self._optimizer.set_rates(rates)

        return restore

    def close(self) -> None:
        """Keep the shard for the script's next run."""


def _close(known: weakref.ref[ReplicaMember[ShardModel]]) -> None:
    """Leave the world before the process ends, if there is a trainer that uses it."""
    member = known()
    if member is not None:
        member.close()


def _keep_to_itself(trainer: pl.Trainer) -> None:
    """Disable two broadcasts of Lightning 2.6 over all ranks: before every batch, and in the handler of SIGTERM.

    Spares are in no group, and ranks of broken replicas would hang. A SIGTERM is recorded, as without a process group,
    and handled between steps (`Membership.boundary`).
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = do_nothing_closure  # type: ignore[method-assign]
    connector: Any = trainer._signal_connector

    def note(number: int, _: FrameType | None) -> None:
        logger.info("signal_noted signal=%s", signal.Signals(number).name)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note


def build_shard(
    module: pl.LightningModule,
    ddp: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    fabric: ReplicaFabric,
    *,
    micro_batches: int,
    length: int | None,
    redundancy: Redundancy | None,
    witness_every: int = 0,
) -> ShardModel:
    """Wrap the model built by ``configure_model``, and report its shape to the fabric.

    Args:
        module: the user's module.
        ddp: Megatron's configuration of its data parallelism.
        optimizer: Megatron's configuration of its optimizer.
        fabric: provides the layout.
        micro_batches: M.
        length: length of the tensors between pipeline stages; None: the model's longest sequence.
        redundancy: redundancy of the optimizer's shards.
        witness_every: steps between two with a witness; 0: there are none.

    Raises:
        ConfigError: for settings that cannot be recovered exactly, and a model for another layout.
    """
    grid = fabric.shape
    model = find_megatron_module(module, grid.virtual)
    config = get_model_config(virtual_stages(model)[0])
    check_megatron_config(config, ddp, optimizer)
    check_megatron_layout(config, grid)
    check_experts(config, grid)
    check_virtual_stages(config, grid, next(model.parameters()).device)
    check_context(config, grid)
    check_witness(witness_every, config)
    length = length or sequence_length(virtual_stages(model)[0])
    shard = ShardModel(
        model,
        ddp,
        optimizer,
        lanes=grid.replicas * grid.width,
        context=grid.context,
        sequence_length=length,
        groups=current_groups(),
        redundancy=redundancy,
    )
    fabric.built = True
    fabric.spread = spread_of(
        config,
        virtual_stages(model)[0],
        grid,
        ordered=fabric.ordered,
        micro_batches=micro_batches,
        sequence_length=length,
    )
    return shard


_STAGES_OF_THEIR_OWN: Final = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of Megatron's configuration by which layers are not divided evenly among stages."""


def spread_of(
    config: Any, module: nn.Module, shape: Shape, *, ordered: bool, micro_batches: int, sequence_length: int
) -> wire.Spread:
    """A model's layout, and its sizes that TP, PP and EP have to divide: the coordinator refuses other orders in time.

    A model may have further constraints; in a layout in which it cannot be built, its task's next life fails.

    Args:
        config: Megatron's `TransformerConfig`.
        module: Megatron's model.
        shape: the present one.
        ordered: whether the coordinator ordered it.
        micro_batches: M.
        sequence_length: of the tensors that pipeline stages exchange.
    """
    experts = getattr(config, "num_moe_experts", None)
    names = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size")
    tensor = {name: getattr(config, name, None) for name in names}
    model = unwrapped(module, "vocab_size")
    tensor["vocab_size"] = None if model is None else int(model.vocab_size)
    if getattr(config, "sequence_parallel", False):
        tensor["sequence_length"] = sequence_length // shape.context
    evenly = not any(getattr(config, name, None) for name in _STAGES_OF_THEIR_OWN)
    return wire.Spread(
        layout=shape.layout,
        ordered=ordered,
        workers=shape.workers,
        micro_batches=micro_batches,
        tensor_divides={name: size for name, size in tensor.items() if size},
        pipeline_divides=_divided_by_stages(config.num_layers, shape.virtual) if evenly else {},
        expert_divides={"num_moe_experts": experts} if experts else {},
        transformer=shape_of(config, module, sequence_length),
    )


def _divided_by_stages(layers: int, virtual: int) -> dict[str, int]:
    if virtual == 1:
        return {"num_layers": layers}
    return {"num_layers / virtual_pipeline_model_parallel_size": layers // virtual}


def shape_of(config: Any, module: nn.Module, sequence_length: int) -> dict[str, bool | int | str]:
    """A model's shape for the planner, by the names of a job's ``transformer``; empty if the vocabulary is unknown, or
    if only some layers have experts, for which the planner has no model.

    Args:
        config: Megatron's `TransformerConfig`.
        module: Megatron's model.
        sequence_length: of a sample.
    """
    model = unwrapped(module, "vocab_size")
    experts = getattr(config, "num_moe_experts", None) or 0
    if model is None or (experts and getattr(config, "moe_layer_freq", 1) != 1):
        return {}
    shape: dict[str, bool | int | str] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": getattr(config, "num_query_groups", None) or 0,
        "ffn_size": getattr(config, "ffn_hidden_size", None) or 0,
        "gated": bool(getattr(config, "gated_linear_unit", False)),
        "biases": bool(getattr(config, "add_bias_linear", True)),
        "learned_positions": getattr(model, "position_embedding_type", "learned_absolute") == "learned_absolute",
        "tied_embeddings": bool(getattr(model, "share_embeddings_and_output_weights", True)),
        "sequence_length": sequence_length,
        "vocabulary_size": int(model.vocab_size),
    }
    if (width := getattr(config, "kv_channels", None)) and width * config.num_attention_heads != config.hidden_size:
        shape["head_size"] = width
    if (context := getattr(config, "context_parallel_size", 1)) > 1:
        shape["context_parallel"] = context
    if experts:
        shape |= {
            "num_experts": experts,
            "experts_per_token": config.moe_router_topk,
            "ffn_size": config.moe_ffn_hidden_size or config.ffn_hidden_size,
            "shared_expert_size": getattr(config, "moe_shared_expert_intermediate_size", None) or 0,
            "expert_parallel": config.expert_model_parallel_size,
        }
    accelerator = preset_of(torch.cuda.get_device_properties()) if torch.cuda.is_available() else None
    return shape if accelerator is None else {**shape, "accelerator": accelerator}


def preset_of(device: Any) -> str | None:
    """The planner's name of an accelerator, from its ``name`` and ``total_memory``; None if it is none of those."""
    words = re.split(r"[^A-Za-z0-9]+", device.name)
    fits = (name for name, known in PRESETS.items() if name in words and device.total_memory > 0.9 * known.memory_bytes)
    return next(fits, None)
