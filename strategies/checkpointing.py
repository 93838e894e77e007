"""Checkpoints under the strategy ``unicron``: written once; those of ddp, with other counters, are converted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies import join_state
from unicron_lightning.strategies.collecting import CollectingStrategy
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import LeaderAction


class CheckpointingStrategy(CollectingStrategy):
    """Save and load Lightning's checkpoints."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._shape: StepShape | None = None
        self._logged: bytes | None = None

    @property
    def engine(self) -> Engine:
        """This worker's engine."""
        raise NotImplementedError

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        rounds = 1 if self._shape is None else self._shape.accumulation
        if not {join_state.LOGGED, join_state.WHOLE} & checkpoint.keys():
            count_steps(checkpoint, rounds)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self._logged = checkpoint.get(join_state.LOGGED)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint by one worker, and by another if that one dies meanwhile."""

        def write() -> None:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

        engine = self.engine
        if self._trainer is not None and "optimizer_states" in checkpoint:
            checkpoint[join_state.LOGGED] = join_state.logged(self._trainer)
        with engine.activity.during("checkpoint"):
            if self._gather.interrupted():
                if self.is_global_zero:
                    write()
                return
            engine.run(LeaderAction("save_checkpoint", write))
        self._tell_checkpoint(checkpoint, str(Path(str(filepath)).absolute()))

    def _tell_checkpoint(self, checkpoint: dict[str, Any], path: str) -> None:
        """Report the checkpoint, from which the task resumes if no worker survives."""
        engine = self.engine
        if engine.control is not None and "optimizer_states" in checkpoint:  # from all: the first may die now
            step = int(checkpoint["global_step"])
            engine.control.send(wire.CheckpointSaved(worker=engine.control.worker, path=path, step=step))


def count_steps(checkpoint: dict[str, Any], rounds: int) -> None:
    """Turn a checkpoint's counts of batches per device, as other strategies have them, into counts of steps.

    Args:
        checkpoint: Lightning's.
        rounds: batches per device that make a step (``accumulate_grad_batches``).

    Raises:
        ConfigError: if it was written between two batches of a step.
    """
    progress: Any = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None or rounds == 1:
        return
    current, total = progress["current"], progress["total"]
    if current["processed"] % rounds and not progress.get("is_last_batch"):
        raise ConfigError(
            f"the checkpoint was written after batch {current['processed']} of an epoch with accumulate_grad_batches="
            f"{rounds}, in the middle of a step, whose gradients it does not hold: resume from one written after a "
            f"multiple of {rounds} batches"
        )
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    for name, batches in current.items():
        before, rest = divmod(total[name] - batches, max(1, epochs))
        current[name] = -(-batches // rounds)
        total[name] = current[name] + (-(-(total[name] - batches) // rounds) if rest else epochs * -(-before // rounds))
