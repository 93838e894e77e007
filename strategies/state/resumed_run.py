"""A run that resumes: from the task's own checkpoint it does all that followed there, whatever hook has written it.

Lightning resumes at the next step or data epoch, and leaves out what is between: the rest of an iteration after
``on_train_batch_end``, such as a validation, the end of the data epoch, schedules that follow a metric, and the end of
the fit. A new life of a task does it (`run_from_checkpoint`). A user's ``ckpt_path`` is resumed as Lightning
does (`leave_finished_epoch`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops import evaluation_loop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop
from lightning.pytorch.trainer import call


def leave_finished_epoch(loop: _FitLoop) -> None:
    """Reset the counters of a data epoch that a checkpoint's step has ended, as Lightning does, and begin the next one.

    Lightning finds that a data epoch is over by comparing its steps with their number, after the next data epoch has
    begun. A stream has no such number, and with a schedule it is that of the next data epoch.

    Args:
        loop: has been reset for a run, and has counted the data epoch.
    """
    epoch_loop = loop.epoch_loop
    if not _has_counted_epoch(loop):
        return
    epoch_loop._batches_that_stepped += 1
    epoch_loop.batch_progress.increment_completed()
    _reset_counters(epoch_loop)
    epoch_loop._restart_stage = RestartStage.RESTARTED_ON_LAST  # so that Lightning does not count the step again


def run_from_checkpoint(trainer: pl.Trainer, restore: Callable[[], None]) -> None:
    """Have the loop of a fit continue where the task's own checkpoint was written, with all that followed there.

    Args:
        trainer: has restored the loops.
        restore: restores the state again, after the hooks that may have changed it.
    """
    trainer.fit_loop.run = partial(_run, trainer, restore)  # type: ignore[method-assign]


def _run(trainer: pl.Trainer, restore: Callable[[], None]) -> None:
    """Run a fit as Lightning does, but from where its checkpoint was written."""
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.total
    vars(loop).pop("run", None)
    loop.setup_data()
    if trainer.limit_train_batches == 0 or loop.max_batches == 0:
        restore()
        return
    if epochs.completed == epochs.ready and loop.done:  # the hooks of the end were being called
        for name in ("on_train_start", "on_train_end"):
            call._call_callback_hooks(trainer, name)
            call._call_lightning_module_hook(trainer, name)
        restore()
        return
    loop.reset()
    loop.on_run_start()
    restore()
    in_epoch = loop.restarted_mid_epoch
    _continue(trainer, loop)
    while in_epoch or not loop.done:
        in_epoch = False
        try:
            loop.on_advance_start()
            loop.advance()
            loop.on_advance_end()
        except StopIteration:
            break
        finally:
            loop.on_iteration_done()
    loop.epoch_loop.restarting = False  # a fit that had been stopped has no iteration, in which Lightning does it
    loop.epoch_loop.on_iteration_done()
    loop.on_run_end()


def _continue(trainer: pl.Trainer, loop: _FitLoop) -> None:
    """Do what Lightning leaves out between the hook that has written the checkpoint and the next step or data epoch."""
    epoch_loop = loop.epoch_loop
    if loop.resumed_on_epoch_end or loop.restarted_on_epoch_end:
        _finish_epoch(trainer, loop)
    elif loop.restarted_on_epoch_start:
        loop.epoch_progress.current.ready += 1
        _reset_counters(epoch_loop)
        epoch_loop.restarting = False
    elif loop.restarted_mid_epoch and (epoch_loop.restarted_on_train_batch_end or epoch_loop.restarted_on_last):
        _finish_step(trainer, loop)
    loop._restarting = False  # of this loop alone: schedules of data epochs that follow a metric are not left out


def _finish_step(trainer: pl.Trainer, loop: _FitLoop) -> None:
    """Finish an iteration after ``on_train_batch_end``, or after the validation that follows it."""
    epoch_loop, fetcher = loop.epoch_loop, loop._data_fetcher
    epochs: tuple[Any, Any] = loop.epoch_progress.total, loop.epoch_progress.current
    assert fetcher is not None
    validates = epoch_loop.restarted_on_train_batch_end
    if validates:
        if _has_counted_epoch(loop):
            for progress in epochs:
                progress.processed -= 1
                progress.completed -= 1
        trainer._logger_connector.on_batch_end()
        epoch_loop.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        epoch_loop._restart_stage = RestartStage.RESTARTED_ON_LAST  # so that Lightning does not count the step again
    if not epoch_loop._should_check_val_fx(fetcher):
        epoch_loop.on_advance_end(fetcher)
    elif validates:
        epoch_loop.val_loop.batch_progress.reset_on_run()
        epoch_loop.val_loop._restart_stage = evaluation_loop.RestartStage.RESTARTED_MID_EVALUATION  # so that it runs


def _finish_epoch(trainer: pl.Trainer, loop: _FitLoop) -> None:
    """Finish a data epoch after ``on_train_epoch_end``."""
    epoch_loop, epochs, connector = loop.epoch_loop, loop.epoch_progress, trainer._logger_connector
    if loop.resumed_on_epoch_end:  # Lightning has counted it
        epochs.total.completed -= 1
        epochs.current.completed -= 1
    connector.epoch_end_reached()
    connector.on_epoch_end()
    if epoch_loop._num_ready_batches_reached():
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epoch_loop._batches_that_stepped -= 1
    connector.update_train_epoch_metrics()
    epoch_loop._batches_that_stepped += 1
    epochs.increment_completed()
    _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
    loop.reset_restart_stage()


def _has_counted_epoch(loop: _FitLoop) -> bool:
    """Whether Lightning has counted a data epoch as processed of which the last step was done, and nothing after it."""
    epoch_loop = loop.epoch_loop
    ended = epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch
    return bool(ended and loop.restarted_mid_epoch)


def _reset_counters(epoch_loop: _TrainingEpochLoop) -> None:
    """Reset the counters of a data epoch that has ended."""
    epoch_loop.batch_progress.reset_on_run()
    epoch_loop.scheduler_progress.reset_on_run()
    epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.total.reset()
