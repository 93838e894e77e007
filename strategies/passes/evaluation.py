"""Validation and test passes, with equal results on all ranks.

Of a model that each worker holds (`Passes`), a worker runs its batches through Lightning's loop, and lost ones at the
end. Of a model that several workers hold together (`GlobalPasses`), one item of Lightning's loop is a global batch, as
in training, and one operation of all members. Members report the values logged by their batches. They are reduced in
the order of batches, and logged by all workers, so they do not depend on the distribution of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import _EvaluationLoop
from torch.utils.data import DataLoader

from unicron_lightning.data.combined import CombinedPass
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.passes import EvaluationLoader
from unicron_lightning.data.seeding import RandomPurpose, preserved, seeded
from unicron_lightning.data.steps import PassLoader
from unicron_lightning.data.streams import ENDS
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.step import ReplicaEvaluation
from unicron_lightning.strategies.metrics.recording import RecordingResults, logged_dtype
from unicron_lightning.strategies.metrics.sums import StepMetrics, merge_metric_states, set_common_aside
from unicron_lightning.strategies.passes.loaders import evaluation_loops, order_seed
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.effects import MetricState
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.module_buffers import EvaluationBuffers
from unicron_lightning.worker.operations import Evaluation
from unicron_lightning.worker.rows import ReportSum
from unicron_lightning.worker.sums import LogCall, merge_calls

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class _Pass:
    """One loader's pass in progress."""

    def __init__(self, loop: _EvaluationLoop, loader: EvaluationLoader, index: int | None) -> None:
        self.loop = loop
        self.loader = loader
        self.index = index
        self.current: int | None = None
        self.calls: dict[int, list[LogCall]] = {}
        self.common: dict[str, MetricState] | None = None
        self.metrics: StepMetrics | None = None
        """Records the states of metric objects by batch; None: those of this rank are kept."""
        self.seen = loop._seen_batches_per_dataloader[index or 0]


class Passes:
    """Validation and test passes of a model that each worker holds.

    Args:
        strategy: the strategy that they belong to.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self._strategy = strategy
        self._pass: _Pass | None = None
        self._buffers: EvaluationBuffers | None = None
        self._number = self._index = 0
        """Number of the present batch in its pass, and of its loader."""
        self._metrics: StepMetrics | None = None
        """`_Pass.metrics` of the present pass."""

    def begin_run(self, trainer: pl.Trainer) -> None:
        self._pass = None
        dtype = logged_dtype(self._strategy.precision_plugin)
        self._strategy.collectives.evaluates = partial(evaluates, trainer)
        for loop in evaluation_loops(trainer):
            loop._results = RecordingResults(
                False, self._strategy.reduce, self.epoch_metrics, lambda: trainer.sanity_checking, dtype
            )

    def loader(self, trainer: pl.Trainer, loader: DataLoader[Any]) -> EvaluationLoader:
        return self._made(loader, loader)

    def together(self, combined: CombinedPass) -> EvaluationLoader:
        """Return the loader of several loaders that are read at once."""
        first, _ = combined.parts[0].opened()
        return self._made(first, combined)

    def _made(self, loader: DataLoader[Any], source: DataLoader[Any] | CombinedPass) -> EvaluationLoader:
        batches = self._strategy.loaders.pass_batches(source, order_seed())
        return EvaluationLoader(loader, batches, self.begin, self.start_batch)

    def step(self, run: Callable[[], Any], args: Sequence[Any]) -> Any:
        """Run a batch, with random numbers that depend on its place only, whichever rank runs it."""
        self._engine.fault("validation", self._engine.step)
        epoch: Any = self._trainer.fit_loop.epoch_progress.current
        if self._pass is not None:
            self._set_aside(self._pass)
        if self._buffers is None:
            self._buffers = EvaluationBuffers(self._strategy.module)
        if self._metrics is not None:
            self._metrics.start_micro_batch()
        place = (RandomPurpose.EVALUATION, epoch.processed, self._index, self._number)
        try:
            with seeded(self._strategy.seed, *place):
                output = run()
            if self._metrics is not None:
                self._metrics.finish_micro_batch(self._number)
            return output
        finally:
            self._buffers.undo()

    @property
    def _trainer(self) -> pl.Trainer:
        return self._strategy.trainer

    @property
    def _engine(self) -> Engine:
        return self._strategy.engine

    def begin(self, loader: EvaluationLoader) -> Iterable[int]:
        """Start the pass over a loader; return this rank's batches."""
        self.finish()
        self._buffers = None
        self._engine.activity.enter("validation")
        loop = active_evaluation(self._trainer)
        assert loop._combined_loader is not None
        combined = loop._combined_loader
        if isinstance(combined, CombinedPass):
            loaders = [(combined.whole, combined.most)]
        else:
            loaders = list(zip(combined.flattened, loop.max_batches, strict=True))
        place, most = next((i, most) for i, (other, most) in enumerate(loaders) if other is loader)
        epoch: Any = self._trainer.fit_loop.epoch_progress.current
        loader.begin(epoch.processed, most)  # shuffled as Lightning's samplers
        self._index, self._metrics = 0, None
        planned = iter(loader.todo(self._engine.reports, self._engine.world.rank))
        if self._trainer.sanity_checking:  # Lightning discards its results: each rank evaluates alone
            return planned
        self._pass = _Pass(loop, loader, place if len(loaders) > 1 else None)
        self._index = self._pass.index or 0
        if self._strategy.reproducible:
            self._metrics = self._pass.metrics = StepMetrics(self._strategy.module)
            self._metrics.begin()
        first = list(islice(planned, 1))
        if not first and len(loaders) > 1:
            # Lightning detects the loader's change by its first batch, which this rank doesn't have.
            if place > 0:
                loop._store_dataloader_outputs()
            self._results.dataloader_idx = place
        return chain(first, planned)

    def start_batch(self, number: int) -> None:
        """Record the start of a batch; later log calls belong to it."""
        self._engine.activity.enter("validation", number)
        current, self._number = self._pass, number
        if current is None:
            assert self._trainer.sanity_checking
            return
        if current.current is not None:
            current.loader.finished.add(current.current)
        current.current = number
        self._results.record_into(current.calls.setdefault(number, []))

    def epoch_metrics(self) -> None:
        """Finish the pass whose metrics Lightning requests."""
        if self._pass is not None and self._results.dataloader_idx == self._pass.index:
            self.finish()

    def finish(self) -> None:
        """Complete the pass in progress: every rank receives every batch's results."""
        current, engine = self._pass, self._engine
        if current is None:
            return
        self._pass = None
        values, loader = self._results_of(current.loop), current.loader
        if current.current is not None:
            loader.finished.add(current.current)
        values.record_into(None)
        module = self._trainer.lightning_module
        common = self._set_aside(current)
        run = partial(self._run, current)
        if engine.has_state:
            results = partial(_encode, current, module)
            encoded = unpack_parts(engine.run(Evaluation(loader.todo, run, loader.finished, results)))
        else:  # a joiner evaluates alone before its first fit, where it receives its state
            for number in loader.todo(ReportSum.nothing(1), 0):
                run(number)
            encoded = [_encode(current, module)]
        loader.end()
        parts = [codec.decode(part) for part in encoded]
        merge_metric_states(module, common, _states(current, [part["metrics"] for part in parts]))
        calls: dict[int, list[Any]] = {}
        for part in parts:
            for number, batch_calls in part["calls"].items():
                calls.setdefault(number, batch_calls)
        self._replay(values, calls, current)

    def _set_aside(self, current: _Pass) -> dict[str, MetricState]:
        """Return the metrics' states from before the pass.

        They are needed until its first step: Lightning reads those of the loader before this one when it has a batch.
        """
        if current.common is None:
            current.common = set_common_aside(self._trainer.lightning_module)
        return current.common

    @property
    def _results(self) -> RecordingResults:
        assert self._pass is not None
        return self._results_of(self._pass.loop)

    @staticmethod
    def _results_of(loop: _EvaluationLoop) -> RecordingResults:
        results = loop._results
        assert isinstance(results, RecordingResults)
        return results

    def _run(self, current: _Pass, number: int) -> None:
        """Run a batch left over by a lost rank, or by Lightning's limit."""
        self._engine.activity.enter("validation", number)
        self._number = number
        results = self._results_of(current.loop)
        results.record_into(current.calls.setdefault(number, []))
        try:
            current.loop._evaluation_step(
                current.loader.batches.get(number), current.loop.batch_progress.current.ready, current.index or 0, None
            )
            current.loader.finished.add(number)
        finally:
            results.record_into(None)
            self._trainer._logger_connector.epoch_end_reached()

    def _replay(self, results: RecordingResults, calls: dict[int, list[Any]], current: _Pass) -> None:
        """Logs the batches' values, a round over the declared devices at a time: under ddp that is a step."""
        trainer, device = self._trainer, self._trainer.strategy.root_device
        module, devices = trainer.lightning_module, self._strategy.shape.devices
        before, results.dataloader_idx = results.dataloader_idx, current.index
        rounds = -(-(max(calls, default=-1) + 1) // devices)
        objects: dict[Any, LogCall] = {}
        for step, first in enumerate(range(0, rounds * devices, devices), current.seen):
            numbers = range(first, first + devices)
            logged = [LogCall.from_plain(call) for number in numbers for call in calls.get(number, [])]
            for call in merge_calls([call for call in logged if call.value is not None]):
                results.replay(call, module, device)
            if any(call.options[4] for call in logged if call.value is not None):
                _show(trainer, results.metrics(True), step)
            objects |= {call.options: call for call in logged if call.value is None}
        for call in objects.values():  # a metric object holds the whole pass: logged once
            results.replay(call, module, device)
        results.dataloader_idx = before
        # Lightning has counted this rank's batches; under ddp these are as many.
        current.loop._seen_batches_per_dataloader[current.index or 0] = current.seen + rounds


def _show(trainer: pl.Trainer, metrics: Mapping[str, Any], step: int) -> None:
    """Log the values of a step, as Lightning does after each batch."""
    connector = trainer._logger_connector
    connector._progress_bar_metrics.update(metrics["pbar"])
    connector._callback_metrics.update(metrics["callback"])
    connector._logged_metrics.update(metrics["log"])
    connector.log_metrics(metrics["log"], step=step)


def active_evaluation(trainer: pl.Trainer) -> _EvaluationLoop:
    """Return the loop that runs the present validation or test."""
    loop: Any = trainer._active_loop
    loop = loop.epoch_loop.val_loop if hasattr(loop, "epoch_loop") else loop
    assert isinstance(loop, _EvaluationLoop)
    return loop


def evaluates(trainer: pl.Trainer) -> str | None:
    """Return the name of the evaluation of which Lightning has begun a batch and not ended it."""
    stage = trainer.state.stage
    if stage is None or not (stage.evaluating or trainer.sanity_checking or trainer.predicting):
        return None
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    progress: Any = loop.batch_progress.current
    return f"a batch of {stage.value}" if progress.ready > progress.completed else None


def _encode(current: _Pass, module: torch.nn.Module) -> bytes:
    batches = sorted(number for number in current.loader.finished if number < ENDS)
    calls = {number: [call.plain() for call in current.calls.get(number, [])] for number in batches}
    if current.metrics is None:
        return codec.encode({"calls": calls, "metrics": StepMetrics(module).states()})
    recorded = {number: states for number, states in current.metrics.recorded.items() if number in calls}
    return codec.encode({"calls": calls, "metrics": recorded})


def _states(current: _Pass, parts: Sequence[Mapping[Any, Any]]) -> Sequence[Mapping[str, MetricState]]:
    """Return the states of metric objects in the order in which they are merged: of ranks, or of batches."""
    if current.metrics is None:
        return parts
    by_batch = {number: states for part in parts for number, states in part.items()}
    return [by_batch[number] for number in sorted(by_batch)]


class GlobalPasses:
    """Validation and test passes of a model that several workers hold together, over global batches.

    Args:
        strategy: the strategy that they belong to.
        check: refuses a loader, by a `ConfigError`, whose batches cannot be distributed.
        operation: returns the operation that runs a global batch.
    """

    def __init__(
        self,
        strategy: FaultTolerantStrategy,
        check: Callable[[DataLoader[Any]], None],
        operation: Callable[[PassBatch], ReplicaEvaluation],
    ) -> None:
        self._strategy, self._check, self._operation = strategy, check, operation

    def begin_run(self, trainer: pl.Trainer) -> None:
        dtype = logged_dtype(self._strategy.precision_plugin)
        for loop in evaluation_loops(trainer):
            loop._results = RecordingResults(False, self._strategy.reduce, dtype=dtype)

    def loader(self, trainer: pl.Trainer, loader: DataLoader[Any]) -> PassLoader:
        self._check(loader)
        most = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
        return self._strategy.loaders.global_pass(trainer, loader, most)

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
            item.log(unpack_parts(strategy.engine.run(self._operation(item))))


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
        number += self.batch.step * self._strategy.shape.micro_batches
        return RandomPurpose.EVALUATION, self.batch.epoch, self.loader, number

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
