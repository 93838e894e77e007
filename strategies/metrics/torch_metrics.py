"""State of torchmetrics objects over the ranks of an evaluation pass.

torchmetrics synchronises over torch's default group, in `compute`, where a dead rank's state would be missing;
`StepMetrics` keeps it from that. The states are sent with the pass's results instead, and the metrics' own reductions
merge them. A metric may have a state when a pass begins, from training or from another pass, which is the same on every
rank: it is set aside, and counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from unicron_lightning.strategies.metrics.step_metrics import GLOBAL, State, StepMetrics, empty, merge_states, set_state


def set_common_aside(module: nn.Module) -> dict[str, State]:
    """Empty the metrics whose state is the same on every rank; return these states, by name."""
    metrics = StepMetrics(module)
    common = {name: state for name, state in metrics.states().items() if hasattr(metrics.by_name[name], GLOBAL)}
    for name in common:
        empty(metrics.by_name[name])
    return common


def merge_metric_states(module: nn.Module, common: Mapping[str, State], by_rank: Sequence[Mapping[str, State]]) -> None:
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
