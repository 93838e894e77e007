"""The torchmetrics objects of a module: their states over the micro-batches of steps, and in evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from unicron_lightning.strategies.collectives.default_group import own_metrics
from unicron_lightning.worker.effects import MetricState

GLOBAL = "_unicron_global"
"""Attribute of a metric whose state is already the same on every rank."""


class StepMetrics:
    """The torchmetrics objects of a module, over the micro-batches of consecutive steps.

    In training their state covers all micro-batches, on every rank. Each micro-batch starts from an empty state, and
    its final state is recorded. At the commit the records of all ranks are added to the state before the step, by the
    metrics' own reductions, in the order of the micro-batches. So every rank has the state over the global batches, and
    no state is lost with a rank. A metric's attributes that are no declared states stay on their rank.

    In an evaluation torchmetrics synchronises over torch's default group, in `compute`, where a dead rank's state would
    be missing; this class keeps it from that. The states are sent with the pass's results instead, and the metrics' own
    reductions merge them. A metric may have a state when a pass begins, from training or from another pass, which is
    the same on every rank: it is set aside, and counts once.

    Args:
        module: the trained module.

    Attributes:
        by_name: the metric objects.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.find()

    def find(self) -> None:
        """Search the metrics again: scripts may add some. None synchronises by itself."""
        own_metrics(self._module)
        modules = list(self._module.named_modules())
        self.by_name = {name: child for name, child in modules if isinstance(child, Metric)}
        self._collections = [child for _, child in modules if isinstance(child, MetricCollection)]

    def begin(self, *, anew: bool = False) -> None:
        """Start a step; optionally search the metrics again."""
        if anew:
            self.find()
        self.recorded: dict[int, dict[str, MetricState]] = {}
        self._base: dict[str, MetricState] = {}
        for metric in self.by_name.values():
            metric._forward_cache = None

    def start_micro_batch(self) -> None:
        """Empty the states."""
        self._settle_groups()
        self._base = {name: _state(metric) for name, metric in self.by_name.items()}
        for metric in self.by_name.values():
            empty(metric)
            metric._forward_cache = None

    def restore(self) -> None:
        """Restore the states before a micro-batch, after an exception in it."""
        for name, state in self._base.items():
            set_state(self.by_name[name], state)

    def hold(self) -> dict[str, tuple[MetricState, Any]]:
        """Return the present states for `put_back`, and restore those before the step."""
        self._settle_groups()
        held = {name: (_state(metric), metric._forward_cache) for name, metric in self.by_name.items()}
        self.restore()
        return held

    def put_back(self, held: Mapping[str, tuple[MetricState, Any]]) -> None:
        """Restore what `hold` has returned."""
        for name, (state, cache) in held.items():
            set_state(self.by_name[name], state)
            self.by_name[name]._forward_cache = cache

    def finish_micro_batch(self, number: int) -> None:
        """Record the states and restore those before the step."""
        self._settle_groups()
        found = {name: _state(metric) for name, metric in self.by_name.items() if metric.update_called}
        if found:
            self.recorded[number] = found
        self.restore()

    def commit(self, recorded: Mapping[int, Mapping[str, MetricState]]) -> None:
        """Add the records of all ranks, by micro-batch."""
        for name, metric in self.by_name.items():
            states = [recorded[number][name] for number in sorted(recorded) if name in recorded[number]]
            if not states:
                continue
            base = _state(metric)
            if any(state["_forwarded"] for state in states):
                set_state(metric, merge_states(metric, states))
                metric._forward_cache = metric.compute()  # over the whole step
            set_state(metric, merge_states(metric, [base, *states] if base["_update_count"] else states))
            setattr(metric, GLOBAL, True)

    def states(self) -> dict[str, MetricState]:
        """Return the states of the metrics that have been updated."""
        self._settle_groups()
        return {name: _state(metric) for name, metric in self.by_name.items() if metric.update_called}

    def load_states(self, states: Mapping[str, MetricState]) -> None:
        """Restore the `states` of another worker."""
        for name, metric in self.by_name.items():
            if name in states:
                set_state(metric, states[name])
                setattr(metric, GLOBAL, True)

    def _settle_groups(self) -> None:
        """Share the states of a collection's groups, which at times only the first metric has."""
        for collection in self._collections:
            collection._compute_groups_create_state_ref()


def merge_states(metric: Metric, states: Sequence[MetricState]) -> MetricState:
    """Merge several updated states into one, by the metric's reductions."""
    counts = [state["_update_count"] for state in states]
    merged: MetricState = {"_update_count": sum(counts)}
    reductions: dict[str, Any] = metric._reductions
    for key, reduction in reductions.items():
        default = metric._defaults[key]
        values = [state[key] for state in states]
        if isinstance(default, list):
            parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
            merged[key] = [part.to(metric.device) if isinstance(part, Tensor) else part for part in parts]
            continue
        values = [value.to(metric.device) for value in values]
        if reduction is None:
            rows = [value if value.ndim > default.ndim else value.unsqueeze(0) for value in values]
            merged[key] = values[0] if len(values) == 1 else torch.cat(rows)
        elif reduction is dim_zero_mean:
            weighted = sum(value * count for value, count in zip(values, counts, strict=True))
            merged[key] = weighted / sum(counts)
        elif reduction is dim_zero_cat:
            merged[key] = dim_zero_cat(values)
        else:
            merged[key] = reduction(torch.stack(values))
    return merged


def _state(metric: Metric) -> MetricState:
    states = {key: getattr(metric, key) for key in metric._reductions}
    kept = {
        key: [item.detach() if isinstance(item, Tensor) else item for item in value]
        if isinstance(value, list)
        else value.detach()
        for key, value in states.items()
    }
    return {**kept, "_update_count": metric._update_count, "_forwarded": metric._forward_cache is not None}


def empty(metric: Metric) -> None:
    """Set the state of a metric that has not been updated."""
    defaults: MetricState = {k: [] if isinstance(v, list) else v.clone() for k, v in metric._defaults.items()}
    set_state(metric, {**defaults, "_update_count": 0})


def set_state(metric: Metric, state: MetricState) -> None:
    """Replace a metric's state."""
    for key in metric._reductions:
        value = state[key]
        setattr(metric, key, list(value) if isinstance(value, list) else value.to(metric.device))
    metric._update_count = state["_update_count"]
    metric._computed = None


def set_common_aside(module: nn.Module) -> dict[str, MetricState]:
    """Empty the metrics whose state is the same on every rank; return these states, by name."""
    metrics = StepMetrics(module)
    common = {name: state for name, state in metrics.states().items() if hasattr(metrics.by_name[name], GLOBAL)}
    for name in common:
        empty(metrics.by_name[name])
    return common


def merge_metric_states(
    module: nn.Module, common: Mapping[str, MetricState], by_rank: Sequence[Mapping[str, MetricState]]
) -> None:
    """Set every updated metric to the state over all ranks, which `Metric.compute` then uses.

    Args:
        module: owner of the metrics.
        common: states from before the pass.
        by_rank: each rank's states of the pass, as `StepMetrics.states` returns them.
    """
    for name, metric in StepMetrics(module).by_name.items():
        states = [part[name] for part in (common, *by_rank) if name in part]
        if states:
            set_state(metric, merge_states(metric, states))
            setattr(metric, GLOBAL, True)
            metric._to_sync = False  # it is complete already
