"""FSDP2's parallelism: replicas of S workers hold a model in shards; each worker computes micro-batches of its own.

The functions at the end refuse settings, each with one error that names the value and the alternative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from unicron_lightning.data.order import StepShape, check_loader
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.holder import ShardHolder
from unicron_lightning.fsdp.mesh import (
    ReplicaMesh,
    ShardGroup,
    is_divided_as_expected,
    sum_gradients,
)
from unicron_lightning.fsdp.model import FsdpShard, accelerator_for
from unicron_lightning.fsdp.rows import number_of_rows
from unicron_lightning.fsdp.whole_updates import needs_whole
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.strategies.checks import check_optimizers
from unicron_lightning.strategies.fsdp.checkpoints import ShardedCheckpoints
from unicron_lightning.strategies.fsdp.prediction import ShardedPredictions
from unicron_lightning.strategies.fsdp.steps import (
    ShardedSteps,
    clip_by_agreed_norm,
    clipped,
    keep_spares,
    sharded_evaluation,
)
from unicron_lightning.strategies.parallelism import Parallelism
from unicron_lightning.strategies.passes.evaluation import GlobalPasses
from unicron_lightning.strategies.state import join_state
from unicron_lightning.strategies.state.memory import SpreadDivision
from unicron_lightning.worker import codec
from unicron_lightning.worker.communication.nccl import check_device
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.reporting import balance_of
from unicron_lightning.worker.session import Session, control_of_process

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of the sharding.

    Attributes:
        blocks: names of the classes whose modules are sharded one by one; none: the elements of every
            `torch.nn.ModuleList`; a number: modules with at least that number of parameters, without those of smaller
            blocks.
        activation_checkpointing: names of the classes whose modules compute their activations again in the backward.
        reshard_after_forward: as of `fully_shard`.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
    """

    blocks: tuple[str, ...] | int = ()
    activation_checkpointing: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    cpu_offload: bool = False


class PolicyPrecision(Precision):
    """Mixed precision by FSDP2's policy, and not by autocast: parameters are gathered in bfloat16, their shards and the
    sums of gradients are float32.
    """

    precision = "bf16-mixed"


def shard_module(module: pl.LightningModule, mesh: DeviceMesh, sharding: Sharding, precision: Precision) -> Precision:
    """Shard the blocks of a module, and then each of its direct submodules that has other parameters.

    A module with sharded submodules is left as it is.

    Args:
        module: of the user.
        mesh: of a replica's shards.
        sharding: the options.
        precision: Lightning's plugin.

    Returns:
        The plugin to use.

    Raises:
        ConfigError: no module has a class of one of these names, or that number of parameters; activation
            checkpointing of a module that shards itself.
    """
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        if sharding.activation_checkpointing:
            raise ConfigError(
                f"activation_checkpointing={sharding.activation_checkpointing!r}: {type(module).__qualname__} shards "
                "itself; expected torch's checkpoint or checkpoint_wrapper in its configure_model"
            )
        return precision
    if sharding.activation_checkpointing:
        for each in _of_classes(module, "activation_checkpointing", sharding.activation_checkpointing):
            checkpoint(each)  # before fully_shard, which then gathers the parameters around the second forward, too
    mixed = precision.precision == "bf16-mixed"
    inner = _policy(torch.bfloat16, None) if mixed else MixedPrecisionPolicy()
    outer = _policy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    reshard = sharding.reshard_after_forward
    offload = CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy()
    for block in blocks_of(module, sharding.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=inner, offload_policy=offload)
    for child in module.children():
        if not isinstance(child, FSDPModule) and next(child.parameters(), None) is not None:
            fully_shard(child, mesh=mesh, reshard_after_forward=reshard, mp_policy=outer, offload_policy=offload)
    return PolicyPrecision() if mixed else precision


def place_rest(module: pl.LightningModule, device: torch.device) -> None:
    """Move all that FSDP2 does not place to the device of the model."""
    module._device = device
    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)
        for parameter in each._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor) and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                each._buffers[name] = buffer.to(device)


def _policy(parameters: torch.dtype, output: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=parameters, reduce_dtype=torch.float32, output_dtype=output)


def blocks_of(module: pl.LightningModule, names: tuple[str, ...] | int) -> list[nn.Module]:
    """Return the modules that are sharded one by one; ``names`` as `Sharding.blocks`, inner modules first.

    Raises:
        ConfigError: no module has a class of one of these names, or that number of parameters.
    """
    if isinstance(names, int):
        return _of_size(module, names)
    if names:
        return _of_classes(module, "blocks", names)
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    return [block for each in lists for block in each if next(block.parameters(), None) is not None]


def _of_classes(module: pl.LightningModule, option: str, names: Sequence[str]) -> list[nn.Module]:
    found = [each for each in module.modules() if type(each).__name__ in names]
    missing = sorted(set(names) - {type(each).__name__ for each in found})
    if missing:
        there = sorted({type(each).__name__ for each in module.modules()})
        raise ConfigError(
            f"{option}={tuple(names)!r}: no module is a {missing[0]}; expected classes among {', '.join(there)}"
        )
    return found


def _of_size(module: pl.LightningModule, least: int) -> list[nn.Module]:
    """The modules below the module's own submodules that have that number of parameters beside those of smaller blocks.

    Modules that share a parameter with another one belong to no block, since FSDP2 shards such parameters together.
    """
    holders = Counter(id(each) for part in module.modules() for each in part._parameters.values() if each is not None)
    found: list[nn.Module] = []

    def visit(part: nn.Module, depth: int) -> tuple[int, bool]:
        whole = isinstance(part, nn.MultiheadAttention)  # it reads its projection's weight without calling that
        own = list(part.parameters()) if whole else [each for each in part._parameters.values() if each is not None]
        below = [] if whole else [visit(child, depth + 1) for child in part.children()]
        left = sum(each.numel() for each in own) + sum(number for number, _ in below)
        shares = any(holders[id(each)] > 1 for each in own) or any(shared for _, shared in below)
        if depth > 1 and left >= least and not shares and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            found.append(part)
            return 0, False
        return left, shares

    visit(module, 0)
    if not found:
        parts = [part for child in module.children() for part in child.children()]
        largest = max((sum(each.numel() for each in part.parameters()) for part in parts), default=0)
        raise ConfigError(
            f"blocks={least!r}: expected a number of parameters that a module below {type(module).__qualname__}'s "
            f"submodules has, without sharing them with another module; the largest has {largest}"
        )
    return found


class FsdpParallel(Parallelism):
    """FSDP2 through failures.

    Args:
        strategy: the strategy that it belongs to.
        size: lanes of a replica, among which FSDP2 divides tensors; None: those of a node.
        slices: workers of a lane, among which tensor parallelism divides them.
        sharding: options for a module that does not shard itself.
        folders: whether checkpoints are folders with a file for each shard.
        rebalance: a replica that is slower than the others gets fewer rows of a step.
        divergence: compares the parameters of the replicas.

    Attributes:
        size: lanes of a replica.
    """

    whole = False
    shuffles = True
    steps: ShardedSteps
    checkpoints: ShardedCheckpoints

    def __init__(
        self,
        strategy: FaultTolerantStrategy,
        size: int | None,
        slices: int,
        sharding: Sharding,
        *,
        folders: bool,
        rebalance: bool,
        divergence: Divergence,
    ) -> None:
        self.strategy = strategy
        self.size = size or 0
        self.shards = slices
        self.steps = ShardedSteps(self, divergence)
        self.evaluation = GlobalPasses(strategy, check_loader, partial(sharded_evaluation, self))
        self.checkpoints = ShardedCheckpoints(self, folders=folders)
        self.division = SpreadDivision(strategy, partial(getattr, self, "member"))
        self._sharding = sharding
        self._rebalance = rebalance
        self._holder: ShardHolder | None = None
        self._group: ShardGroup | None = None
        self._mesh: ReplicaMesh | None = None
        self._follows = False
        """Whether it takes over from the trainer before."""
        self._kind = ""
        """Description of what all trainers of a script have in common."""
        self._precision: Precision | None = None
        """Lightning's plugin for the shard, once it is made."""

    @property
    def holder(self) -> ShardHolder:
        """This worker's part in the world."""
        assert self._holder is not None, "no run has begun"
        return self._holder

    @property
    def member(self) -> ReplicaMember[FsdpShard]:
        """This worker's connections and shard."""
        return self.holder.member

    @property
    def shard(self) -> int:
        """Number of this worker's shard."""
        return self.member.fabric.own_shard

    # ---- a run's start

    def check(self, trainer: pl.Trainer) -> None:
        check_sharded_trainer(trainer, offloads=self._sharding.cpu_offload)
        self.size = self.size or max(1, trainer.num_devices // self.shards)
        workers = trainer.num_devices * trainer.num_nodes
        if workers % (self.size * self.shards):
            times = f" x tensor_parallel_size={self.shards}" if self.shards > 1 else ""
            raise ConfigError(
                f"devices x num_nodes = {trainer.num_devices} x {trainer.num_nodes} is no multiple of "
                f"shard_size={self.size}{times}"
            )

    def open(self, device: torch.device, shape: StepShape, on_world: Callable[[World], None]) -> tuple[Session, bool]:
        replicas = shape.devices // self.size
        declared = Shape(tensor=self.size, replicas=replicas, sharded=True, slices=self.shards)
        precision, self._follows = self.strategy.precision_plugin.precision, control_of_process() is not None
        self._kind = f"{self.size} x {self.shards} workers of {declared.workers} and precision {precision!r}"
        if self._follows:
            self._follow()
        else:
            self._holder = ShardHolder(declared)
        session, is_new = Session.of_process(device, declared.workers, on_world, self.holder.fabric)
        if not self._follows:
            self.holder.begin(session)
            _first[:] = [self] if control_of_process() is not None else []
        self._follows = False
        self.size = self.holder.fabric.shape.width  # an operator's order replaces the script's
        return session, is_new

    def _follow(self) -> None:
        """Use connections, mesh and shard of the script's first trainer.

        Raises:
            ConfigError: it has another strategy, or other sizes or precision.
        """
        earlier = _first[0] if _first else None
        if earlier is None or earlier._kind != self._kind:
            raise ConfigError(
                f"a further Trainer of this script has unicron_fsdp with {self._kind}, the first one "
                f"{'another strategy' if earlier is None else earlier._kind}; expected the same for all"
            )
        self._holder, self._group, self._mesh = earlier._holder, earlier._group, earlier._mesh
        self._precision = earlier._precision

    def begin(self, session: Session) -> None:
        strategy = self.strategy
        if self._mesh is not None:
            check_same_module(strategy.module, self._mesh)
            return
        self._group = self.holder.make_group(session, strategy.local_rank)
        self._mesh = ReplicaMesh(self._group, strategy.root_device)
        strategy.module._device_mesh = self._mesh  # type: ignore[assignment]

    def place(self, module: pl.LightningModule, device: torch.device) -> None:
        """Leave the module where it is: FSDP2 moves it block by block, and offloaded shards stay in host memory."""

    def set_up_optimizers(self, trainer: pl.Trainer, default: Callable[[pl.Trainer], None]) -> None:
        """Shard the module unless ``configure_model`` has done so, and set up its own optimizer."""
        strategy = self.strategy
        self._build()
        default(trainer)
        check_optimizers(strategy.optimizers)
        optimizer = strategy.optimizers[0]
        assert isinstance(optimizer, Optimizer)
        whole = needs_whole(optimizer)
        self.member.model.begin_fit(optimizer, whole=whole)
        if whole:
            self._stage_updates(trainer, optimizer)
        else:
            optimizer.register_step_post_hook(self._stepped)

    def _build(self) -> None:
        """Make this worker's shard of the model."""
        strategy, member, mesh = self.strategy, self.member, self._mesh
        if member.fabric.built:
            strategy.precision_plugin = self._precision or strategy.precision_plugin
            return
        assert self._group is not None and mesh is not None
        precision = shard_module(strategy.module, mesh.shards, self._sharding, strategy.precision_plugin)
        strategy.precision_plugin = self._precision = precision
        _first[:] = [self] if _first else []
        clip_by_agreed_norm(precision, lambda: member.model.grad_norm, lambda: member.model.stages)
        keep_spares(precision, lambda: self.holder.is_spare, self._updates)
        check_sharded_module(strategy.module)
        sum_gradients(strategy.module)
        device = strategy.root_device
        place_rest(strategy.module, device)
        accelerator = accelerator_for(device, lambda: strategy.engine.check())
        exact = strategy.reproducible
        model = FsdpShard(strategy.module, self._group, device=device, accelerator=accelerator, exact=exact)
        self.holder.hold(model, strategy.shape.micro_batches)

    def _stage_updates(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Update whole matrices before the commit; the optimizer's own step then takes the new values.

        Raises:
            ConfigError: the module clips gradients itself, which comes after the commit.
        """
        model = self.member.model
        if is_overridden("configure_gradient_clipping", self.strategy.module):
            raise ConfigError(
                f"{type(self.strategy.module).__qualname__}.configure_gradient_clipping with "
                f"{type(optimizer).__name__}, which updates before gradients are handed out; expected "
                "Trainer(gradient_clip_val=...)"
            )
        [updates] = model.updates.values()
        updates.prepared = partial(clipped, trainer, lambda: model.grad_norm)
        updates.step_by(optimizer, self.member.update)

    def _updates(self, optimizer: Optimizer) -> None:
        """Refuse collectives until the optimizer has stepped: after the commit no failure can be recovered."""
        if self._group is not None and not self.member.model.stages:
            self._group.refuse(
                f"{type(optimizer).__qualname__} lets the shards of parameters communicate in its update, which comes "
                "after the commit of the step; expected an optimizer that works on each element, such as AdamW, or a "
                "class with the attribute needs_whole_parameters = True, whose update then gets whole parameters"
            )

    def _stepped(self, *_: Any) -> None:
        if self._group is not None:
            self._group.refuse("")
        if self.member.fabric.phase == "ready":
            self.member.fabric.stepped()

    def built(self) -> None:
        self.steps.begin_fit(balance_of(self.strategy.engine, self._all_rows) if self._rebalance else None)

    def _all_rows(self) -> int:
        """Number of rows of a whole step of the present epoch."""
        epoch = self.strategy.trainer.current_epoch
        return number_of_rows(range(self.strategy.shape.of(epoch).micro_batches), self.size)

    def found(self, *, resumes: bool) -> None:
        self._build()
        self.holder.found(self.strategy.engine)

    def predictions(self, trainer: pl.Trainer, engine: Engine) -> ShardedPredictions:
        return ShardedPredictions(trainer, self)

    # ---- worlds

    @property
    def spares(self) -> int:
        return 0 if self._holder is None else self.member.spares

    def enter(self, world: World) -> None:
        if not self._follows:  # it has been entered by the trainer before
            self.holder.enter(world, lambda: self.strategy.engine)

    def share(self, micro_batches: range) -> list[int]:
        return self.holder.share(micro_batches, self.steps.balance)

    def own(self, in_full_step: Sequence[int]) -> list[int]:
        return self.holder.own(in_full_step, self.steps.balance)

    def at_boundary(self) -> None:
        self.member.fabric.leave_if_surplus()

    def state(self, trainer: pl.Trainer) -> dict[str, Any]:
        return join_state.parameter_state(trainer)

    def snapshot(self) -> Callable[[], None]:
        fabric, model = self.member.fabric, self.member.model
        at, state = fabric.at, codec.encode(model.plain_state())

        def restore() -> None:
            if fabric.at == at:  # otherwise another worker has sent a newer one
                model.load_state(codec.decode(state))

        return restore

    def finish(self) -> None:
        self.member.finish(self.strategy.engine)

    def digest(self) -> str:
        return self.holder.digest(self.strategy.engine, self.strategy.module)

    def close(self) -> None:
        """Keep the shard for the script's next run."""


_first: list[FsdpParallel] = []
"""That of this process's first trainer in its task."""
_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def check_sharded_trainer(trainer: pl.Trainer, *, offloads: bool) -> None:
    """Refuse trainer settings.

    Args:
        trainer: of the script.
        offloads: whether the strategy has ``cpu_offload=True``.

    Raises:
        ConfigError: naming the setting.
    """
    if str(trainer.precision) not in _PRECISIONS:
        raise ConfigError(
            f"Trainer(precision={trainer.precision!r}): unicron_fsdp supports {', '.join(map(repr, _PRECISIONS))}"
        )
    check_device(trainer.strategy.root_device)
    if offloads and trainer.strategy.root_device.type == "cpu":
        raise ConfigError(
            "cpu_offload=True: with accelerator='cpu' parameters and optimizer are in host memory already; expected "
            "False"
        )


def check_sharded_module(module: pl.LightningModule) -> None:
    """Refuse models that are not sharded as expected.

    Raises:
        ConfigError: naming the parameter.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and not is_divided_as_expected(parameter):
            raise ConfigError(
                f"parameter {name} has the placements {parameter.placements} on a mesh of {parameter.device_mesh.ndim} "
                "dimensions; expected fully_shard on device_mesh['data_parallel'], which shards along the first axis"
            )


def check_same_module(module: pl.LightningModule, mesh: object) -> None:
    """Refuse another module than that of the script's earlier runs.

    Raises:
        ConfigError: naming it.
    """
    if module._device_mesh is not mesh:
        raise ConfigError(
            f"this {type(module).__qualname__} is not the module of the script's first run; unicron_fsdp supports one"
        )
