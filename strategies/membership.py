"""A worker's membership in its task between steps: it joins, resumes, and enters or leaves worlds."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import msgspec
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from unicron_lightning.checkpoints.beside import OTHERS_SECONDS
from unicron_lightning.strategies.collectives.operations import RECORD_BYTES
from unicron_lightning.strategies.console import say_saved, take_over_bar
from unicron_lightning.strategies.metrics.loggers import take_over
from unicron_lightning.strategies.state import callbacks, join_state
from unicron_lightning.strategies.state.comparison import describe_data
from unicron_lightning.strategies.state.join_state import WHOLE
from unicron_lightning.worker import codec
from unicron_lightning.worker.control.thread import terminable
from unicron_lightning.worker.operations import Join, Parting
from unicron_lightning.worker.session import FitPassed

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


logger = logging.getLogger(__name__)

_KEPT: Final = 32
"""Checkpoints: more than are written at a time."""


class Membership:
    """Joins a running task, resumes an ended one, and changes worlds at step boundaries.

    Args:
        strategy: provides engine, seed, parallelism and comparison.

    Attributes:
        logged: values logged in the epoch of a loaded checkpoint, to be restored at the first boundary.
        joins: whether this worker lacks the state of the task that it joins.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self._strategy = strategy
        self.logged: bytes | None = None
        self.joins = False
        self._arrival: dict[str, Any] | None = None
        self._reset: Callable[[], None] = do_nothing_closure
        """Restores the part of the state that is not in `_arrival`."""
        self._parts = False
        self._checked = False
        self._skipped: int | float | None = None
        """The trainer's ``limit_train_batches``, which is 0 while a fit is left out."""
        self._sanity_steps: int | float | None = None
        """The trainer's ``num_sanity_val_steps`` before a fit that this worker begins late, or leaves out."""
        self._kept: list[str] = []
        """Checkpoints that callbacks have kept, those among them that may not be removed yet."""
        self._late = False
        """Whether this worker is on its way to its first step, with a state that others have trained."""

    def join(self, trainer: pl.Trainer) -> None:
        """Join the task; work that needs no state is done before the members have to wait for this worker."""
        strategy, session = self._strategy, self._strategy.session
        self._begin_late(trainer)
        checks, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0
        trainer.fit_loop.setup_data()
        if checks and trainer.enable_validation:  # the members have set it up for their sanity check
            join_state.set_up_validation(trainer)
        join_state.warm_up()
        if session.is_past():  # the task has begun another one meanwhile
            self.skip(trainer)
            return
        self._checked = True  # by the members, when they began
        self.joins = True
        session.wait_admission()
        join = Join(dict)
        session.engine.run(join)
        assert join.received is not None
        state: dict[str, Any] = join.received
        session.check_fit(state["fit"])
        self._describe_data()
        strategy.comparison.check(state.get("described"))
        strategy.seed, strategy.memory.previous = state["seed"], state["boundary"]
        self._arrival, self._parts = join_state.receive(trainer, state), join.parts
        if session.control is not None:
            session.control.event("state_restored", tier="peer", step=session.engine.step)
        strategy.parallelism.admitted(state)
        self._reset = strategy.parallelism.snapshot()
        strategy.parallelism.compare(joined=True)
        self.joins = False
        if strategy.engine.world.rank == 0:  # the sender died meanwhile
            take_over(trainer.loggers)
            take_over_bar(trainer)

    def skip(self, trainer: pl.Trainer) -> None:
        """Leave out a fit that the task has finished: no batch is run, and its results are those of the members."""
        if self._sanity_steps is None:
            self._sanity_steps = trainer.num_sanity_val_steps
        self._skipped = trainer.limit_train_batches
        self._strategy.session.left_out += 1
        trainer.limit_train_batches = trainer.num_sanity_val_steps = 0
        callbacks.skip_search(trainer)
        logger.warning("fit_left_out number=%d reason=the task has finished it", self._strategy.session.fits)

    def end_run(self, trainer: pl.Trainer) -> None:
        """Record a fit's results for workers that leave it out, or take them from there."""
        session = self._strategy.session
        if session.control is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if self._sanity_steps is not None:  # all workers check, or none, in a further fit of this trainer
            trainer.num_sanity_val_steps, self._sanity_steps = self._sanity_steps, None
        if self._skipped is None:
            results = None if session.joins else join_state.fit_results(trainer)
            session.results = None
            if results is not None and len(results) <= RECORD_BYTES:
                session.results = session.fits, base64.b64encode(results).decode()
            session.record_results()
            return
        trainer.limit_train_batches, self._skipped = self._skipped, None
        callbacks.allow_search(trainer)
        if (value := session.results_of(session.fits)) is not None:
            join_state.take_fit_results(trainer, codec.decode(base64.b64decode(value)))

    def resume(self, trainer: pl.Trainer) -> None:
        """Resume from the task's newest checkpoint that is as it was written, because no member is left.

        If it was written in a later ``fit`` of the script, this one is left out.
        """
        strategy, session = self._strategy, self._strategy.session
        known = [each for each in session.resume if each.fit >= session.fits]
        session.resume = ()
        divided = strategy.parallelism.checkpoints.divided
        self._begin_late(trainer)
        try:
            self._arrival = state = strategy.reported.resume(
                trainer, session.engine, known, strategy.take_beside, divided=divided
            )
        except FitPassed:
            session.resume = known
            self.skip(trainer)
            return
        if "seed" in state:  # not in files of earlier versions
            strategy.seed = state["seed"]
            strategy.parallelism.admitted(state)
        self._reset = strategy.parallelism.snapshot()
        if not join_state.is_at_boundary(state):
            restore = partial(self._restore_again, trainer, join_state.restore_again)
            join_state.run_from_checkpoint(trainer, restore)

    def begun(self, trainer: pl.Trainer) -> None:
        """Have the loop of a run that has begun leave a data epoch that its checkpoint has ended."""
        if self._arrival is None:
            join_state.leave_finished_epoch(trainer.fit_loop)

    def _restore_again(self, trainer: pl.Trainer, restore: Callable[..., None]) -> None:
        strategy = self._strategy
        assert self._arrival is not None
        state, self._arrival = self._arrival, None
        reset, self._reset = self._reset, do_nothing_closure
        restore(trainer, state, strategy.agreed, strategy.root_device)
        reset()
        strategy.stopping.agreed = trainer.should_stop
        self.logged = None

    def leave_out(self, trainer: pl.Trainer) -> bool:
        """Leave out a fit if the agents' memory has a version of a later one; return whether it did."""
        past = self._strategy.memory.is_past()
        if past:
            self.skip(trainer)
        return past

    def remember(self, trainer: pl.Trainer) -> bool:
        """Resume from a state in the agents' memory, if the coordinator offers one; return whether it did.

        `remembered` follows, once the founders have begun the task.
        """
        strategy = self._strategy
        self._arrival = state = strategy.memory.restore(partial(strategy.division.restore, trainer))
        if state is None:
            return False
        self._begin_late(trainer)
        trainer.num_sanity_val_steps = 0
        strategy.session.resume = ()
        strategy.seed = state["seed"]
        return True

    def remembered(self) -> None:
        """Continue from the state of `remember`, together with the other founders."""
        assert self._arrival is not None
        self._strategy.parallelism.admitted(self._arrival)
        self._reset = self._strategy.parallelism.snapshot()

    def boundary(self, trainer: pl.Trainer) -> None:
        """Enter or leave worlds between steps: the only place where a world grows, or is left on order."""
        strategy = self._strategy
        engine = strategy.engine
        engine.activity.enter("boundary")
        if self._late:
            self._late = False
            callbacks.allow_search(trainer)
            if self._skipped is None and self._sanity_steps is not None:
                trainer.num_sanity_val_steps, self._sanity_steps = self._sanity_steps, None
        join_state.note_epoch(trainer)
        if self._arrival is not None:
            self._restore_again(trainer, join_state.arrive)
        elif self.logged is not None:
            join_state.restore_logged(trainer, self.logged, strategy.root_device)
        self.logged = None
        if trainer.received_sigterm:
            raise SIGTERMException
        engine.step = trainer.global_step
        if not callbacks.searches(trainer):  # a joiner would get the state of the search
            self._change_world(trainer)
            strategy.memory.boundary(partial(self.state, trainer))
        strategy.parallelism.at_boundary()
        engine.activity.enter("hooks")

    def _change_world(self, trainer: pl.Trainer) -> None:
        """Enter the world that all members have agreed to, if any."""
        strategy, engine = self._strategy, self._strategy.engine
        if engine.control is not None and not self._checked:
            self._checked = True
            join_state.check(trainer)
            self._describe_data()
            strategy.comparison.agree("training")
        elif engine.control is not None and not strategy.comparison.has_data:  # a further fit of the trainer
            self._describe_data()
        join = Join(lambda: self.state(trainer))
        if engine.switch_from:
            strategy.await_rows()  # a rank 0 may leave, and another looks for its rows
        engine.switch(join)
        if join.admits:
            strategy.parallelism.compare(joined=False)
        if join.parts or self._parts:
            part(strategy, trainer, self.state(trainer))

    def _describe_data(self) -> None:
        if (loader := self._strategy.loaders.training) is not None:
            self._strategy.comparison.add_data(partial(describe_data, loader))

    def _begin_late(self, trainer: pl.Trainer) -> None:
        """Begin with a state that others have trained: what they have searched at the start is known."""
        self._late = True
        self._sanity_steps = trainer.num_sanity_val_steps
        callbacks.skip_search(trainer)

    def state(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return this worker's state at a step boundary, for a joiner.

        Raises:
            NotPlainData: (when encoded) if a callback's, module's or optimizer's state holds objects.
        """
        strategy = self._strategy
        return {
            **join_state.loop_state(trainer, strategy.agreed, strategy.seed, strategy.session.fits),
            **strategy.parallelism.state(trainer),
            "described": strategy.comparison.described,
            "boundary": strategy.memory.previous,
        }

    def beside(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> bytes:
        """Encode the state that a checkpoint of this moment leaves out."""
        strategy, known = self._strategy, dict.fromkeys((*self._kept, *callbacks.replaceable_paths(trainer)))
        self._kept = [*known][-_KEPT:]
        found = join_state.beside(trainer, checkpoint, strategy.agreed, strategy.seed, strategy.session.fits)
        return codec.encode({**found, **strategy.parallelism.state(trainer), "kept": self._kept})


def part(strategy: FaultTolerantStrategy, trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """End a life whose task pauses, or continues in another layout: write a checkpoint between two steps, and wait.

    The process is stopped once the coordinator has received the report.

    From here on SIGTERM ends the process immediately, whatever handler Lightning has installed. Nothing is lost by it:
    the state is in this checkpoint, or in that of the other workers, which continue without this one.

    Args:
        strategy: at a step boundary, as on all other members.
        trainer: its trainer.
        state: state for a joiner.
    """
    engine, control = strategy.engine, strategy.engine.control
    assert control is not None
    # Lightning's `ckpt_path="last"` finds that of a pause if the folder is that of the next task, too.
    name = "last-pause" if engine.world.kind == "pause" else engine.world.kind
    path = _checkpoint_folder(trainer) / f"{name}-step={trainer.global_step}.ckpt"
    with terminable(), engine.activity.during("checkpoint"):
        save_whole(strategy, state, path)
        word = msgspec.structs.replace(strategy.reported.saved[str(path)], parting=True)
        for logger in trainer.loggers:
            logger.save()
        say_saved(trainer, engine.world, path)
        strategy.persisting.finish(OTHERS_SECONDS)
        engine.run(Parting(lambda: control.send(word)))


def save_whole(strategy: FaultTolerantStrategy, state: dict[str, Any], path: Path) -> None:
    """Write the state for a joiner as a checkpoint, at a step boundary."""
    rest = {key: value for key, value in state.items() if key != "checkpoint"}
    strategy.save_checkpoint({**state["checkpoint"], WHOLE: codec.encode(rest)}, path)


def _checkpoint_folder(trainer: pl.Trainer) -> Path:
    """Return the trainer's folder of checkpoints."""
    own = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(own or Path(trainer.default_root_dir) / "checkpoints").absolute()
