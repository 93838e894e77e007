"""A checkpoint that was written in the last step of a data epoch: a run that resumes from it begins the next one.

Lightning's training loop finds that a data epoch is over by comparing its steps with their number, after the next data
epoch has begun. A stream has no such number, and with a schedule it is that of the next data epoch.
"""

from __future__ import annotations

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import RestartStage


def leave_finished_epoch(loop: _FitLoop) -> None:
    """Reset the counters of a data epoch that a checkpoint's step has ended, as Lightning does.

    Args:
        loop: has been reset for a run, and has counted the data epoch.
    """
    epoch_loop = loop.epoch_loop
    ended = epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch
    if not (ended and loop.restarted_mid_epoch):
        return
    epoch_loop._batches_that_stepped += 1
    epoch_loop.batch_progress.increment_completed()
    epoch_loop.batch_progress.reset_on_run()
    epoch_loop.scheduler_progress.reset_on_run()
    epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.total.reset()
    epoch_loop._restart_stage = RestartStage.RESTARTED_ON_LAST  # so that Lightning does not count the step again
