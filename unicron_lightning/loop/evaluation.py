"""A pass of a loop over data: each rank runs its batches, and those of lost ranks are run again.

After an evaluation all ranks have the means, after a prediction each has the outputs of its batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from unicron_lightning.data.passes import IndexedBatches, PassBatches
from unicron_lightning.data.seeding import RandomPurpose, seeded
from unicron_lightning.data.streams import size_of
from unicron_lightning.loop.loop_steps import scalar
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.engine import Engine, Operation
from unicron_lightning.worker.module_buffers import EvaluationBuffers
from unicron_lightning.worker.operations import Evaluation
from unicron_lightning.worker.rows import ReportSum

_VALUE = ""
"""Name of the value of a function that returns one without a name."""


class _PredictionEnd(Evaluation[int]):
    name = "prediction"


class LoopPass:
    """A pass over data, for one of its methods.

    Args:
        engine: of this worker.
        module: its models, which leave the pass as they were.
        batches: of the data.
        function: given a batch, returns its output; in an evaluation a scalar or a mapping of scalars.
        place: seed, data epoch and number of the pass, for random state.
    """

    def __init__(
        self,
        engine: Engine,
        module: nn.Module,
        batches: PassBatches,
        function: Callable[[Any], Any],
        place: tuple[int, int, int],
    ) -> None:
        seed, epoch, number = place
        self._engine, self._module, self._batches, self._function = engine, module, batches, function
        self._batches.begin(epoch, math.inf)
        self._place = (epoch, number)
        self._seed, self._purpose = seed, RandomPurpose.EVALUATION
        self._keep: Callable[[int, Any, Any], Any] = self._weighed
        self._finished: set[int] = set()
        self._values: dict[int, Any] = {}

    def means(self) -> Any:
        """Run the pass; return the means over the samples, in the function's form, the same on all ranks."""
        with self._evaluating():
            if self._engine.has_state:
                parts = unpack_parts(self._engine.run(self._operation(predicts=False)))
            else:  # a joiner evaluates alone before it has the state
                for number in self._todo(ReportSum.nothing(1), 0):
                    self._run(number)
                parts = [encode_values(self._values)]
        found = {number: values for part in parts for number, values in codec.decode(part).items()}
        if isinstance(self._batches, IndexedBatches):
            assert len(found) == self._batches.number, "each batch counts once"
        return _means([found[number] for number in sorted(found)])

    def predictions(self) -> list[tuple[list[Any] | None, Any]]:
        """Run the pass; return data set indices and output of each batch of this rank, in order."""
        self._purpose, self._keep = RandomPurpose.PREDICTION, lambda number, samples, output: output
        with self._evaluating():
            self._engine.run(self._operation(predicts=True))
        return [(self._batches.indices(number), self._values[number]) for number in sorted(self._own_batches())]

    def renew(self) -> None:
        """Begin with the models' present buffers."""
        self._buffers = EvaluationBuffers(self._module)

    def _operation(self, *, predicts: bool) -> Operation:
        """Return the operation of the pass; its result is that of an evaluation, or none."""
        kind, results = (_PredictionEnd, bytes) if predicts else (Evaluation, partial(encode_values, self._values))
        return kind(self._todo, self._run, self._finished, results)

    def _own_batches(self) -> Collection[int]:
        """Return the batches that count as this rank's, after the pass."""
        return self._values

    def _todo(self, reports: ReportSum, rank: int) -> Iterator[int]:
        self._batches.plan(reports.finished, rank, reports.world, self._finished)
        return (number for number, _ in self._batches.rows())

    def _run(self, number: int, *, counts: bool = True) -> None:
        engine = self._engine
        engine.activity.enter("validation", number)
        engine.fault("validation", engine.step)
        samples = (self._batches.get if counts else self._batches.stand_in)(number)
        try:
            with seeded(self._seed, self._purpose, *self._place, number):
                output = self._function(samples)
        finally:
            self._buffers.undo()
        if counts:
            self._values[number] = self._keep(number, samples, output)
            self._finished.add(number)

    def _weighed(self, number: int, samples: Any, output: Any) -> list[Any]:
        """Return the number of samples, and the values."""
        indices = self._batches.indices(number)
        return [(size_of(samples) or 1) if indices is None else len(indices), _plain(output)]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, layers are in their mode for evaluation, and no graph is made."""
        self.renew()
        modes = [(layer, layer.training) for layer in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._batches.close()
            for layer, training in modes:
                layer.training = training


def encode_values(values: Mapping[int, list[Any]]) -> bytes:
    """Encode the values of batches, by number."""
    return codec.encode(dict(values))


def _plain(output: Any) -> dict[str, float]:
    """Return the values of a batch.

    Raises:
        ConfigError: the function returned anything else than scalars.
    """
    where = "the function of run.evaluate() returned"
    if not isinstance(output, Mapping):
        return {_VALUE: float(scalar(where, output))}
    return {str(name): float(scalar(f"{where} {name}=...", value)) for name, value in output.items()}


def _means(batches: list[list[Any]]) -> Any:
    """Return the means of the values, weighted by the numbers of samples, in the order of batches."""
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    for weight, values in batches:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0) + weight
    means = {name: torch.tensor(total / weights[name], dtype=torch.float64) for name, total in sums.items()}
    return means[_VALUE] if [*means] == [_VALUE] else means
