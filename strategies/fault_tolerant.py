"""Lightning's side of training straight through failures, for any `Parallelism`.

One Lightning batch is one **global batch**: ``accumulate_grad_batches x devices x num_nodes`` micro-batches, whatever
the task's present world is; the first factor may depend on the data epoch (`schedule`). The module's `training_step` is
called once per micro-batch; Lightning's batch hooks and counters see one batch per optimizer step, so they never depend
on the world.
Failures are recovered inside `FaultTolerantStrategy.training_step` and the other operations; joiners enter before a
step. Lightning's own collectives go through the engine, too (`CollectingStrategy`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.data import has_len_all_ranks
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from unicron_lightning import environ
from unicron_lightning.checkpoints.agent_memory import StateMemory
from unicron_lightning.checkpoints.files import located
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.seeding import preserved
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.checks import check_module, check_states, check_trainer
from unicron_lightning.strategies.collectives import default_group
from unicron_lightning.strategies.collectives.operations import Collectives
from unicron_lightning.strategies.console import Announcements, say, take_over_bar
from unicron_lightning.strategies.environment import UnicronEnvironment, own_device
from unicron_lightning.strategies.lightning_root import check_accelerator, is_other, meet, refuse
from unicron_lightning.strategies.membership import Membership
from unicron_lightning.strategies.metrics.loggers import (
    continue_files,
    continued,
    follow,
    is_log_dir,
    record_versions,
    take_over,
)
from unicron_lightning.strategies.metrics.recording import RecordingResults, logged_dtype
from unicron_lightning.strategies.parallelism import Parallelism
from unicron_lightning.strategies.passes.loaders import Loaders, install_estimates, loading
from unicron_lightning.strategies.reporting import RunLauncher, report_exception, told_flops
from unicron_lightning.strategies.schedule import Schedule, TimedValidation, declare
from unicron_lightning.strategies.state import callbacks, join_state
from unicron_lightning.strategies.state.checkpointing import Persisting, ResumedCheckpoints
from unicron_lightning.strategies.state.comparison import describe_model
from unicron_lightning.strategies.state.memory import WholeDivision
from unicron_lightning.strategies.stopping import Stopping, surround
from unicron_lightning.worker.comparison import Comparison
from unicron_lightning.worker.control.statistics import Summary
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.model_state import are_converted, keep_types
from unicron_lightning.worker.reporting import StepReports
from unicron_lightning.worker.reproducible import announced, restore_kernels, use_deterministic_kernels
from unicron_lightning.worker.session import Session
from unicron_lightning.worker.sums import LogCall, SumsLayout
from unicron_lightning.worker.witness import Witness

logger = logging.getLogger(__name__)


class CollectingStrategy(ParallelStrategy):
    """Collectives called by Lightning and scripts; before the first run no values are exchanged."""

    def __init__(self, **kwargs: Any) -> None:
        self._environment = UnicronEnvironment()
        super().__init__(cluster_environment=self._environment, **kwargs)
        self._collectives: Collectives | None = None
        self._is_first = True
        self._trainer: pl.Trainer | None = None
        self._loads = ""

    @property
    @override
    def accelerator(self) -> pl.accelerators.Accelerator | None:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: pl.accelerators.Accelerator) -> None:
        check_accelerator(accelerator, type(self))
        self._accelerator = accelerator

    @property
    def is_distributed(self) -> bool:
        """Whether there may be other workers: Lightning then calls `reduce` for values that hooks log."""
        return environ.under_agent()

    def _begin_collectives(self, session: Session, trainer: pl.Trainer, *, is_first: bool, is_group: bool) -> None:
        """Exchange values from now on; by `torch.distributed` too, if the workers are its default group."""
        if self._collectives is None:
            self._collectives = Collectives(session)
            self._is_first = is_first
        self._collectives.records = self._is_first or trainer.state.fn == TrainerFn.FITTING
        self._collectives.scope = f"{session.begin_run()}"
        if is_group:
            default_group.register(self._environment.place, self._collectives)
            default_group.keep_lightning_out(trainer)
            session.closing = default_group.unregister

    def _end_collectives(self, session: Session) -> None:
        """End a run; the default group of a world of this process alone ends with it."""
        if session.control is None:
            default_group.unregister()

    @property
    def collectives(self) -> Collectives:
        """Collectives of the present run."""
        assert self._collectives is not None, "collectives need a run"
        return self._collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if name is not None and name.endswith("_dataloader()"):  # no need to wait: see `reduce`
            self._loads = name.removesuffix("_dataloader()")
        elif self._collectives is not None:
            self._collectives.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._collectives is None:
            return obj
        if self._trainer is not None and self.collectives.inside is not None and is_log_dir(self._trainer, obj):
            return obj  # ``trainer.log_dir`` in a step: the loggers' versions are shared
        return self._collectives.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._collectives is None:
            return tensor
        if sys._getframe(1).f_code is has_len_all_ranks.__code__:
            # Lightning asks whether all ranks' loaders have a length. They are equal; and ranks set up loaders at
            # different places of the program (a joiner at its start), so this must not communicate.
            return tensor * self.world_size
        name = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1]
        return self._collectives.reduce(tensor, name.lower())

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide from the votes themselves: the world may have changed by the time all have arrived."""
        return decision if self._collectives is None else self._collectives.decide(decision, every=all)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise ConfigError("all_gather(sync_grads=True) is not supported by the unicron strategy")
        return tensor.unsqueeze(0) if self._collectives is None else self._collectives.stack("all_gather", tensor)


class FaultTolerantStrategy(CollectingStrategy):
    """Runs a trainer's loops through failures.

    Subclasses take the user's options, and set `parallelism`.

    Args:
        parallelism: made from this strategy.
        num_micro_batches: M of a global batch, instead of accumulate_grad_batches x devices x num_nodes.
        compare: workers are compared when the task begins and at each join; see `state.comparison`.
        reproducible: sums do not depend on the workers; see `worker.reproducible`.
        witness_every: steps between two in which other ranks repeat micro-batches; see `worker.witness`.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: given by Lightning.

    Attributes:
        strategy_name: of ``Trainer(strategy=...)``.
        reproducible: as above.
        witness: compares the workers' gradients.
        num_nodes: of the declared world; set by Lightning from ``Trainer(num_nodes=...)``.
        parallelism: how the workers hold the model and run its steps.
        agreed: what the members know of each step's sums.
        comparison: this worker's description of itself.
        reported: checkpoints that the coordinator knows.
        memory: states in the agents' memory.
        persisting: checkpoints that are written beside the training.
        loaders: the run's data loaders.
        schedule: follows the epochs, if the global batch changes.
        seed: the task's.
        evaluations: how often the present step has been run before, as LBFGS calls its closure several times.
    """

    strategy_name: str
    parallelism: Parallelism

    def __init__(
        self,
        *,
        num_micro_batches: int | None,
        compare: bool,
        reproducible: bool = False,
        witness_every: int | None = None,
        **lightning: Any,
    ) -> None:
        super().__init__(**lightning)
        if reproducible and not compare:
            raise ConfigError("reproducible=True with compare=False: workers of different kinds would not be found")
        self.reproducible = reproducible
        self.witness = Witness(witness_every, compare=compare)
        self._kernels: tuple[bool, ...] | None = None
        """Settings of kernels before a run that is reproducible, or has witnesses."""
        self.num_nodes = 1
        self.seed = 0
        self.agreed = SumsLayout()
        self.comparison = Comparison(self, active=compare)
        self.reported = ResumedCheckpoints()
        self.memory = StateMemory(self)
        self.persisting = Persisting(self)
        self._num_micro_batches = num_micro_batches
        self._shape: StepShape | None = None
        self._session: Session | None = None
        self.loaders = Loaders(self)
        self.schedule = Schedule()
        self._membership = Membership(self)
        self._reports = StepReports()
        self._announcements = Announcements()
        self._last_batch: GlobalBatch | None = None
        self._beside: bytes | None = None
        """What Lightning's part of a checkpoint that was read leaves out."""
        self.evaluations = 0
        self._states_are_plain = False
        """Whether the optimizers' states have been checked, after the first step."""
        self._restores: Literal["before", "after", "never"] = "before"
        """When Lightning restores the script's ``ckpt_path``, relative to `setup`."""
        self._broken_off = False
        """Whether an exception has ended the present run."""
        self._error: BaseException | None = None
        """It, until Lightning has called the hooks for it."""

    # ---- identity

    @property
    def engine(self) -> Engine:
        """This worker's engine, which exists from the first ``fit``, ``validate`` or ``test`` on."""
        return self.session.engine

    @property
    def session(self) -> Session:
        """This worker's part in its task."""
        assert self._session is not None, "no run has begun"
        return self._session

    @property
    def division(self) -> WholeDivision:
        """Division of states in the agents' memory."""
        return self.parallelism.division

    @property
    def statistics(self) -> Summary | None:
        """Statistics of this worker's steps, see `Summary`, for callbacks; None before the first run."""
        return None if self._session is None else self._session.statistics()

    @property
    def trainer(self) -> pl.Trainer:
        """The present run's trainer."""
        assert self._trainer is not None, "no run has begun"
        return self._trainer

    @property
    def module(self) -> pl.LightningModule:
        """The present run's module."""
        assert self.lightning_module is not None, "no run has begun"
        return self.lightning_module

    @property
    def shape(self) -> StepShape:
        """Micro-batches of a global batch."""
        assert self._shape is not None, "no run has begun"
        return self._shape

    @property
    def results(self) -> RecordingResults:
        """The values that training steps log."""
        results = self.trainer.fit_loop.epoch_loop._results
        assert isinstance(results, RecordingResults)
        return results

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
        self.persisting.settle()
        was_first = self.global_rank == 0
        self._environment.set_world_size(world.size)
        self._environment.set_global_rank(world.rank)
        default_group.follow()
        if world.rank == 0 and not was_first and self._trainer is not None and not self._membership.joins:
            take_over(self._trainer.loggers)
            take_over_bar(self._trainer)
        step = 0 if self._session is None else self.engine.step
        line = self._announcements.line(world, step, spares=self.parallelism.spares)
        if line is not None and self._trainer is not None:
            say(self._trainer, line)
        self.parallelism.enter(world)
        if self._session is not None:
            self._session.record_fit()
            if self._collectives is not None:
                self._collectives.record_start()

    def _end_training(self) -> None:
        self.parallelism.finish()
        self.await_rows()
        if self.reproducible and (found := self.parallelism.digest()) and self.is_global_zero:
            say(self.trainer, f"reproducible: digest {found} of the parameters, step {self.trainer.global_step}")

    def await_rows(self) -> None:
        """Wait until rank 0 has written its rows of the steps that are done: if it has died, another rank does."""
        if self.engine.world.size > 1 and continued(self.trainer.loggers):
            self.collectives.barrier()

    # ---- start

    @override
    def _configure_launcher(self) -> None:
        if environ.under_agent():
            self._launcher = RunLauncher(self._failed)

    @override
    def setup_environment(self) -> None:
        trainer, parallelism = self.module.trainer, self.parallelism
        parallelism.check(trainer)
        check_trainer(trainer, scheduled=parallelism.scheduled)
        self.loaders.attend(trainer)
        if self._shape is None:
            self._shape = declare(trainer, self._num_micro_batches, parallelism.shards, self.schedule)
        self._broken_off = False
        begins, is_new = self._session is None, False
        if self._session is None:  # before the device is touched: a warm worker waits in there until it has a slot
            self._session, is_new = parallelism.open(self.root_device, self._shape, self._on_world)
            if self._session.joins:
                self._environment.follow_members()
        self._begin_collectives(self._session, trainer, is_first=is_new, is_group=parallelism.whole)
        self._session.runs(active=True)
        callbacks.accept_own_configuration(trainer, self._session.control)
        self.engine.activity.enter("start")
        super().setup_environment()
        if begins:
            seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() & 0xFFFFFFFF))
            self.seed = self.collectives.broadcast(seed, 0)
            self._session.find_unreported()
        elsewhere = trainer.state.fn == TrainerFn.FITTING and self._session.has_newer_state
        if elsewhere and not self._session.joins and self._session.control is not None:
            continue_files(trainer.loggers, self._session.control, self._session.fits + 1)
        self._restores = "after" if elsewhere or not parallelism.whole else "before"
        parallelism.begin(self._session)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        session, parallelism, fitting = self.session, self.parallelism, trainer.state.fn == TrainerFn.FITTING
        check_module(self.module, manual=parallelism.optimizes_manually)
        if session.control is not None:
            session.control.flops_per_step = told_flops(self.module)
            if self._announcements.take not in session.control.listeners:
                session.control.listeners.append(self._announcements.take)
        self.collectives.interrupted = lambda: trainer.state.status == TrainerStatus.INTERRUPTED
        follow(trainer.loggers)
        callbacks.note_saved_configuration(trainer, session.control)
        self._timed = TimedValidation(trainer, lambda due: bool(self.broadcast(due)))
        self.stopping = Stopping(trainer, session.engine)
        surround(trainer.fit_loop, "on_run_end", before=self._end_training)
        dtype = logged_dtype(self.precision_plugin)
        trainer.fit_loop.epoch_loop._results = RecordingResults(True, self.reduce, dtype=dtype)
        parallelism.evaluation.begin_run(trainer)
        super().setup(trainer)
        if self.reproducible or self.witness.every:
            self._begin_repeatable(announces=fitting)
        if fitting:
            parallelism.built()
            session.fits += 1
            self.reported.fit = session.fits
            if session.control is not None:
                session.control.fit = session.fits
            self.comparison.begin(partial(describe_model, trainer))
            if session.control is not None and self.is_global_zero and not session.joins:
                record_versions(trainer.loggers, session.control, session.fits)
        if session.is_joiner and not self.engine.has_state:
            self._restores = "never"
            if fitting and session.is_past():
                self._membership.skip(trainer)
            elif fitting:
                self._membership.join(trainer)
            return
        session.record_fit()
        leaves_out = fitting and self._membership.leave_out(trainer)
        remembers = fitting and not leaves_out and self._membership.remember(trainer)
        known = any(checkpoint.fit >= session.fits for checkpoint in session.resume)
        resumes = fitting and not leaves_out and known
        if remembers or resumes or leaves_out:
            self._restores = "never"
        parallelism.found(resumes=resumes or remembers or leaves_out)
        if remembers:
            self._membership.remembered()
        elif resumes:
            self._membership.resume(trainer)
        elif self.engine.world.size > 1 and self.collectives.starting:
            join_state.share_versions(trainer, self.engine)

    def _begin_repeatable(self, *, announces: bool) -> None:
        if self._kernels is None:
            self._kernels = use_deterministic_kernels()
        if not (announces and self.is_global_zero) or self.session.is_joiner:
            return
        workers = self.parallelism.size * self.parallelism.shards
        if self.reproducible:
            say(self.trainer, announced(self.root_device, workers))
        if self.witness.every:
            say(self.trainer, self.witness.announced(self.engine.world.size, workers))

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.parallelism.set_up_optimizers(trainer, super().setup_optimizers)

    @override
    def on_train_start(self) -> None:
        self._membership.begun(self.trainer)

    # ---- data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._shape is None:  # the script sets up a loop's data without a run
            return dataloader
        with loading(self.module.trainer, self._loads):
            return self.loaders.wrap(self.module.trainer, dataloader)

    def share(self, micro_batches: range) -> list[int]:
        """Return this rank's micro-batches of a step in the present world."""
        return self.parallelism.share(micro_batches)

    @contextmanager
    def seen_as(self, rank: int, size: int) -> Iterator[None]:
        """Inside, the script sees this worker as a rank of the declared world."""
        with self._environment.seen_as(rank, size), default_group.seen(self._environment.place):
            yield

    def boundary(self, trainer: pl.Trainer) -> None:
        """Enter or leave worlds between steps."""
        if self.collectives.starting:
            self.collectives.starting = False
            self.collectives.record_start()
        self.session.joins = False
        self._membership.boundary(trainer)

    # ---- the step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *where = args
        if self._is_by_hand:
            with self.results.recording(batch) as calls:
                output = super().training_step(*args, **kwargs)
            self._log(calls)
            return output
        self._check_batch(batch)
        with self.collectives.refused("training_step"), preserved():
            step = self.parallelism.steps.run(batch, *where)
        self.loaders.committed(self.trainer, batch)
        if not self.evaluations:
            self._reports.finished(self.engine, step.operation, step.loss, batch.num_samples())
        self.stopping.committed()
        if self.parallelism.manual is not None:
            self._timed.stepped()
        self._log(step.calls)
        return step.output

    def _log(self, calls: Iterable[LogCall]) -> None:
        for call in calls:
            self.results.replay(call, self.module, self.root_device)

    @property
    def _is_by_hand(self) -> bool:
        """Whether the script runs a loop's step outside of a run, on a batch of its own."""
        return self.trainer.state.status != TrainerStatus.RUNNING

    def _check_batch(self, batch: object) -> None:
        if not isinstance(batch, GlobalBatch):
            raise ConfigError(
                f"the training data is a {type(batch).__qualname__} of several loaders; the unicron strategy takes one "
                "DataLoader: combine the data sets into one"
            )
        self.evaluations = self.evaluations + 1 if batch is self._last_batch else 0
        if self.evaluations and not self.parallelism.repeats:
            raise ConfigError(
                f"the optimizer {type(self.optimizers[0]).__qualname__} calls its closure more than once per step; "
                "models that are spread over workers support one forward and backward per step"
            )
        self._last_batch = batch

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Pass the gradients, summed over the global batch, to the optimizer, with the usual hooks."""
        manual = self.parallelism.manual
        if self._is_by_hand:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if manual is not None:
            return manual.backward(closure_loss, *args, **kwargs)
        self.persisting.settle()  # the optimizer's step follows
        return self.parallelism.steps.backward(closure_loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step, which is the closure, and the optimizer's own work."""
        manual = self.parallelism.manual
        if manual is not None and manual.runs:
            step = super().optimizer_step
            return manual.optimizer_step(optimizer, closure, lambda none: step(optimizer, none, *args, **kwargs))
        if self.trainer.fit_loop._skip_backward:  # a pass of `StochasticWeightAveraging` for BatchNorm's statistics
            output = closure()
        else:
            output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if not self._states_are_plain:
            self._states_are_plain = True
            if self.parallelism.whole:
                check_states(self.optimizers)
        self._timed.stepped()
        self.engine.activity.enter("hooks")
        return output

    # ---- validation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.parallelism.evaluation.step(partial(super().validation_step, *args, **kwargs), args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.parallelism.evaluation.step(partial(super().test_step, *args, **kwargs), args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.loaders.predicting():
            return super().predict_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self._timed.validated()
        self.loaders.end_passes()

    # ---- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return super().lightning_module_state_dict() if self.parallelism.whole else {}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning restores ``ckpt_path`` after `setup`; Lightning asks before it, and again after it.

        A worker that has the state of others, or of an earlier life, restores nothing of ``ckpt_path``.
        """
        return self._restores == "after"

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.complete(checkpoint)
        if self._session is None:  # a script saves what no run has changed
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._session.is_joiner and not self.engine.has_state:  # after a fit that it leaves out
            logger.warning("checkpoint_left_out path=%s reason=this worker has no state yet", filepath)
            return
        with self.engine.activity.during("checkpoint"):
            digest = self.parallelism.checkpoints.save(checkpoint, filepath, storage_options)
        if digest is not None:
            self.reported.report(self.engine, checkpoint, located(filepath), digest)

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Add to Lightning's checkpoint of a fit what it leaves out."""
        if "loops" in checkpoint:
            # Empty, and refused by Lightning's own strategies, whose loaders have none.
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        if self._trainer is not None and "optimizer_states" in checkpoint:
            checkpoint[join_state.BESIDE] = self._membership.beside(self._trainer, checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = self.reported.readable(checkpoint_path)
        read = partial(super().load_checkpoint, path, *args, **kwargs)
        checkpoint = self.parallelism.checkpoints.load(path, read)
        if self.lightning_module is not None and self.module.trainer.state.status == TrainerStatus.RUNNING:
            self._beside = checkpoint.pop(join_state.BESIDE, None)  # hooks get what Lightning has written
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if isinstance(self.precision_plugin, DoublePrecision):  # Lightning does so later, and loads into float32
            self.precision_plugin.convert_module(self.module)
        self.parallelism.checkpoints.load_model(checkpoint, partial(super().load_model_state_dict, checkpoint, strict))
        self._membership.logged = checkpoint.get(join_state.BESIDE, self.take_beside())

    def take_beside(self) -> bytes | None:
        """Return once what Lightning's part of the checkpoint that was read last leaves out."""
        found, self._beside = self._beside, None
        return found

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super().optimizer_state(optimizer) if self.parallelism.whole else {}

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        default = super().load_optimizer_state_dict

        def load() -> None:
            default(checkpoint)
            converted = are_converted(self.module, checkpoint.get("state_dict", {}))
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
                keep_types(optimizer, state, converted=converted)

        self.parallelism.checkpoints.load_optimizers(checkpoint, load)

    # ---- the end

    @override
    def model_to_device(self) -> None:
        self.parallelism.place(self.module, self.root_device)

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return the samples of a micro-batch as the module's steps get them: of the right type, on this device."""
        batch = self.module._on_before_batch_transfer(self.precision_plugin.convert_input(batch), dataloader_idx)
        return self.batch_to_device(batch, dataloader_idx=dataloader_idx)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, GlobalBatch) else super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if exception is not self._error:  # without an agent, or raised outside the trainer's launcher
            self._failed(exception)
        self._error = None
        if self._session is not None:
            self._session.leave_with_siblings()
        super().on_exception(exception)

    def _failed(self, error: BaseException) -> None:
        """Report an error that ends the run."""
        self._broken_off, self._error = True, error
        if self._session is not None:
            report_exception(self._session.control, error, self.engine)
            self._session.begin_error_hooks()

    @override
    def teardown(self) -> None:
        if self._kernels is not None:
            restore_kernels(self._kernels)
            self._kernels = None
        if self._session is not None:
            if not self._broken_off:
                self._membership.end_run(self.trainer)
                self._session.runs(active=False)
            self.engine.activity.enter("over")
            if self._session.control is not None and self._announcements.take in self._session.control.listeners:
                self._session.control.listeners.remove(self._announcements.take)
            self._end_collectives(self._session)
        self.parallelism.close()
        self.memory.close()
        self.persisting.close(whole=not self._broken_off)
        self.loaders.close()
        self._last_batch = None
        module = self._lightning_module
        if not self.parallelism.whole:  # its parts are views of buffers on the device, and further runs use them
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module


def strategy_of(trainer: pl.Trainer, asked_by: pl.Callback) -> FaultTolerantStrategy:
    """Return the trainer's strategy.

    Raises:
        ConfigError: the strategy is another one.
    """
    if is_other(trainer):
        raise refuse(f"the Trainer of the callback {type(asked_by).__name__}")
    strategy = trainer.strategy
    if not isinstance(strategy, FaultTolerantStrategy):
        raise ConfigError(
            f'{type(asked_by).__name__} needs Trainer(strategy="unicron"), found {type(strategy).__qualname__}'
        )
    return strategy


meet(FaultTolerantStrategy)
install_estimates()
