"""Forward and backward of one micro-batch, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.seeding import RandomPurpose, place_seed, seed_all
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.metrics.recording import logged_dtype
from unicron_lightning.worker.effects import UNCOUNTED, Effects
from unicron_lightning.worker.sums import LogCall

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

_warnings = WarningCache()


class NoLoss(ConfigError, MisconfigurationException):
    """A `training_step` returned neither a loss nor None; Lightning's own loop raises its second base."""


class MicroBatches:
    """Runs the micro-batches of one step.

    Random state depends on (seed, epoch, step, micro-batch) only, and the loss is divided by
    `StepShape.divisor`.

    Args:
        strategy: provides module, seed, device and precision.
        batch: locates the samples.
        take: takes one micro-batch's loss (None: it is skipped), logged values, and number.
        effects: receive the other changes.
        takes_index: whether the module's ``training_step`` takes the batch index.
        skips: whether it may return None.
        again: whether the step has been run before, by an optimizer that evaluates the loss several times.
    """

    def __init__(
        self,
        strategy: FaultTolerantStrategy,
        batch: GlobalBatch,
        take: Callable[[Tensor | None, Sequence[LogCall], int], None],
        effects: Effects,
        *,
        takes_index: bool,
        skips: bool = False,
        again: bool = False,
    ) -> None:
        self._strategy = strategy
        self._module = strategy.module
        self._batch = batch
        self._take = take
        self._effects = effects
        self._takes_index = takes_index
        self._skips = skips
        self._again = again
        self._last_output: Any = None
        self._scaler = getattr(strategy.precision_plugin, "scaler", None)
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=strategy.root_device))  # creates its state even without a share

    def run(self, micro_batch: int, *, counts: bool = True) -> None:
        """Run forward and backward; gradients accumulate. If it does not count, they are zero."""
        found = self._pass(micro_batch, counts=counts)
        if found is None:
            self._skip(micro_batch, counts=counts)
            return
        loss, calls, output = found
        if counts:
            self._take(loss, calls, micro_batch)
        self._effects.finish_micro_batch(micro_batch if counts else UNCOUNTED)
        if counts and not self._again:  # it reads ahead in streams, whose ends are part of the first commit
            self._batch.finished(micro_batch)
        self._last_output = apply_to_collection(output, Tensor, Tensor.detach)

    def repeat(self, micro_batch: int, *, counts: bool = True) -> None:
        """Run forward and backward of a micro-batch that another rank has; all but the gradients is dropped."""
        with self._effects.dropped():
            self._pass(micro_batch, counts=counts)

    def _pass(self, micro_batch: int, *, counts: bool) -> tuple[Tensor | None, Sequence[LogCall], Any] | None:
        """Run forward and backward; return loss, logged values and output, or None for a micro-batch left out."""
        strategy, plugin, module = self._strategy, self._strategy.precision_plugin, self._module
        activity = strategy.engine.activity
        activity.enter("data", micro_batch)
        batch = self._batch.fetch(micro_batch) if counts else self._batch.stand_in(micro_batch)
        activity.enter("compute", micro_batch)
        if batch is None and self._skips:
            return None
        place = (self._batch.epoch, self._batch.step, micro_batch)
        seed_all(
            place_seed(strategy.seed, RandomPurpose.FORWARD, *place)
        )  # hooks of the transfer may augment the samples
        data = strategy.to_device(batch)
        strategy.engine.fault("forward", strategy.engine.step, micro_batch, module)
        shape = strategy.shape.of(self._batch.epoch)
        index = shape.batch_index(self._batch.step, self._batch.place(micro_batch))
        self._effects.start_micro_batch()
        with strategy.results.recording(data) as calls, torch.enable_grad():
            with plugin.train_step_context():
                output = module.training_step(data, index) if self._takes_index else module.training_step(data)
            loss = self._loss(output)
            if loss is not None:
                scaled = loss / shape.divisor(self._batch.in_full_step) if counts else loss * 0.0
                if self._scaler is not None:
                    scaled = self._scaler.scale(scaled)
                plugin.backward(scaled, module, strategy.optimizers[0])
        return loss, calls, output

    def _skip(self, micro_batch: int, *, counts: bool) -> None:
        """Leave out a micro-batch for which the loader has yielded None."""
        _warnings.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        self._effects.start_micro_batch()
        if counts:
            self._take(None, (), micro_batch)
        self._effects.finish_micro_batch(micro_batch)
        if not self._again:
            self._batch.finished(micro_batch)
        self._last_output = None

    def output(self, loss: float | None) -> Any:
        """Return the step's output for Lightning's hooks: the last micro-batch's, with the global batch's mean loss.

        Args:
            loss: the mean; None if all micro-batches were skipped, which skips Lightning's backward, too.
        """
        if loss is None:
            return None
        dtype = logged_dtype(self._strategy.precision_plugin) or torch.get_default_dtype()
        mean = torch.tensor(loss, device=self._strategy.root_device, dtype=dtype)
        if isinstance(self._last_output, Mapping):
            return {**self._last_output, "loss": mean}
        return mean

    def _loss(self, output: Any) -> Tensor | None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if output is None and self._skips:
            return None
        if isinstance(loss, Tensor):
            return loss
        expected = ", or None to skip the micro-batch" if self._skips else ""
        raise NoLoss(
            f"training_step returned {output!r}; expected a loss tensor, or a dict with one as 'loss'{expected}. "
            f"Lightning's own message: {_of_lightning(output)}"
        )


def _of_lightning(output: Any) -> str:
    """Return what Lightning's loop says of an output without a loss."""
    try:
        ClosureResult.from_training_step_output(output)
    except (MisconfigurationException, TypeError) as error:
        return str(error)
    return "None"
