"""The Lightning strategy ``unicron_megatron``: megatron-core's parallelism, trained straight through failures.

The module builds its stage of the model in ``configure_model``; Megatron's schedules, data parallelism and optimizers
do the rest, unpatched. The unit of failure is a replica of the model, TP x PP workers (docs/megatron.md). Data,
logging, joining and Lightning's loops work as with `UnicronStrategy`.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch.core.optimizer import _configure_schedulers_automatic_opt
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor
from typing_extensions import override

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.seeding import preserved
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron import checkpoint
from unicron_lightning.megatron.grid import Shape
from unicron_lightning.megatron.keeper import check_redundancy
from unicron_lightning.megatron.model import ShardModel
from unicron_lightning.megatron.world import build_world, enter_world, leave_world
from unicron_lightning.replica.fabric import ReplicaFabric
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.replica.start import InitialState, transfer
from unicron_lightning.replica.step import ReplicaStep
from unicron_lightning.strategies import join_state
from unicron_lightning.strategies.checks import check_module
from unicron_lightning.strategies.global_batch import declare
from unicron_lightning.strategies.megatron_batches import StageBatches
from unicron_lightning.strategies.megatron_building import build_shard
from unicron_lightning.strategies.megatron_checkpoints import LoadCheckpoint, SaveCheckpoint
from unicron_lightning.strategies.megatron_checks import check_megatron_loader, check_megatron_trainer
from unicron_lightning.strategies.megatron_lightning import keep_to_itself
from unicron_lightning.strategies.megatron_optimizer import MegatronOptimizer, split_configuration
from unicron_lightning.strategies.megatron_relayout import part
from unicron_lightning.strategies.megatron_validation import pass_loader, run_validation
from unicron_lightning.strategies.recording import RecordingResults
from unicron_lightning.strategies.reporting import told_flops
from unicron_lightning.strategies.session import Session
from unicron_lightning.strategies.timed import TimedValidation
from unicron_lightning.strategies.unicron import UnicronStrategy
from unicron_lightning.worker import codec
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.ledger import share

logger = logging.getLogger(__name__)


class UnicronMegatronStrategy(UnicronStrategy):
    """Training with megatron-core through failures.

    Args:
        tensor_model_parallel_size: TP, unless an operator has ordered another one since.
        pipeline_model_parallel_size: PP; the same.
        ddp: configuration of Megatron's data parallelism.
        sequence_length: length of the tensors between pipeline stages; default: the model's ``max_sequence_length``.
        num_micro_batches: M of a global batch, instead of accumulate_grad_batches x replicas.
        redundancy: redundancy of the distributed optimizer's shards (``ddp.use_distributed_optimizer``); default: one
            copy of each.

    Raises:
        ConfigError: for settings that can't be supported exactly; see `megatron_checks`.
    """

    strategy_name = "unicron_megatron"
    _replicated = False
    _divided = True
    _shuffles = False

    def __init__(
        self,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        ddp: DistributedDataParallelConfig | None = None,
        sequence_length: int | None = None,
        num_micro_batches: int | None = None,
        redundancy: Redundancy | None = None,
    ) -> None:
        super().__init__(num_micro_batches=num_micro_batches)
        for name, size in (
            ("tensor_model_parallel_size", tensor_model_parallel_size),
            ("pipeline_model_parallel_size", pipeline_model_parallel_size),
        ):
            if size < 1:
                raise ConfigError(f"{name}={size!r}: expected 1 or more")
        self._tensor, self._pipeline = tensor_model_parallel_size, pipeline_model_parallel_size
        self._ddp = ddp if ddp is not None else DistributedDataParallelConfig()
        self._redundancy = check_redundancy(redundancy, distributed=self._ddp.use_distributed_optimizer)
        self._sequence_length = sequence_length
        self._grad_norm = 0.0
        self._fabric: ReplicaFabric[Shape] | None = None
        self._resumes: str | None = None
        self._restores_late = True
        self._shard_model: ShardModel | None = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="Megatron-core straight through failures")

    @property
    def fabric(self) -> ReplicaFabric[Shape]:
        """This worker's place in the grid of replicas."""
        assert self._fabric is not None, "no run has begun"
        return self._fabric

    @property
    def tensor_model_parallel_size(self) -> int:
        """The present TP, for which ``configure_model`` has to build."""
        return self._tensor if self._fabric is None else self._fabric.shape.tensor

    @property
    def pipeline_model_parallel_size(self) -> int:
        """The present PP."""
        return self._pipeline if self._fabric is None else self._fabric.shape.pipeline

    @property
    def model_shard(self) -> ShardModel:
        """This worker's part of the model, with Megatron's data parallelism and optimizer."""
        assert self._shard_model is not None, "no run has begun"
        return self._shard_model

    @property
    def coordinate(self) -> tuple[int, int]:
        """Tensor-parallel rank and pipeline stage."""
        assert self.fabric.shard is not None
        return self.fabric.shape.coordinate(self.fabric.shard)

    @property
    def seed(self) -> int:
        """The task's seed."""
        return self._seed

    @property
    def grad_norm(self) -> float:
        """Norm of the last finished step's gradients, before clipping."""
        return self._grad_norm

    # ---- start

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        check_megatron_trainer(trainer)
        if self._runs > 0 or trainer.state.fn != TrainerFn.FITTING:
            raise ConfigError(
                "the unicron_megatron strategy supports one trainer.fit per script, and nothing beside it"
            )
        super().setup_environment()
        assert self._session is not None
        if self._session.is_joiner:
            self.fabric.take_shard(self.local_rank)
        self._restores_late = not (self._session.is_joiner or self._session.resume)
        build_world(self.fabric.shape, self.fabric.own_shard, self.root_device)
        tensor_parallel.model_parallel_cuda_manual_seed(self._seed & 0x7FFFFFFF)

    @override
    def _declare(self, trainer: pl.Trainer) -> StepShape:
        return declare(trainer, self._num_micro_batches, self._tensor * self._pipeline)

    @override
    def _open_session(self, shape: StepShape) -> tuple[Session, bool]:
        grid = Shape(tensor=self._tensor, pipeline=self._pipeline, replicas=shape.devices)
        self._fabric = ReplicaFabric(grid, copies=None if self._redundancy is None else self._redundancy.copies)
        capacity = grid.replicas * grid.shards
        session, is_new = Session.of_process(self.root_device, capacity, self._on_world, self._fabric)
        self._fabric.begin(session.control, joins=session.is_joiner)
        return session, is_new

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        module, session = self.lightning_module, self._session
        assert module is not None and session is not None
        check_module(module)
        if self.engine.control is not None:
            self.engine.control.flops_per_step = told_flops(module)
        self._gather.interrupted = lambda: trainer.state.status == TrainerStatus.INTERRUPTED
        trainer.fit_loop.epoch_loop._results = RecordingResults(True, self.reduce)
        trainer.fit_loop.epoch_loop.val_loop._results = RecordingResults(False, self.reduce)
        self._timed = TimedValidation(trainer, lambda due: bool(self.broadcast(due)))
        keep_to_itself(trainer)
        ParallelStrategy.setup(self, trainer)
        session.fits += 1
        if session.is_joiner and not self.engine.has_state:
            self._join(trainer)
        else:
            self._enter_grid(self.engine.world)
            self.engine.run(InitialState(self.fabric, self.model_shard))
            self._founded()
            known, session.resume = session.resume, ()
            if known:
                self._arrival = whole = self._resume(trainer, known)
                if whole is not None:
                    self._seed = whole["seed"]
                    self._optimizer.set_rates(whole["rates"])

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Set up Megatron's data parallelism around the module's model, and its optimizer."""
        module, shape = self.lightning_module, self._shape
        assert module is not None and shape is not None
        returned = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=module)
        config, scheduler = split_configuration(returned)
        self._shard_model = build_shard(
            module,
            self._ddp,
            config,
            self.fabric,
            micro_batches=shape.micro_batches,
            length=self._sequence_length,
            redundancy=self._redundancy,
        )
        self._optimizer = MegatronOptimizer(lambda: self.model_shard.optimizer, self._update)
        made = [] if scheduler is None else [scheduler(self._optimizer)]
        self.optimizers = [self._optimizer]
        self.lr_scheduler_configs = _configure_schedulers_automatic_opt(made, None)

    @override
    def _join(self, trainer: pl.Trainer) -> dict[str, Any]:
        state = super()._join(trainer)
        self._founded()
        self._optimizer.set_rates(state["rates"])
        return state

    def _founded(self) -> None:
        if self.model_shard.keeper is not None:
            self.model_shard.keeper.founded = True

    @override
    def _donate(self, trainer: pl.Trainer) -> bytes:
        return codec.encode(self._state(trainer))

    def _state(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the state of the loops and the optimizer's rates, at a step boundary."""
        assert self._session is not None
        state = join_state.loop_state(trainer, self._layout, self._seed, self._session.fits)
        return {**state, "rates": self._optimizer.rates()}

    @override
    def _part(self, trainer: pl.Trainer) -> None:
        part(self, trainer, self._state(trainer))

    # ---- worlds

    @override
    def _on_world(self, world: World) -> None:
        super()._on_world(world)
        if world.epoch > 0:
            self._enter_grid(world)

    @torch.enable_grad()
    def _enter_grid(self, world: World) -> None:
        """Give the epoch's connections to Megatron, and transfer this shard's state to ranks that need it.

        Gradients are enabled even in a validation, because Megatron attaches its hooks to the graph.

        Raises:
            CommunicatorAborted, EpochChanged: a member failed.
        """
        fabric, model = self.fabric, self._shard_model
        channels, place = fabric.enter(), fabric.place
        if model is None:
            return
        if channels is None:
            leave_world()
        else:
            model.adopt(enter_world(channels, fabric.shape, self.root_device, self.engine.check))
            fabric.watch()
        self.engine.check()
        transfer(fabric, model)
        if model.keeper is not None and place is not None and place.built and world.epoch > 0:
            model.keeper.enter(self.engine, channels, place.layout.newest)

    @override
    def boundary(self, trainer: pl.Trainer) -> None:
        super().boundary(trainer)
        self.fabric.leave_if_surplus()

    @override
    def share(self, micro_batches: range) -> list[int]:
        place = self.fabric.place
        if place is None or place.replica is None:
            return []
        return share(micro_batches, place.replica, len(place.layout.replicas))

    # ---- the step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, trainer, fabric, model = args[0], self._trainer, self.fabric, self.model_shard
        assert isinstance(batch, GlobalBatch) and trainer is not None
        runner = StageBatches(self, trainer, batch, args[1] if len(args) > 1 else 0)
        call = partial(model.call, runner.forward)
        operation = ReplicaStep(batch.micro_batches, model, fabric, call, lambda done: runner.sums(self._layout, done))
        with self._gather.refused("training_step"), preserved():
            self.engine.run(operation)
        assert operation.sums is not None
        self._grad_norm = operation.grad_norm
        loss, calls, _ = operation.sums.finish()
        self._reports.finished(self.engine, operation, loss)
        results = trainer.fit_loop.epoch_loop._results
        assert isinstance(results, RecordingResults) and self.lightning_module is not None
        for logged in calls:
            results.replay(logged, self.lightning_module, self.root_device)
        return torch.tensor(loss, device=self.root_device)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss: Megatron's schedule has run the backward."""
        return closure_loss

    def _update(self) -> None:
        """Update after the commit, without other workers. The distributed optimizer has done its part before."""
        fabric, model = self.fabric, self.model_shard
        if fabric.phase == "ready":
            if model.keeper is None:
                model.update()
            fabric.stepped()

    # ---- validation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> None:
        """Run a global batch of the pass, forward only."""
        assert self._trainer is not None
        with self._gather.refused("validation_step"), preserved():
            run_validation(self, self._trainer, *args)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._loaders.end_passes()

    # ---- checkpoints, end

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty state: see `save_checkpoint`."""
        return {}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning restores checkpoints after `setup`, when Megatron's optimizer exists; peers' state comes
        last.
        """
        return self._restores_late

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder in Megatron's format, with all workers (`unicron_lightning.megatron.checkpoint`)."""
        if self._gather.interrupted():
            logger.warning("checkpoint_left_out path=%s reason=interrupted, and it needs all workers", filepath)
            return
        path = str(Path(str(filepath)).absolute())
        with self.engine.activity.during("checkpoint"):
            digest = self.engine.run(SaveCheckpoint(self.fabric, self.model_shard, path, checkpoint)).decode()
        self._tell_checkpoint(checkpoint, path, digest)
        if self.model_shard.keeper is not None:
            self.model_shard.keeper.saved = int(checkpoint["global_step"])

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load Lightning's part; `load_model_state_dict` reads the model's once it exists."""
        path = self._readable(str(Path(str(checkpoint_path)).absolute()))
        rest = checkpoint.rest(path)
        self._resumes = path
        return rest

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load model and optimizer of the path given to `load_checkpoint`, if any; joiners call this, too."""
        path, self._resumes = self._resumes, None
        if path is not None and self._shard_model is not None:
            self.engine.run(LoadCheckpoint(self.fabric, self._shard_model, path, int(checkpoint["global_step"])))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._trainer is not None and self._shape is not None
        if not self._trainer.training:
            return self._loaders.keep(pass_loader(self, self._trainer, dataloader, self._shape))
        self.model_shard.micro_batch_size = check_megatron_loader(dataloader)
        return super().process_dataloader(dataloader)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._shard_model is not None and self._shard_model.keeper is not None:
            self._shard_model.keeper.close()
        if self._fabric is not None:
            leave_world()
