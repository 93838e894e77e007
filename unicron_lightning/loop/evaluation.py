"""An evaluation of a loop: each rank runs its batches, those of lost ranks are run again, and all get the means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.module_buffers import EvaluationBuffers
from unicron_lightning.worker.operations import Evaluation
from unicron_lightning.worker.rows import ReportSum

_VALUE = "value"
"""Name of the value of a function that returns one."""


class LoopEvaluation:
    """A pass over data.

    Args:
        engine: of this worker.
        module: its models, which leave the pass as they were.
        batches: of the data.
        function: given a batch, returns a scalar or a mapping of scalars.
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
        self._place = (seed, RandomPurpose.EVALUATION, epoch, number)
        self._finished: set[int] = set()
        self._values: dict[int, list[Any]] = {}

    def means(self) -> Any:
        """Run the pass; return the means over the samples, in the function's form, the same on all ranks."""
        with _evaluating(self._module):
            self.renew()
            if self._engine.has_state:
                parts = unpack_parts(self._engine.run(self._operation()))
            else:  # a joiner evaluates alone before it has the state
                for number in self._todo(ReportSum.nothing(1), 0):
                    self._run(number)
                parts = [encode_values(self._values)]
        self._batches.close()
        found = {number: values for part in parts for number, values in codec.decode(part).items()}
        if isinstance(self._batches, IndexedBatches):
            assert len(found) == self._batches.number, "each batch counts once"
        return _means([found[number] for number in sorted(found)])

    def renew(self) -> None:
        """Begin with the models' present buffers."""
        self._buffers = EvaluationBuffers(self._module)

    def _operation(self) -> Evaluation[Any]:
        return Evaluation(self._todo, self._run, self._finished, partial(encode_values, self._values))

    def _todo(self, reports: ReportSum, rank: int) -> Iterator[int]:
        self._batches.plan(reports.finished, rank, reports.world, self._finished)
        return (number for number, _ in self._batches.rows())

    def _run(self, number: int, *, counts: bool = True) -> None:
        engine = self._engine
        engine.activity.enter("validation", number)
        engine.fault("validation", engine.step)
        samples = self._batches.get(number)
        try:
            with seeded(*self._place, number):
                values = _plain(self._function(samples))
        finally:
            self._buffers.undo()
        if counts:
            indices = self._batches.indices(number)
            self._values[number] = [(size_of(samples) or 1) if indices is None else len(indices), values]
            self._finished.add(number)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, layers are in their mode for evaluation, and no graph is made."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
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
