"""Validation and test of a model that several workers hold together: global batches, with equal logs on all ranks.

One item of Lightning's loop is a global batch, as in training, and one operation of all members. Members report the
values logged by their batches. They are reduced in the order of batches, and logged by all workers, so they do not
depend on the distribution of the batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.data.combined_pass import CombinedPass
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.pass_loaders import PassLoader
from unicron_lightning.data.seeding import preserved
from unicron_lightning.data.stream_pass import StreamPass
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.evaluation import ReplicaEvaluation
from unicron_lightning.strategies.metrics.recording import LogCall, RecordingResults, logged_dtype, merge_calls
from unicron_lightning.strategies.metrics.step_metrics import StepMetrics
from unicron_lightning.strategies.passes.evaluation import EVALUATION, active_evaluation
from unicron_lightning.strategies.passes.script_loaders import evaluation_loops
from unicron_lightning.worker import codec
from unicron_lightning.worker.operations import unpack_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class GlobalPasses(ABC):
    """Passes over global batches; implements `EvaluationRunner`.

    Args:
        strategy: the strategy that they belong to.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self._strategy = strategy

    @abstractmethod
    def check_data(self, loader: DataLoader[Any]) -> None:
        """Refuse a loader.

        Raises:
            ConfigError: its batches cannot be distributed.
        """

    @abstractmethod
    def operation(self, batch: PassBatch) -> ReplicaEvaluation:
        """Return the operation that runs a global batch."""

    def begin_run(self, trainer: pl.Trainer) -> None:
        dtype = logged_dtype(self._strategy.precision_plugin)
        for loop in evaluation_loops(trainer):
            loop._results = RecordingResults(False, self._strategy.reduce, dtype=dtype)

    def loader(self, trainer: pl.Trainer, loader: DataLoader[Any], shape: StepShape) -> PassLoader | StreamPass:
        """Return the loader for the evaluation loop.

        Raises:
            ConfigError: for loaders whose batches cannot be distributed.
        """
        self.check_data(loader)
        most = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
        if isinstance(loader.dataset, IterableDataset):
            return self._strategy.loaders.stream_pass(trainer, loader, most)
        return PassLoader(
            loader,
            shape,
            self._strategy.seed,
            most if isinstance(most, int) else None,
            lambda: trainer.num_sanity_val_steps if trainer.sanity_checking else math.inf,
            lambda: trainer.current_epoch,
            self._strategy.share,
        )

    def together(self, combined: CombinedPass) -> NoReturn:
        """Refuse loaders that are read at once.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"CombinedLoader(mode={combined.mode!r}) in an evaluation; {self._strategy.strategy_name} evaluates one "
            'loader after the other: expected mode="sequential", a list or a dict of loaders'
        )

    def step(self, run: Callable[[], Any], args: Sequence[Any]) -> None:
        """Run a global batch of the pass, forward only, and log its results."""
        strategy = self._strategy
        batch, *where = args
        if not isinstance(batch, GlobalBatch):
            raise ConfigError(
                f"a validation batch is a {type(batch).__qualname__} of several loaders; {strategy.strategy_name} runs "
                'them one after another: give a list of DataLoaders, or CombinedLoader(..., mode="sequential")'
            )
        if not strategy.engine.has_state:
            return  # a joiner before its first fit: the members have its batches
        strategy.engine.activity.enter("validation")
        item = PassBatch(strategy, batch, where)
        # Parameters are gathered into normal tensors, as in training, and a failure may change them.
        with strategy.collectives.refused(item.method), preserved(), torch.inference_mode(False), torch.no_grad():
            item.log(unpack_parts(strategy.engine.run(self.operation(item))))


class PassBatch:
    """One global batch of a pass.

    Args:
        strategy: provides module and results.
        batch: locates the samples.
        where: the other arguments of ``validation_step``: Lightning's batch index, and that of the loader.

    Attributes:
        batch, where: as above.
        loader: index of the loader.
        method: name of the module's step.
        calls: values logged by each micro-batch that has been run here.
        metrics: the module's metric objects, which record their states by micro-batch.
    """

    def __init__(self, strategy: FaultTolerantStrategy, batch: GlobalBatch, where: Sequence[int]) -> None:
        self.batch = batch
        self.where = where
        self.loader = where[1] if len(where) > 1 else 0
        self.method = "test_step" if strategy.trainer.testing else "validation_step"
        self.calls: dict[int, list[LogCall]] = {}
        self.metrics = StepMetrics(strategy.module)
        self.metrics.begin()
        self._strategy = strategy
        results = active_evaluation(strategy.trainer)._results
        assert isinstance(results, RecordingResults)
        self._results = results

    def run(self, data: Any) -> Any:
        """Run the module's step; return its output."""
        return getattr(self._strategy.module, self.method)(data, *self.where)

    def place(self, number: int) -> tuple[int, int, int, int]:
        """Place of a micro-batch, which decides its random state."""
        if self.batch.ends is not None:  # which has numbers of its own in each global batch
            number += self.batch.step * self._strategy.shape.micro_batches
        return EVALUATION, self.batch.epoch, self.loader, number

    def recording(self, data: Any) -> AbstractContextManager[list[LogCall]]:
        """Record the values that are logged for a micro-batch."""
        return self._results.recording(data)

    def results(self, numbers: Iterable[int]) -> bytes:
        """Encode the values logged by some micro-batches, and the states of metric objects; with ends of streams."""
        recorded, ends = self.metrics.recorded, self.batch.ends
        logged = {
            number: [[call.plain() for call in self.calls[number]], recorded.get(number, {})] for number in numbers
        }
        return codec.encode([logged, {} if ends is None else ends.found])

    def log(self, parts: Sequence[bytes]) -> None:
        """Log the values of all micro-batches, reduced over them."""
        logged: dict[int, Any] = {}
        found: dict[int, int] = {}
        for part in parts:
            results, ends = codec.decode(part)
            logged.update(results)
            found.update(ends)
        if self.batch.ends is not None:
            self.batch.ends.agree([{"ends": found, "states": {}}])
        assert sorted(logged) == list(self.batch.micro_batches), "each batch counts once"
        self.metrics.commit({number: states for number, (_, states) in logged.items()})
        calls = [LogCall.from_plain(call) for number in sorted(logged) for call in logged[number][0]]
        # As after a step's first logged value: otherwise a later value would count as the pass's first.
        self._strategy.trainer._logger_connector._current_fx = self.method
        for call in merge_calls(calls):
            self._results.replay(call, self._strategy.module, self._strategy.root_device)
