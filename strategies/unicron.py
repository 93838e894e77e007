"""The Lightning strategy ``unicron``: data parallelism that trains straight through failures.

Each worker holds the whole model, and is a replica of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.checks import check_optimizers
from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy
from unicron_lightning.strategies.manual.steps import ManualSteps
from unicron_lightning.strategies.metrics.sums import StepMetrics
from unicron_lightning.strategies.micro_batch import MicroBatches
from unicron_lightning.strategies.parallelism import FinishedStep, Parallelism, StepRunner
from unicron_lightning.strategies.passes.evaluation import Passes
from unicron_lightning.strategies.state import join_state
from unicron_lightning.strategies.state.checkpointing import SingleFileCheckpoints
from unicron_lightning.strategies.state.comparison import further_state
from unicron_lightning.strategies.state.memory import WholeDivision
from unicron_lightning.worker.agreement import NO_DIGEST
from unicron_lightning.worker.buckets import GradientBuckets, TrainedParameters
from unicron_lightning.worker.comparison import Divergence, OnDivergence, saved_tensors
from unicron_lightning.worker.effects import Effects
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.exact_sums import ExactGradients, step_sums
from unicron_lightning.worker.model_state import share_initial
from unicron_lightning.worker.reporting import balance_of
from unicron_lightning.worker.reproducible import digest_of
from unicron_lightning.worker.rows import Balance, shares_of
from unicron_lightning.worker.session import Session
from unicron_lightning.worker.step import GradientStep

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class DataParallel(Parallelism):
    """Data parallelism of workers that each hold the model.

    Args:
        strategy: the strategy that it belongs to.
        steps: runs its steps.
        rebalance: a rank that is slower than the others gets fewer of a step's micro-batches.
    """

    whole = True
    shuffles = True
    shards = 1
    optimizes_manually = True
    repeats = True
    steps: WholeModelSteps

    def __init__(self, strategy: FaultTolerantStrategy, steps: WholeModelSteps, *, rebalance: bool) -> None:
        self.steps = steps
        self.evaluation = Passes(strategy)
        self.checkpoints = SingleFileCheckpoints(strategy)
        self.division = WholeDivision(strategy)
        self._strategy = strategy
        self._rebalance = rebalance

    @property
    def manual(self) -> ManualSteps | None:  # type: ignore[override]
        return self.steps.manual

    def open(self, device: torch.device, shape: StepShape, on_world: Callable[[World], None]) -> tuple[Session, bool]:
        return Session.of_process(device, shape.micro_batches, on_world)

    def built(self) -> None:
        strategy = self._strategy
        automatic = strategy.module.automatic_optimization
        check_optimizers(strategy.optimizers, several=not automatic, repeats=automatic)
        self.steps.begin_fit(balance_of(strategy.engine, self._whole_step) if self._rebalance else None)

    def _whole_step(self) -> int:
        """Return the number of micro-batches of the present epoch's steps."""
        return self._strategy.shape.of(self._strategy.trainer.current_epoch).micro_batches

    def found(self, *, resumes: bool) -> None:
        strategy = self._strategy
        if resumes or strategy.engine.world.size == 1:
            return
        module, engine = strategy.module, strategy.engine
        if strategy.collectives.starting:
            strategy.comparison.agree("model")
            share_initial([*module.parameters(), *module.buffers()], engine)
        elif strategy.trainer.state.fn == TrainerFn.FITTING:  # perhaps of a module that the trainer has not had before
            share_initial([*saved_tensors(module).values()], engine)

    def share(self, micro_batches: range) -> list[int]:
        return [micro_batches[number] for number in self.own(range(len(micro_batches)))]

    def own(self, in_full_step: Sequence[int]) -> list[int]:
        world, balance, number = self._strategy.engine.world, self.steps.balance, len(in_full_step)
        counts = None if balance is None else balance.counts(number)
        return shares_of(range(number), world.size, counts, in_full_step)[world.rank]

    def unsteady(self) -> Iterable[Tensor]:
        return self.steps.unsteady()

    def state(self, trainer: pl.Trainer) -> dict[str, Any]:
        manual = {} if self.manual is None else {"manual": self.manual.state()}
        return {**join_state.parameter_state(trainer), **manual}

    def admitted(self, state: dict[str, Any]) -> None:
        if self.manual is not None and "manual" in state:
            self.manual.load_state(state["manual"])

    def at_boundary(self) -> None:
        if self.manual is not None:
            self.manual.arrive()

    def digest(self) -> str:
        return digest_of(self._strategy.module.state_dict())

    def close(self) -> None:
        self.steps.close()


class WholeModelSteps(StepRunner):
    """Steps of a model that each worker holds.

    Args:
        strategy: the strategy that they belong to.
        bucket_bytes: size of a gradient bucket.
        overlap: start reductions during the last micro-batch's backward.
        reproducible: sums are exact.
        divergence: compares the workers' states.

    Attributes:
        kind: class of the gradients' buckets.
        balance: shares of the ranks by speed; None: equal ones.
        manual: runs the steps instead, if the module optimizes manually.
    """

    def __init__(
        self,
        strategy: FaultTolerantStrategy,
        bucket_bytes: int,
        divergence: Divergence,
        *,
        overlap: bool,
        reproducible: bool,
    ) -> None:
        super().__init__(divergence)
        self.kind = ExactGradients if reproducible else GradientBuckets
        self.balance: Balance | None = None
        self.manual: ManualSteps | None = None
        self._strategy = strategy
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._trained = TrainedParameters()
        self._gradients: GradientBuckets | None = None
        self._effects: Effects | None = None
        self._used: list[bool] = []
        self._watched = False
        """Whether the module may leave gradients in its own `optimizer_zero_grad`."""
        self._follows = False
        """Whether the present step has begun with gradients of the one before."""

    def begin_fit(self, balance: Balance | None) -> None:
        """Begin with a complete model, of which the optimizers know."""
        strategy = self._strategy
        self._effects = Effects(strategy.module, StepMetrics(strategy.module), frozen=True, exact=strategy.reproducible)
        self.balance = balance
        self._watched = is_overridden("optimizer_zero_grad", strategy.module)
        if not strategy.module.automatic_optimization:
            options = (self._bucket_bytes, self.divergence, self._effects)
            self.manual = ManualSteps(strategy, *options, kind=self.kind, overlap=self._overlap)

    def unsteady(self) -> Iterable[Tensor]:
        """Return what the effects of micro-batches, and their end, write to."""
        return () if self._effects is None else self._effects.buffers.unsteady

    def check_data(self, loader: DataLoader[Any]) -> None:
        """See `Witness.check_data`."""
        if not self._strategy.module.automatic_optimization:
            self._strategy.witness.check_data(loader.dataset)

    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        strategy, effects = self._strategy, self._effects
        engine, module = strategy.engine, strategy.module
        assert effects is not None
        if self.manual is not None:
            return self.manual.run(batch, *where)
        gradients = self._buckets(module, first=batch.step == 0)
        self._follows = self._watched and any(gradients.used)
        gradients.begin()
        effects.begin(batch.micro_batches[0], strategy.agreed, anew=batch.step == 0)
        parts = (effects.norms, effects.buffers, gradients, effects.metrics)
        sums = step_sums(strategy.agreed, *parts, batch.micro_batches)
        again = strategy.evaluations > 0
        options: dict[str, Any] = {"takes_index": bool(where), "skips": True, "again": again}
        micro_batches = MicroBatches(strategy, batch, sums.add, effects, **options)
        further = partial(further_state, strategy.trainer)
        digest = NO_DIGEST if again else self.divergence.digest(engine, module, strategy.optimizers, further)
        witness = strategy.witness.of_step(engine.step - again, gradients, micro_batches.repeat, batch)
        rest = (self.balance, digest, batch.in_full_step, witness)
        operation = GradientStep(batch.micro_batches, gradients, sums, micro_batches.run, *rest)
        self._commit(engine, operation)
        loss, calls, self._used = sums.finish()
        effects.norms.commit(len(batch.micro_batches))
        return FinishedStep(operation=operation, loss=loss, calls=calls, output=micro_batches.output(loss))

    def backward(self, loss: Tensor) -> Tensor:
        module, plugin = self._strategy.module, self._strategy.precision_plugin
        assert self._gradients is not None
        # The base class's hook: the loss has been scaled already, micro-batch by micro-batch.
        Precision.pre_backward(plugin, loss, module)
        if self._follows and any(p.grad is not None and bool(p.grad.any()) for p in self._gradients.parameters):
            self._watched = False
            rank_zero_warn(
                f"{type(module).__qualname__}.optimizer_zero_grad() left gradients of the step before; the unicron "
                "strategy drops them, since a step's gradients are those of its micro-batches. Write instead: "
                "Trainer(accumulate_grad_batches=...), or manual optimization"
            )
        self._gradients.install(self._used)
        return plugin.post_backward(loss, module)

    def close(self) -> None:
        """Release the buckets."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        if self.manual is not None:
            self.manual.close()
            self.manual = None

    def _buckets(self, module: pl.LightningModule, first: bool) -> GradientBuckets:
        """Return the buckets, rebuilt when other parameters need gradients than before."""
        named = self._trained.find(module, self._strategy.optimizers, anew=first)
        if self._gradients is None or not self._gradients.matches([p for _, p in named]):
            if self._gradients is not None:
                self._gradients.close()
            self._gradients = self.kind(named, self._bucket_bytes, self._overlap)
        return self._gradients


_MIB = 1 << 20


class UnicronStrategy(FaultTolerantStrategy):
    """Data parallelism through failures, for any `LightningModule`, with automatic or manual optimization.

    Args:
        bucket_mib: size of a gradient bucket, in MiB.
        overlap: start reductions during the last micro-batch's backward.
        num_micro_batches: M of a global batch, instead of accumulate_grad_batches x devices x num_nodes.
        rebalance: a rank that is slower than the others gets fewer of a step's micro-batches.
        compare: workers compare seed, data, parameters and settings when the task begins and at each join, and one that
            differs is refused; see `state.comparison`. Set False if `hparams` differ on purpose.
        digest_every: number of steps between two comparisons of the workers' parameters, buffers and rates, by a digest
            in the commit; in the first step with a joiner all of their state is compared. 0: never.
        on_divergence: ``heal`` replaces workers whose parameters differ from most, ``stop`` ends the task; see
            `divergence`.
        reproducible: parameters, states, logged values and checkpoints have the same bits for any failures, joins and
            stragglers, and any number of workers of one kind; see docs/protocol.md.
        witness_every: k: in every k-th step each worker repeats a micro-batch of another one, and their gradients' bits
            are compared before the commit; a wrong worker ends, and the step does without it. None or 0: never. See
            docs/trust.md.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: given by Lightning.

    Raises:
        ConfigError: for settings that can't be supported exactly; see `checks`.
    """

    strategy_name = "unicron"

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
        reproducible: bool = False,
        witness_every: int | None = None,
    ) -> None:
        super().__init__(
            num_micro_batches=num_micro_batches,
            compare=compare,
            reproducible=reproducible,
            witness_every=witness_every,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if bucket_mib <= 0:
            raise ConfigError(f"bucket_mib={bucket_mib!r} must be above 0 (MiB)")
        divergence = Divergence(digest_every, on_divergence)
        options = (int(bucket_mib * _MIB), divergence)
        steps = WholeModelSteps(self, *options, overlap=overlap, reproducible=reproducible)
        self.parallelism = DataParallel(self, steps, rebalance=rebalance)


# Lightning and scripts ask by isinstance() what works, such as torch.compile.
SingleDeviceStrategy.register(UnicronStrategy)
