"""The seam between a strategy and its parallelism: how workers hold the model, run its steps and keep its state.

`FaultTolerantStrategy` has everything that does not depend on it: Lightning's hooks, the session, worlds, joins, the
global batch, logged values and reports. A further way to spread a model is a further `Parallelism`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.replica.step import ReplicaStep
from unicron_lightning.strategies.passes.prediction import Predictions
from unicron_lightning.strategies.state.memory import WholeDivision
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.rows import present
from unicron_lightning.worker.session import Session
from unicron_lightning.worker.step import GradientStep, Step, SumsT
from unicron_lightning.worker.sums import LogCall

if TYPE_CHECKING:
    from unicron_lightning.strategies.manual.steps import ManualSteps
    from unicron_lightning.strategies.passes.evaluation import GlobalPasses, Passes
    from unicron_lightning.worker.comparison import Divergence


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A committed step, before the optimizer's.

    Attributes:
        operation: the operation that has run it.
        loss: mean over the global batch, the same on all ranks; None if no micro-batch had one.
        calls: values logged in the step, over the global batch.
        output: the output of ``training_step`` for Lightning's hooks.
    """

    operation: Step[Any]
    loss: float | None
    calls: Sequence[LogCall]
    output: Any


class StepRunner(ABC):
    """Runs steps.

    Args:
        divergence: compares the workers' states.

    Attributes:
        divergence: as above.
        grad_norm: norm of the last finished step's gradients over the whole model, before clipping; of models that
            several workers hold together.
    """

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence
        self.grad_norm = 0.0

    def check_data(self, loader: DataLoader[Any]) -> None:  # noqa: B027 - most refuse no more than `check_loader`
        """Refuse training data.

        Raises:
            ConfigError: it cannot be distributed.
        """

    @abstractmethod
    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        """Run a step through failures, up to its commit.

        Args:
            batch: locates the samples.
            where: Lightning's batch index, if the module's ``training_step`` takes it.
        """

    @abstractmethod
    def backward(self, loss: Tensor) -> Tensor:
        """Hand the gradients to the optimizer, in place of Lightning's backward; return the loss."""

    def _commit(self, engine: Engine, operation: GradientStep | ReplicaStep[SumsT]) -> None:
        """Run a step's operation through failures."""
        engine.run(operation)
        self.divergence.check(operation, engine)


class CheckpointStore(ABC):
    """Writes and reads checkpoints. One that keeps everything in Lightning's file only has to write it.

    Attributes:
        divided: whether each worker reads a part of a checkpoint; otherwise each reads all of it.
        at_urls: whether checkpoints that are written beside the training may be at URLs.
    """

    divided = False
    at_urls = True

    @abstractmethod
    def save(self, checkpoint: dict[str, Any], filepath: Any, options: Any) -> str | None:
        """Write a checkpoint to a path or URL, as the script has given it.

        Returns:
            Its digest ("": it cannot be read back), or None if the task cannot resume from it.
        """

    def held_parts(self) -> Sequence[str]:
        """Return the names of the parts of a divided model that this worker could write, its own first."""
        return ()

    @abstractmethod
    def held(self, checkpoint: dict[str, Any]) -> HeldCheckpoint:
        """Return a checkpoint as this worker holds it; its tensors are the training's own."""

    def steady(self) -> Iterable[Tensor]:
        """Return tensors of `held` that change in steps only, beside parameters and states of torch's optimizers."""
        return ()

    def written(self, step: int) -> None:  # noqa: B027
        """Learn that a checkpoint of a step is complete; called by any thread."""

    def load(self, path: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a checkpoint's content; ``read`` gives that of Lightning's file."""
        return read()

    def load_model(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Restore the model; ``load`` does so from the content."""
        load()

    def load_optimizers(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Restore the optimizers; ``load`` does so from the content."""
        load()


class Parallelism(ABC):
    """How the workers of a task hold the model. The methods are in the order in which a run calls them.

    Attributes:
        whole: whether each worker holds all of it, so that the workers can be compared, and are torch's default group.
            Otherwise Lightning's checkpoints have no state of the module and its optimizers: joiners get their shards
            from another replica, and `checkpoints` writes them, and restores them once the model is built.
        shuffles: whether training data is shuffled as under ddp.
        shards: devices that compute a micro-batch together, in the declared world.
        size: workers of a replica.
        one_size: whether all micro-batches must have the same number of samples.
        scheduled: whether the number of a step's micro-batches may depend on the data epoch.
        optimizes_manually: whether modules may have ``automatic_optimization=False``.
        repeats: whether an optimizer may call its closure, which is the step, several times.
        manual: runs the steps of such a module while it trains.
        steps, evaluation, checkpoints: its parts.
        division: of states in the agents' memory.
    """

    whole: bool
    shuffles: bool
    shards: int
    size = 1
    one_size = False
    scheduled = True
    optimizes_manually = False
    repeats = False
    manual: ManualSteps | None = None
    steps: StepRunner
    evaluation: Passes | GlobalPasses
    checkpoints: CheckpointStore
    division: WholeDivision

    # ---- a run's start

    def check(self, trainer: pl.Trainer) -> None:  # noqa: B027 - most have nothing to do in some of these methods
        """Refuse settings, before this worker takes part in the task.

        Raises:
            ConfigError: naming the setting.
        """

    @abstractmethod
    def open(self, device: torch.device, shape: StepShape, on_world: Callable[[World], None]) -> tuple[Session, bool]:
        """Return this process's session, and whether it is new."""

    def begin(self, session: Session) -> None:  # noqa: B027
        """Prepare for the model's construction; the seed is known."""

    def place(self, module: pl.LightningModule, device: torch.device) -> None:
        """Move the module to its device."""
        module.to(device)

    def set_up_optimizers(self, trainer: pl.Trainer, default: Callable[[pl.Trainer], None]) -> None:
        """Set the strategy's optimizers; ``default`` sets the module's own."""
        default(trainer)

    def built(self) -> None:  # noqa: B027
        """Begin a ``fit`` with the complete model and its optimizers.

        Raises:
            ConfigError: the optimizers are not supported.
        """

    @abstractmethod
    def found(self, *, resumes: bool) -> None:
        """Give all founders the same initial state.

        Args:
            resumes: whether a checkpoint follows.
        """

    def unsteady(self) -> Iterable[Tensor]:
        """Return parameters that change within a step, and not in the optimizer's step only."""
        return ()

    def predictions(self, trainer: pl.Trainer, engine: Engine) -> Predictions:
        """Return a new run of ``trainer.predict``."""
        return Predictions(trainer, engine)

    # ---- worlds

    @property
    def spares(self) -> int:
        """Number of members of the present world that wait for partners, and take part in no step."""
        return 0

    def enter(self, world: World) -> None:  # noqa: B027
        """Enter an epoch, before any work in it.

        Raises:
            CommunicatorAborted, EpochChanged: a member failed.
        """

    @abstractmethod
    def share(self, micro_batches: range) -> list[int]:
        """Return this worker's micro-batches of a step in the present world."""

    def own(self, in_full_step: Sequence[int]) -> list[int]:
        """Return this worker's micro-batches of a step with missing ones.

        Args:
            in_full_step: their numbers in a step without missing ones, as in `GlobalBatch`.
        """
        return present(self.share(range(in_full_step[-1] + 1)), in_full_step)

    def compare(self, *, joined: bool) -> None:
        """Compare the workers' states before the next step, as one has joined.

        Args:
            joined: whether it is this one.
        """
        self.steps.divergence.expect(joined=joined)

    def at_boundary(self) -> None:  # noqa: B027
        """Act between two steps, after a possible change of worlds."""

    @abstractmethod
    def state(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return this part's state at a step boundary for joiners, in addition to that of Lightning's loops."""

    def admitted(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take another worker's, or a checkpoint's, `state`; Lightning's part is restored."""

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores this worker's part of the model, and of its optimizer, as they are now.

        Hooks of a run's start may change them. What `state` and Lightning's checkpoint have is left out.
        """
        return lambda: None

    def finish(self) -> None:  # noqa: B027
        """End the training of a ``fit``, before the hooks of its end."""

    def digest(self) -> str:
        """Return the digest of the whole model on all workers, which call it together; empty: there is none."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End a run."""
