"""The Lightning strategy ``unicron``: data parallelism that trains straight through failures.

One Lightning batch is one **global batch**: ``accumulate_grad_batches x devices x num_nodes`` micro-batches, for the
whole life of the task and whatever its present world is. The module's `training_step` is called once per
micro-batch; Lightning's batch hooks and counters see one batch per optimizer step, so they never depend on the world.
Failures are recovered inside `UnicronStrategy.training_step` and the other operations; joiners enter before a step.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.seeding import preserved
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies import default_group, join_state
from unicron_lightning.strategies.checkpointing import CheckpointingStrategy
from unicron_lightning.strategies.checks import check_module, check_optimizers, check_trainer
from unicron_lightning.strategies.describing import describe_data, describe_model
from unicron_lightning.strategies.divergence import Divergence, OnDivergence
from unicron_lightning.strategies.environment import own_device
from unicron_lightning.strategies.evaluation import Passes
from unicron_lightning.strategies.global_batch import declare
from unicron_lightning.strategies.loading import Loaders
from unicron_lightning.strategies.loggers import follow, take_over
from unicron_lightning.strategies.micro_batch import MicroBatches
from unicron_lightning.strategies.module_buffers import ModuleBuffers
from unicron_lightning.strategies.recording import RecordingResults
from unicron_lightning.strategies.reporting import StepReports, balance_of, report_exception, told_flops
from unicron_lightning.strategies.session import Session
from unicron_lightning.strategies.step_metrics import StepMetrics
from unicron_lightning.strategies.sums import NormStatistics, StepSums, SumsLayout
from unicron_lightning.strategies.timed import TimedValidation
from unicron_lightning.strategies.trained import TrainedParameters
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import check_agreement
from unicron_lightning.worker.balance import Balance, deal
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.control.statistics import Summary
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.ledger import share
from unicron_lightning.worker.operations import Agreement, Join, unpack_parts
from unicron_lightning.worker.step import GradientStep

_MIB = 1 << 20


class UnicronStrategy(CheckpointingStrategy):
    """Data parallelism through failures, for any `LightningModule` with automatic optimization.

    Args:
        bucket_mib: size of a gradient bucket, in MiB.
        overlap: start reductions during the last micro-batch's backward.
        num_micro_batches: M of a global batch, instead of accumulate_grad_batches x devices x num_nodes.
        rebalance: a rank that is slower than the others gets fewer of a step's micro-batches.
        compare: workers compare seed, data, parameters and settings when the task begins and at each join, and one that
            differs is refused; see `describing`. Set False if `hparams` differ on purpose.
        digest_every: number of steps between two comparisons of the workers' parameters, by a digest in the commit. 0:
            never.
        on_divergence: ``heal`` replaces workers whose parameters differ from most, ``stop`` ends the task; see
            `divergence`.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: given by Lightning.

    Raises:
        ConfigError: for settings that can't be supported exactly; see `checks`.
    """

    strategy_name = "unicron"
    _shuffles = True
    """Whether training data is shuffled as under ddp."""

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        *,
        bucket_mib: float = 25.0,
        overlap: bool = True,
        num_micro_batches: int | None = None,
        rebalance: bool = False,
        compare: bool = True,
        digest_every: int = 100,
        on_divergence: OnDivergence = "heal",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if bucket_mib <= 0:
            raise ConfigError(f"bucket_mib={bucket_mib!r} must be above 0 (MiB)")
        self.num_nodes = 1  # of the declared world; set by Lightning from Trainer(num_nodes=...)
        self._bucket_bytes = int(bucket_mib * _MIB)
        self._overlap = overlap
        self._num_micro_batches = num_micro_batches
        self._rebalance = rebalance
        self._compares = compare and self._replicated
        self._divergence = Divergence(digest_every if self._replicated else 0, on_divergence)
        self._balance: Balance | None = None
        self._session: Session | None = None
        self._passes: Passes | None = None
        self._trained = TrainedParameters()
        self._gradients: GradientBuckets | None = None
        self._norms: NormStatistics | None = None
        self._metrics: StepMetrics | None = None
        self._buffers: ModuleBuffers | None = None
        self._layout = SumsLayout()
        self._arrival: dict[str, Any] | None = None
        self._parts = False
        self._used: list[bool] = []
        self._last_batch: GlobalBatch | None = None
        self._reports = StepReports()
        self._checked = False
        self._described: dict[str, str] = {}
        self._seed = 0
        self._loaders = Loaders(self, shuffles=self._shuffles)
        self._runs = 0
        self._broken_off = False
        """Whether an exception has ended the present run."""

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="Trains straight through failures (Unicron)")

    # ---- identity

    @property
    @override
    def engine(self) -> Engine:
        """This worker's engine, which exists from the first ``fit``, ``validate`` or ``test`` on."""
        assert self._session is not None, "no run has begun"
        return self._session.engine

    @property
    def statistics(self) -> Summary | None:
        """Statistics of this worker's steps, see `Summary`, for callbacks; None before the first run."""
        return None if self._session is None else self._session.statistics()

    @property
    def passes(self) -> Passes:
        """The evaluation passes of the present run."""
        assert self._passes is not None, "no run has begun"
        return self._passes

    @property
    @override
    def root_device(self) -> torch.device:
        return own_device(self.parallel_devices or [], self.local_rank, self._environment.local_world)

    @property
    def num_processes(self) -> int:
        """Workers of a node in the declared world, as in Lightning's parallel strategies."""
        return len(self.parallel_devices or [None])

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return True

    def _on_world(self, world: World) -> None:
        was_first = self.global_rank == 0
        self._environment.set_world_size(world.size)
        self._environment.set_global_rank(world.rank)
        default_group.follow()
        if world.rank == 0 and not was_first and self._trainer is not None:
            take_over(self._trainer.loggers)

    # ---- start

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        check_trainer(trainer)
        self._loaders.attend(trainer)
        if self._shape is None:
            self._shape = self._declare(trainer)
        self._runs += 1
        self._broken_off = False
        begins, is_new = self._session is None, False
        if self._session is None:  # before the device is touched: a warm worker waits in there until it has a slot
            self._session, is_new = self._open_session(self._shape)
        self._begin_collectives(self._session, trainer, records=is_new)
        self._session.runs(active=True)
        self.engine.activity.enter("start")
        super().setup_environment()
        self._gather.scope = f"{self._runs}"
        if begins:
            seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() & 0xFFFFFFFF))
            self._seed = self._gather.broadcast(seed, 0)

    def _declare(self, trainer: pl.Trainer) -> StepShape:
        return declare(trainer, self._num_micro_batches)

    def _open_session(self, shape: StepShape) -> tuple[Session, bool]:
        return Session.of_process(self.root_device, shape.micro_batches, self._on_world)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        module = self.lightning_module
        assert module is not None and self._session is not None
        check_module(module)
        if (control := self.engine.control) is not None:
            control.flops_per_step = told_flops(module)
        self._gather.interrupted = lambda: trainer.state.status == TrainerStatus.INTERRUPTED
        follow(trainer.loggers)
        self._passes = Passes(trainer, self.engine)
        self._timed = TimedValidation(trainer, lambda due: bool(self.broadcast(due)))
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
            loop._results = RecordingResults(
                False, self.reduce, self._passes.epoch_metrics, lambda: trainer.sanity_checking
            )
        trainer.fit_loop.epoch_loop._results = RecordingResults(True, self.reduce)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            check_optimizers(self.optimizers)
            self._norms = NormStatistics(module)
            self._metrics = StepMetrics(module)
            self._buffers = ModuleBuffers(module)
            if self._rebalance and self._shape is not None:
                self._balance = balance_of(self.engine, self._shape.micro_batches)
            self._session.fits += 1
            self._described = describe_model(trainer) if self._compares else {}
        if self._session.is_joiner and not self.engine.has_state:
            if trainer.state.fn == TrainerFn.FITTING:
                self._join(trainer)
        elif self._session.resume and trainer.state.fn == TrainerFn.FITTING:
            known, self._session.resume = self._session.resume, ()
            self._arrival = self._resume(trainer, known)
        elif self.engine.world.size > 1 and self._gather.starting:
            if self._compares:
                self._agree("model", self._described)
            join_state.share_initial(module, self.engine)
            join_state.share_versions(trainer, self.engine)

    def _join(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Join the task; work that needs no state is done before the members have to wait for this worker."""
        assert self._session is not None
        trainer.num_sanity_val_steps = 0
        trainer.fit_loop.setup_data()
        join_state.warm_up()
        self._checked = True  # by the members, when they began
        self._session.wait_admission()
        join = Join(lambda: b"")
        self.engine.run(join)
        assert join.received is not None
        state: dict[str, Any] = codec.decode(join.received)
        self._session.check_fit(state["fit"])
        self._describe_data()
        if self._compares and (expected := state.get("described")):
            check_agreement(self._described, [expected], node=self._node())
        self._seed = state["seed"]
        join_state.receive(trainer, state)
        self._arrival, self._parts = state, join.parts
        return state

    # ---- data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        assert trainer is not None and self._shape is not None
        return self._loaders.wrap(trainer, dataloader, self._shape, self._seed)

    def share(self, micro_batches: range) -> list[int]:
        """Return this rank's micro-batches of a step in the present world."""
        counts = None if self._balance is None else self._balance.counts(len(micro_batches))
        world = self.engine.world
        if counts is None:
            return share(micro_batches, world.rank, world.size)
        return deal(micro_batches, counts)[world.rank]

    def boundary(self, trainer: pl.Trainer) -> None:
        """Enter or leave worlds between steps: the only place where a world grows, or is left on order."""
        engine = self.engine
        engine.activity.enter("boundary")
        self._gather.starting = False
        join_state.note_epoch(trainer)
        if self._arrival is not None:
            state, self._arrival = self._arrival, None
            join_state.arrive(trainer, state, self._layout, self.root_device)
        elif self._logged is not None:
            join_state.restore_logged(trainer, self._logged, self.root_device)
        self._logged = None
        if trainer.received_sigterm:
            raise SIGTERMException
        engine.step = trainer.global_step
        if engine.control is not None and not self._checked:
            self._checked = True
            join_state.check(trainer)
            if self._compares:
                self._describe_data()
                self._agree("training", self._described)
        join = Join(lambda: self._donate(trainer))
        engine.switch(join)
        if join.parts or self._parts:
            self._part(trainer)
        engine.activity.enter("hooks")

    def _part(self, trainer: pl.Trainer) -> None:
        """Write the checkpoint for another layout, for strategies whose model is spread over workers."""
        raise AssertionError("a layout can be ordered only for a model that reports one")

    def _donate(self, trainer: pl.Trainer) -> bytes:
        """Return this worker's state at a step boundary, for a joiner."""
        assert self._session is not None
        return join_state.donate(trainer, self._layout, self._seed, self._session.fits, self._described)

    # ---- agreement of all workers

    def _describe_data(self) -> None:
        """Add the data to this worker's description."""
        loader = self._loaders.training
        if self._compares and loader is not None:
            self._described = {**self._described, **describe_data(loader)}

    def _agree(self, name: str, described: dict[str, str]) -> None:
        """Compare with the other workers, once all have arrived.

        Raises:
            WorkersDiffer: if this worker differs.
        """
        said = self.engine.run(Agreement(f"agree on {name}", lambda rank: codec.encode(described)))
        check_agreement(described, [codec.decode(part) for part in unpack_parts(said)], node=self._node())

    def _node(self) -> str:
        world = self.engine.world
        return world.nodes[world.rank] if world.nodes else "local"

    # ---- the step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch = args[0]
        if not isinstance(batch, GlobalBatch):
            raise ConfigError(
                f"the training data is a {type(batch).__qualname__} of several loaders; the unicron strategy takes one "
                "DataLoader: combine the data sets into one"
            )
        trainer, module, shape, norms, buffers, metrics = (
            *(self._trainer, self.lightning_module, self._shape),
            *(self._norms, self._buffers, self._metrics),
        )
        assert trainer is not None and module is not None and shape is not None
        assert norms is not None and buffers is not None and metrics is not None
        if batch is self._last_batch:
            raise ConfigError(
                f"the optimizer {type(self.optimizers[0]).__qualname__} calls its closure more than once per step; the "
                "unicron strategy supports one forward and backward per step"
            )
        self._last_batch = batch
        gradients = self._gradient_buckets(module, first=batch.step == 0)
        gradients.begin()
        norms.begin()
        metrics.begin(anew=batch.step == 0)
        buffers.begin(batch.micro_batches[0], self._layout.buffers)
        sums = StepSums(self._layout, norms, buffers, gradients, metrics)
        parts = sums, norms, buffers, metrics
        runner = MicroBatches(self, trainer, module, shape, self._seed, batch, len(args) > 1, *parts)
        digest = self._divergence.digest(module.parameters(), self.engine)
        operation = GradientStep(batch.micro_batches, gradients, sums, runner.run, self._balance, digest)
        with self._gather.refused("training_step"), preserved():
            self.engine.run(operation)
        self._divergence.check(operation, self.engine)
        loss, calls, self._used = sums.finish()
        norms.commit(len(batch.micro_batches))
        self._reports.finished(self.engine, operation, loss)
        results = trainer.fit_loop.epoch_loop._results
        assert isinstance(results, RecordingResults)
        for call in calls:
            results.replay(call, module, self.root_device)
        return runner.output(loss)

    def _gradient_buckets(self, module: pl.LightningModule, first: bool) -> GradientBuckets:
        """Return the buckets, rebuilt when other parameters need gradients than before."""
        named = self._trained.find(module, self.optimizers, anew=first)
        if self._gradients is None or not self._gradients.matches([p for _, p in named]):
            if self._gradients is not None:
                self._gradients.close()
            self._gradients = GradientBuckets(named, self._bucket_bytes, self._overlap)
        return self._gradients

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Pass the gradients, summed over the global batch, to the optimizer, with the usual hooks."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None and self._gradients is not None
        # The base class's hook: the loss has been scaled already, micro-batch by micro-batch.
        Precision.pre_backward(plugin, closure_loss, module)
        self._gradients.install(self._used)
        return plugin.post_backward(closure_loss, module)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, which is the closure, and the optimizer's own work."""
        output = super().optimizer_step(*args, **kwargs)
        self._timed.stepped()
        self.engine.activity.enter("hooks")
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.passes.start_step()
        return super().validation_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self._timed.validated()

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.passes.start_step()
        return super().test_step(*args, **kwargs)

    # ---- the end

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, GlobalBatch) else super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._broken_off = True
        if self._session is not None:
            report_exception(self._session.control, exception, self.engine.step)

    @override
    def teardown(self) -> None:
        if self._session is not None:
            if not self._broken_off:
                self._session.runs(active=False)
            self.engine.activity.enter("over")
            self._end_collectives(self._session)
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        self._loaders.close()
        self._last_batch = None
        super().teardown()
