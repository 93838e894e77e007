"""A training loop in plain PyTorch that continues through failures, without Lightning: docs/loop.md.

The script's loop body is a step: it runs its micro-batches by `LoopStep.run`, the only place where failures are
recovered, and steps its optimizers. Between two bodies is the step boundary: there workers join and leave, the task
pauses, and checkpoints are written. The operations are those of the Lightning strategies, as are the order of the data
and the random state.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import torch

from unicron_lightning.checkpoints.agent_memory import StateMemory
from unicron_lightning.checkpoints.beside import OTHERS_SECONDS
from unicron_lightning.checkpoints.files import located
from unicron_lightning.checkpoints.reported import ReportedCheckpoints, newest
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.seeding import random_states, restore_random_states
from unicron_lightning.data.steps import IndexedSteps, StepPace, Steps, describe_order
from unicron_lightning.errors import ConfigError
from unicron_lightning.loop.feeding import batches_of, is_stream, loader_of, steps_of
from unicron_lightning.loop.loop_steps import LoopStep
from unicron_lightning.loop.models import WholeModels
from unicron_lightning.loop.registered import RegisteredObjects
from unicron_lightning.loop.saving import LoopCheckpoints
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.comparison import Comparison, Divergence, OnDivergence
from unicron_lightning.worker.control.thread import terminable
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement, Join, Parting, agree_to_stop, takes_stop
from unicron_lightning.worker.reporting import report_error
from unicron_lightning.worker.reproducible import (
    announced,
    conditions,
    restore_kernels,
    use_deterministic_kernels,
)
from unicron_lightning.worker.session import FitPassed, Session
from unicron_lightning.worker.witness import Witness

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from unicron_lightning.loop.evaluation import LoopPass

logger = logging.getLogger(__name__)

_MIB: Final = 1 << 20
_ResultT = TypeVar("_ResultT")


class Run:
    """This worker's part in a task, under ``torchrun --rdzv-backend unicron``; in one process it needs no torchrun.

    Args:
        data: a data set, or a `DataLoader` over one, whose sampler, workers and collate function are used; or another
            iterable of batches.
        global_batch_size: samples of an optimizer step over all ranks, whatever their number; or a mapping of data
            epochs to the sizes from each on, the first one 0.
        micro_batch_size: samples of a forward and backward; of a `DataLoader`, its own batch size by default.
        seed: of order and random state; None: the first rank's `torch.initial_seed`.
        shuffle: whether a data set's order is another one in each data epoch; a `DataLoader` has its own sampler, and
            an iterable data set its own order.
        streams: of iterable data, each read by one worker if there are as many: while the data set is iterated, RANK
            and WORLD_SIZE are number and count of its streams, by which it divides itself. With 1 each worker reads
            all of it.
        device: of the models; None: the GPU of the local rank, or the CPU.
        checkpoints: folder of `save` and of pauses, which all workers see.
        keep: number of `save`'s newest checkpoints in the folder that stay; the others are removed. None: all stay.
        beside: `save` has all workers write folders while training continues, as `UnicronCheckpoint` does.
        memory_every_n_steps: steps between two states in the agents' memory, as of `MemoryCheckpoint`; 0: none.
        partners: copies of each share of such a checkpoint or state on other nodes.
        compare: workers compare their settings when the task begins and at each join.
        digest_every: steps between two comparisons of the workers' states; 0: never.
        on_divergence: as of `UnicronStrategy`.
        bucket_mib: size of a gradient bucket, in MiB.
        overlap: whether reductions start during the last micro-batch's backward.
        reproducible, witness_every: as of `UnicronStrategy`.
        shard_size: workers of a replica (S), which hold the models that the script shards on `mesh`; None: each worker
            holds all models. `bucket_mib` and `overlap` are then of no effect.

    Attributes:
        models: how the workers hold the models.
        registered: what takes part.
        reported: checkpoints that the coordinator knows.
        division: of states in the agents' memory.
        divergence: compares the workers' states.
        witness: compares their gradients.
        should_stop: set True on any rank, ends the loop on all after a step.
        left_out: whether the last loop was left out, so that this worker has no state of the task.
        global_step: finished optimizer steps.
        current_epoch: data epoch, from 0.
        device, seed: as above.

    Raises:
        ConfigError: for settings that contradict each other; the message quotes them.
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch_size: int | Mapping[int, int],
        micro_batch_size: int | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        streams: int = 1,
        device: torch.device | str | None = None,
        checkpoints: str | os.PathLike[str] = "checkpoints",
        keep: int | None = None,
        beside: bool = False,
        memory_every_n_steps: int = 0,
        partners: int = 1,
        compare: bool = True,
        digest_every: int = 100,
        on_divergence: OnDivergence = "heal",
        bucket_mib: float = 25.0,
        overlap: bool = True,
        reproducible: bool = False,
        witness_every: int | None = None,
        shard_size: int | None = None,
    ) -> None:
        _check_number("the batch size", micro_batch_size, least=1)
        _check_numbers(1, streams=streams, keep=keep, shard_size=shard_size)
        _check_numbers(0, seed=seed, memory_every_n_steps=memory_every_n_steps, partners=partners)
        self._loader = loader_of(data, micro_batch_size, streams, shuffle=shuffle)
        rounds = streams if is_stream(self._loader.dataset) else 1
        self._shape = _shape(global_batch_size, micro_batch_size or self._loader.batch_size, rounds)
        self._streams = streams
        if bucket_mib <= 0:
            raise ConfigError(f"bucket_mib={bucket_mib!r} must be above 0 (MiB)")
        if "://" in str(checkpoints):
            raise ConfigError(f"checkpoints={str(checkpoints)!r}: expected a folder that all workers see")
        if reproducible and not compare:
            raise ConfigError("reproducible=True with compare=False: workers of different kinds would not be found")
        self.witness = Witness(witness_every, compare=compare)
        if shard_size is not None:
            self.witness.check_data(self._loader.dataset)
        self.device = _device(device)
        self._reproducible = reproducible
        self._kernels: tuple[bool, ...] | None = None
        """Settings of kernels before a loop that is reproducible, or has witnesses."""
        self.divergence = Divergence(digest_every, on_divergence)
        self.should_stop = self.left_out = False
        self.global_step = self.current_epoch = 0
        self.seed = 0 if seed is None else seed
        self._given_seed = seed
        self.reported = ReportedCheckpoints()
        folder = Path(checkpoints)
        self._checkpoints = LoopCheckpoints(self, self._state, folder, keep, beside=beside, partners=partners)
        self._memory, self._remembers = StateMemory(self), (memory_every_n_steps, partners)
        self._step_in_epoch = self._passes = self._passes_between = 0
        self._shard_size = shard_size or 1
        self.models = WholeModels(self) if shard_size is None else _sharded(self, shard_size, exact=reproducible)
        self.division = self.models.division()
        self._session, self._is_new = self.models.open(self._shape.micro_batches)
        self.models.begin(self._session)
        self.registered: RegisteredObjects = self.models.registered
        self._comparison = Comparison(self, active=compare)
        self._steps = self.models.steps(int(bucket_mib * _MIB), overlap=overlap, reproducible=reproducible)
        self._data: Steps | None = None
        self._current: LoopStep | None = None
        self._begun = self._active = self._checked = self._parts = self._founded = False
        self._error: BaseException | None = None
        self._given: str | None = None
        self._pending: str | None = None
        """Path of the checkpoint that is due at the end of the present body."""

    @property
    def session(self) -> Session:
        """This worker's part in its task."""
        return self._session

    @property
    def engine(self) -> Engine:
        """This worker's engine."""
        return self._session.engine

    @property
    def global_rank(self) -> int:
        """This worker's rank in the present world."""
        return self.engine.world.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the present world."""
        return self.engine.world.size

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is the first rank and a member, e.g. to print or to write files."""
        return self.engine.has_state and self.global_rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the workers of this replica, for `torch.distributed.fsdp.fully_shard`.

        Raises:
            ConfigError: without ``shard_size``.
        """
        return self.models.mesh

    # ---- the script's calls

    def register(self, **objects: Any) -> None:
        """Have objects take part: their states reach joiners and checkpoints, and optimizers' parameters are trained.

        Args:
            objects: modules, optimizers, and what has ``state_dict`` and ``load_state_dict`` (schedules, a GradScaler,
                averages, the script's own), by names that checkpoints use.

        Raises:
            ConfigError: an object has no state, or a loop has begun.
        """
        if self._begun:
            raise ConfigError(f"register({', '.join(objects)}) after the first step: call it before run.steps()")
        for name, value in objects.items():
            self.registered.add(name, value)

    def steps(self, max_steps: int | None = None, *, max_epochs: int | None = None) -> Iterator[LoopStep]:
        """Yield the steps of the training, from where the task is, up to a limit of `global_step` or `current_epoch`.

        A further call is a further loop of the script, which continues to count. A worker that starts while the task
        is in a later loop leaves out those before it: their bodies do not run there.

        Raises:
            ConfigError: without a limit, or within another loop; what is registered is not complete.
        """
        _check_number("max_steps", max_steps, least=0)
        _check_number("max_epochs", max_epochs, least=0)
        if max_steps is None and max_epochs is None:
            raise ConfigError("run.steps() has no limit: expected run.steps(max_steps) or run.steps(max_epochs=...)")
        if self._active:
            raise ConfigError("run.steps() within the loop of another run.steps(): end that one first")
        self.check_whole()
        self.registered.check()

        def reached() -> bool:
            done = max_steps is not None and self.global_step >= max_steps
            return done or (max_epochs is not None and self.current_epoch >= max_epochs)

        return self._loop(reached)

    def evaluate(self, data: Any, function: Callable[[Any], Any], *, batch_size: int | None = None) -> Any:
        """Evaluate the models on data that is divided over the ranks; return the means over all samples.

        Layers are in their mode for evaluation, without graphs, and buffers stay as they are. All ranks must call it at
        the same place, between steps or within a body.

        Args:
            data: as of `Run`; of streams a batch counts by the first dimension of its first tensor.
            function: given a batch, returns a scalar, the mean of its samples, or a mapping of such.
            batch_size: of a data set.
        """
        self._passes_between += not self._active
        if self.left_out or not self.engine.has_state:
            known = None if self._active else self._session.means_of(self._passes_between)
            if known is not None:
                self._passes += 1
                return known
            if self.left_out:
                if not self.engine.has_state:
                    raise FitPassed(
                        "run.evaluate() after a loop that the task has finished, without means that a member has "
                        "recorded: expected the same calls on all workers"
                    )
                logger.warning("evaluation_unknown reason=its loop is left out: the models are those before training")
        means = self._pass(data, function, batch_size, lambda made: made.means())
        if not self._active:
            self._session.record_means(self._passes_between, means)
        return means

    def predict(
        self, data: Any, function: Callable[[Any], Any], *, batch_size: int | None = None
    ) -> list[tuple[list[Any] | None, Any]]:
        """Call a function for each batch of data that is divided over the ranks; return the outputs of this rank's.

        Layers, graphs and buffers are as in `evaluate`. Each batch is that of exactly one rank when the call ends.

        Args:
            data: as of `Run`.
            function: given a batch, returns its output.
            batch_size: of a data set.

        Returns:
            Data set indices (of streams None) and output of each batch, in order.
        """
        if self.left_out or not self.engine.has_state:  # the task has made the outputs, or the members will
            self._passes += 1
            return []
        return self._pass(data, function, batch_size, lambda made: made.predictions())

    def _pass(
        self,
        data: Any,
        function: Callable[[Any], Any],
        batch_size: int | None,
        run: Callable[[LoopPass], _ResultT],
    ) -> _ResultT:
        """Run a pass over data. Arguments are checked before, so that their errors do not end the run."""
        _check_number("the batch size", batch_size, least=1)
        loader = loader_of(data, batch_size, self._streams, shuffle=False)
        self.check_whole()
        self._passes += 1
        place = (self.seed, self.current_epoch, self._passes)
        with self.failing():
            batches = batches_of(self.engine, loader, self._streams, self.seed)
            found = run(self.models.evaluation(batches, function, place))
        self.engine.activity.enter("hooks")
        return found

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write a checkpoint, from which the task also resumes if no worker survives; return its path.

        Within the body of a loop it is written at the body's end, so that it is that of a step boundary. Outside, it is
        written at once. All ranks must call it at the same place.

        Args:
            path: of the checkpoint; None: one with the number of the step, in the folder of `Run`.
        """
        if path is not None and "://" in str(path):
            raise ConfigError(f"run.save({str(path)!r}): expected a path that all workers see")
        step = self.global_step + (self._current is not None)
        found = self._checkpoints.path("", step) if path is None else located(path)
        if self._current is not None:
            self._pending = found
            return found
        if not self._begun:
            raise ConfigError(f"run.save({found!r}) before the first loop: there is nothing to save")
        if self.left_out:
            logger.warning("checkpoint_left_out path=%s reason=the task has written it after its loop", found)
            return found
        self._write(found)
        return found

    def load(self, path: str | os.PathLike[str]) -> None:
        """Begin the first loop with a checkpoint of `save`; one that the task itself has written later comes first."""
        if self._begun:
            raise ConfigError(f"run.load({str(path)!r}) after the first step: call it before run.steps()")
        self._given = located(path)

    # ---- a loop

    def _loop(self, reached: Callable[[], bool]) -> Iterator[LoopStep]:
        if self._active:
            raise ConfigError("two loops of run.steps() at a time: end the other one first")
        self._active = self._begun = True
        self.should_stop = self.engine.wants_stop = self.engine.stops = False
        try:
            if not self._begin():
                return
            self._founded = True
            if self._reproducible or self.witness.every:
                self._kernels = use_deterministic_kernels()
            if self._reproducible:
                self._print(announced(self.device))
            if self.witness.every:
                self._print(self.witness.announced(self.world_size, self._shard_size))
            self._session.runs(active=True)
            yield from self._bodies(reached)
            with self.failing():
                self.models.finish()
            self._print_digest()
        except BaseException:
            self._checkpoints.close(whole=False)
            raise
        finally:
            self._end()

    def _bodies(self, reached: Callable[[], bool]) -> Iterator[LoopStep]:
        """Yield the steps up to a limit."""
        assert self._data is not None
        while not reached():
            is_empty = True
            for batch in self._data.epoch():
                is_empty = False
                self._current = step = LoopStep(self._steps, batch, self.global_step + 1, self._data)
                yield step
                self._finish(step)
                if reached() or self._stops():
                    return
                if step.ends_epoch:
                    break
            if is_empty:
                raise ConfigError(f"the data has no step in epoch {self.current_epoch}: it is empty")

    def _finish(self, step: LoopStep) -> None:
        """Count the step whose body has ended, and write its checkpoint if one is due."""
        self.check_whole()
        with self.failing():
            step.finish()
        self._current = None
        self.global_step += 1
        self.current_epoch += step.ends_epoch
        self._step_in_epoch = 0 if step.ends_epoch else self._step_in_epoch + 1
        if self._pending is not None:
            path, self._pending = self._pending, None
            self._write(path)

    def _end(self) -> None:
        """End a loop: it is over, the script has left it, or an exception has ended it."""
        if self._pending is not None:
            logger.warning("checkpoint_left_out path=%s reason=the loop was left within the body", self._pending)
            self._pending = None
        if self._current is not None:
            self._current.end()
            self._current = None
        if self._data is not None:
            self._data.close()
            self._data = None
        self._steps.close()
        self._memory.close()
        if self._kernels is not None:
            restore_kernels(self._kernels)
            self._kernels = None
        self._active = False
        self._session.runs(active=False)
        self.engine.activity.enter("over")
        self._checkpoints.close(whole=True)

    def _print_digest(self) -> None:
        if self._reproducible:
            with self.failing():
                found = self.models.digest()
            self._print(f"reproducible: digest {found} of the parameters, step {self.global_step}")

    def _print(self, line: str) -> None:
        if self.is_global_zero:
            sys.stderr.write(f"{line}\n")

    def _stops(self) -> bool:
        """Whether the ranks have agreed on the end of the loop."""
        if takes_stop(self.engine):
            return True
        return self.should_stop and (self.engine.world.size == 1 or agree_to_stop(self.engine))

    def _begin(self) -> bool:
        """Begin a loop with the task's state; return False if the task has finished this loop."""
        session, engine = self._session, self.engine
        session.fits += 1
        self.left_out, self._passes_between = False, 0
        self.reported.fit = session.fits
        self._checkpoints.begin()
        self._memory.use(*self._remembers)
        if not self._founded:  # as the script has made it, before anything is restored
            self._comparison.begin(lambda: {"seed": f"{self._given_seed}", **self._described()})
        if session.control is not None:
            session.control.fit = session.fits
        if session.is_joiner and not engine.has_state:
            if session.is_past():
                return self._leave_out()
            self._join()
            return True
        if self._is_new:
            self._is_new = False
            session.find_unreported()
        if self._given_seed is None and not self._founded:
            own = codec.encode(torch.initial_seed() & 0xFFFFFFFF)
            self.seed = codec.decode(unpack_parts(engine.run(Agreement("seed", lambda rank: own)))[0])
        session.record_fit()
        if self._memory.is_past():
            return self._leave_out()
        known = [each for each in session.resume if each.fit >= session.fits]
        self.models.found(reads=bool(known) or self._founded or self._given is not None)
        if self._memory.restore(self._remember):
            session.resume = ()
        elif known:
            with newest(engine, known, divided=False) as (opened, checkpoint):
                if checkpoint.fit != session.fits:
                    return self._leave_out()
                session.resume = ()
                self._take(self._checkpoints.read(opened.path))
                self.reported.resumed(engine, checkpoint, opened.name)
        elif not self._founded and self._given is not None:
            self._take(self._checkpoints.read(self._given))
        if self._data is None:
            self._open_data()
        return True

    def _described(self) -> dict[str, str]:
        shared = conditions(self.device) if self._reproducible else {}
        return {**self.registered.describe(), **shared, **self.witness.conditions(self.device)}

    def _leave_out(self) -> bool:
        self.left_out = True
        self._session.left_out += 1
        logger.warning("loop_left_out number=%d reason=the task has finished it", self._session.fits)
        return False

    def _join(self) -> None:
        """Join the task with its state."""
        session = self._session
        self.models.build()
        session.wait_admission()
        join = Join(dict)
        self.engine.run(join)
        state: dict[str, Any] = join.received
        session.check_fit(state["fit"])
        self.seed = state["seed"]
        self._open_data()
        self._comparison.add_data(self._describe_data)
        self._comparison.check(state["described"])
        self._take(state)
        self._memory.previous = state["boundary"]
        self._checked, self._parts = True, join.parts
        if session.control is not None:
            session.control.event("state_restored", tier="peer", step=self.engine.step)
        self.divergence.expect(joined=True)

    def _open_data(self) -> None:
        pace = StepPace(
            position=lambda: (self.current_epoch, self._step_in_epoch),
            share=self.models.share,
            boundary=self._boundary,
        )
        ends = self._steps.layouts[0].streams
        self._data = steps_of(self.engine, self._loader, self._shape, self.seed, pace, self.models.own, ends)

    # ---- between two steps

    def _boundary(self) -> None:
        """Enter or leave worlds: the only place where a world grows, or is left on order."""
        engine = self.engine
        engine.activity.enter("boundary")
        engine.step = self.global_step
        self._session.joins = False
        with self.failing():
            if not self._checked:
                self._checked = True
                codec.check(self._state())
                self._comparison.add_data(self._describe_data)
                self._comparison.agree("training")
            join = Join(self._state)
            engine.switch(join)
            if join.admits:
                self.divergence.expect(joined=False)
            if join.parts or self._parts:
                self._part()
            self._memory.boundary(self._state)
        self.models.at_boundary()
        engine.activity.enter("hooks")

    def _describe_data(self) -> dict[str, str]:
        data, shape = self._data, self._shape
        assert data is not None
        number = f"{data.number(0)} steps" if isinstance(data, IndexedSteps) else f"{shape.devices} streams, in steps"
        rounds = f", with a schedule of rounds {dict(shape.schedule)}" if shape.schedule else ""
        return {
            "data length": f"{number} of {shape.micro_batches} micro-batches an epoch{rounds}",
            "data order": describe_order(data),
        }

    def _part(self) -> None:
        """End a life whose task pauses: write a checkpoint, and wait for the end of this process."""
        engine, control = self.engine, self.engine.control
        assert control is not None
        name = "last-pause" if engine.world.kind == "pause" else engine.world.kind
        path = self._checkpoints.path(f"{name}-", self.global_step)
        with terminable(), engine.activity.during("checkpoint"):
            self._checkpoints.write_whole(path, self.global_step)
            word = msgspec.structs.replace(self.reported.saved[path], parting=True)
            self._checkpoints.finish(OTHERS_SECONDS)
            engine.run(Parting(lambda: control.send(word)))

    # ---- the state

    def _state(self) -> dict[str, Any]:
        """Return the state at a step boundary, for a joiner or a checkpoint."""
        return {
            "models": self.registered.models(),
            **self.registered.rest(),
            "position": [self.global_step, self.current_epoch, self._step_in_epoch, self._passes],
            "layouts": [layout.state() for layout in self._steps.layouts],
            "random": random_states(),
            "seed": self.seed,
            "fit": self._session.fits,
            "described": self._comparison.described,
            "boundary": self._memory.previous,
            "kept": self._checkpoints.kept,
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        self.seed, self._checkpoints.kept = state["seed"], list(state.get("kept", ()))
        self.registered.load(state["models"], state)
        self.global_step, self.current_epoch, self._step_in_epoch, self._passes = state["position"]
        self._steps.load_layouts(state["layouts"])
        restore_random_states(state["random"])

    def _remember(self, state: dict[str, Any], common: bytes) -> bool:
        """Take a state that was in the agents' memory."""
        self._take(self.models.restored(state, common))
        return True

    def _write(self, path: str) -> None:
        with self.failing(), self.engine.activity.during("checkpoint"):
            self._checkpoints.save(path, self.global_step, lasts=self._active)

    # ---- errors

    def check_whole(self) -> None:
        """Refuse to continue after an exception in the middle of an operation, in which this worker left the others.

        Raises:
            ConfigError: there was one.
        """
        if self._error is not None:
            raise ConfigError(
                f"the run has ended with {self._error!r:.200}, and the other ranks continue without this worker: let "
                "the exception end the script"
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Inside, an exception ends the run, and is reported."""
        try:
            yield
        except BaseException as error:
            self._error = error
            report_error(self.engine.control, error, self.engine)
            raise


def _sharded(run: Run, size: int, *, exact: bool) -> WholeModels:
    """Return the models in shards; a run without them imports nothing of FSDP2."""
    from unicron_lightning.loop.sharded import ShardedModels

    return ShardedModels(run, size, exact=exact)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _shape(global_batch_size: int | Mapping[int, int], micro_batch_size: int | None, streams: int) -> StepShape:
    """Return the composition of steps: rounds of one micro-batch of each stream; data with an index is one.

    Raises:
        ConfigError: a size is no number, or does not divide.
    """
    if micro_batch_size is None:
        raise ConfigError("the data has batches of its own: give micro_batch_size, their usual size")
    round_size = micro_batch_size * streams
    sizes = dict(global_batch_size) if isinstance(global_batch_size, Mapping) else {0: global_batch_size}
    if 0 not in sizes:
        raise ConfigError(f"global_batch_size={sizes}: expected a size from epoch 0 on")
    for epoch, size in sizes.items():
        _check_number("an epoch of global_batch_size", epoch, least=0)
        _check_number("global_batch_size", size, least=1)
        if size % round_size:
            each = f"micro_batch_size={micro_batch_size}" + (f" x streams={streams}" if streams > 1 else "")
            raise ConfigError(
                f"global_batch_size={size} is no multiple of {each}; expected one, such as "
                f"{-(-size // round_size) * round_size}"
            )
    rounds = tuple(sorted((epoch, size // round_size) for epoch, size in sizes.items()))
    most = max(number for _, number in rounds)
    return StepShape(devices=streams, accumulation=most, schedule=rounds if len(rounds) > 1 else ())


def _check_numbers(least: int, **values: Any) -> None:
    for name, value in values.items():
        _check_number(name, value, least=least)


def _check_number(name: str, value: Any, *, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{name}={value!r}: expected a whole number of at least {least}")
