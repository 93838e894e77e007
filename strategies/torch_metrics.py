"""State of torchmetrics objects over the ranks of an evaluation pass.

torchmetrics synchronises over torch's default group, in `compute`, where a dead rank's state would be missing;
`own_metrics` keeps it from that. The states are sent with the pass's results instead, and torchmetrics' own reductions
merge them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from unicron_lightning.strategies.default_group import own_metrics
from unicron_lightning.strategies.step_metrics import GLOBAL

_OWN = "_unicron_own_state"
"""Attribute in which a merged metric keeps its own rank's state, to continue from it."""


def _metrics(module: nn.Module) -> list[tuple[str, Metric]]:
    own_metrics(module)
    return [(name, child) for name, child in module.named_modules() if isinstance(child, Metric)]


def _state(metric: Metric) -> dict[str, Any]:
    states = {key: getattr(metric, key) for key in metric._reductions}
    copied = {key: list(value) if isinstance(value, list) else value for key, value in states.items()}
    return {**copied, "_update_count": metric._update_count}


def update_counts(module: nn.Module) -> dict[str, int]:
    """Return the number of this rank's updates of each metric in ``module``."""
    counts = {}
    for name, metric in _metrics(module):
        own = getattr(metric, _OWN, None)
        counts[name] = own["_update_count"] if own is not None and metric._update_count else metric._update_count
    return counts


def metric_states(module: nn.Module, before: Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """Return this rank's state of every updated metric in ``module``, by name.

    Args:
        module: owner of the metrics.
        before: `update_counts` when the pass began. Training's metrics, which are the same on all ranks, are left out
            if the pass has not updated them.
    """
    restore_own_states(module)
    counts = before or {}
    return {
        name: _state(metric)
        for name, metric in _metrics(module)
        if metric.update_called and not (hasattr(metric, GLOBAL) and counts.get(name) == metric._update_count)
    }


def merge_metric_states(module: nn.Module, by_rank: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Set every metric that any rank has updated to the state over all ranks, which `Metric.compute` then uses."""
    for name, metric in _metrics(module):
        states = [part[name] for part in by_rank if name in part]
        if not states:
            continue
        setattr(metric, _OWN, _state(metric))
        for key, reduction in metric._reductions.items():
            setattr(metric, key, _merge([state[key] for state in states], reduction, metric.device))
        metric._update_count = sum(state["_update_count"] for state in states)
        metric._computed = None
        metric._to_sync = False  # it is complete already


def restore_own_states(module: nn.Module) -> None:
    """Undo `merge_metric_states`: a metric that was not reset meanwhile continues from its own rank's state."""
    for _, metric in _metrics(module):
        own = getattr(metric, _OWN, None)
        if own is None:
            continue
        if metric._update_count:
            for key, value in own.items():
                setattr(metric, key, value)
            metric._computed = None
        metric._to_sync = metric.sync_on_compute
        setattr(metric, _OWN, None)


def _merge(values: Sequence[Any], reduction: Any, device: torch.device) -> Any:
    if isinstance(values[0], list):
        items = [item.to(device) for value in values for item in value]
        return [dim_zero_cat(items)] if items and reduction is dim_zero_cat else items
    stacked = torch.stack([value.to(device) for value in values])
    if reduction is None:
        return stacked
    merged = reduction(stacked)
    assert isinstance(merged, Tensor)
    return merged
