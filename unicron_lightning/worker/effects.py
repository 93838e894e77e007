"""Changes of micro-batches beside gradients: each starts from the step's values, and the step keeps one result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from unicron_lightning.worker.exact_sums import ExactStatistics
from unicron_lightning.worker.module_buffers import ModuleBuffers, check_registered
from unicron_lightning.worker.sums import MetricRecords, NormStatistics, SumsLayout

UNCOUNTED = -1
"""Number under which changes of a micro-batch are recorded that does not count."""

MetricState = dict[str, Any]
"""The declared states of a metric, ``_update_count``, and ``_forwarded``: whether it was called, not only updated."""

Held = tuple[list[Tensor], dict[str, tuple[MetricState, Any]], dict[int, Tensor]]
"""Changes of a micro-batch that is paused."""


class MetricObjects(MetricRecords, Protocol):
    """The metric objects of a module through the micro-batches of a step."""

    def begin(self, *, anew: bool = False) -> None:
        """Start a step; optionally search the metrics again."""

    def start_micro_batch(self) -> None:
        """Empty the states."""

    def finish_micro_batch(self, number: int) -> None:
        """Record the states and restore those before the step."""

    def restore(self) -> None:
        """Restore the states before a micro-batch, after an exception in it."""

    def hold(self) -> dict[str, tuple[MetricState, Any]]:
        """Return the present states for `put_back`, and restore those before the step."""

    def put_back(self, held: dict[str, tuple[MetricState, Any]]) -> None:
        """Restore what `hold` has returned."""


class Effects:
    """Changes that micro-batches make beside gradients: batch-norm statistics, metric objects, other buffers.

    Args:
        module: owner of them.
        metrics: its metric objects; None: it has none.
        frozen: follow its frozen parameters, too; see `ModuleBuffers`.
        exact: sum statistics as `exact_sums` does.
    """

    def __init__(
        self, module: nn.Module, metrics: MetricObjects | None, *, frozen: bool = False, exact: bool = False
    ) -> None:
        self._module = module
        self._saved: set[str] | None = set(module.state_dict())
        """Keys of the module's state before the first step; None: they have been compared with those after it."""
        self._began = False
        self.norms = (ExactStatistics if exact else NormStatistics)(module)
        self.metrics = metrics
        self.buffers = ModuleBuffers(module, frozen=frozen)

    def begin(self, first: int, agreed: SumsLayout, *, anew: bool) -> None:
        """Start a step.

        Args:
            first: number of its first micro-batch.
            agreed: the members' agreement on its sums.
            anew: whether to search the metric objects again.
        """
        if self._saved is not None and self._began:
            check_registered(self._module, self._saved)
            self._saved = None
        self._began = True
        self.norms.begin()
        if self.metrics is not None:
            self.metrics.begin(anew=anew)
        self.buffers.begin(first, agreed.buffers)

    def start_micro_batch(self) -> None:
        """Start from the step's values."""
        self.buffers.start_micro_batch()
        if self.metrics is not None:
            self.metrics.start_micro_batch()

    def restore(self) -> None:
        """Restore the step's values after an exception in a micro-batch."""
        self.norms.restore()
        if self.metrics is not None:
            self.metrics.restore()
        self.buffers.restore()

    def hold(self) -> Held:
        """Return a paused micro-batch's values for `put_back`, and restore the step's."""
        return self.norms.hold(), {} if self.metrics is None else self.metrics.hold(), self.buffers.hold()

    def put_back(self, held: Held) -> None:
        """Restore what `hold` has returned."""
        norms, metrics, buffers = held
        self.norms.put_back(norms)
        if self.metrics is not None:
            self.metrics.put_back(metrics)
        self.buffers.put_back(buffers)

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Inside, a micro-batch starts from the step's values; its changes are dropped, also by an exception."""
        held = self.hold()
        try:
            yield
        finally:
            self.restore()
            self.put_back(held)

    def finish_micro_batch(self, number: int) -> None:
        """Record the changes and restore the step's values."""
        self.norms.finish_micro_batch()
        if self.metrics is not None:
            self.metrics.finish_micro_batch(number)
        self.buffers.finish_micro_batch(number)
