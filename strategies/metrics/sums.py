"""Sums over a step's micro-batches besides the gradients: loss, logged values, statistics and other buffers.

One float64 vector per step, the last bucket, carries the loss and the logged means and sums; its layout is the set
of values logged in the previous step, which all ranks know. Some steps log a new value (or a minimum or maximum),
update torchmetrics objects, leave other parameters unused than before, or change other buffers. Then the ranks exchange
their records as bytes, agree on the new layout and commit once more. In a steady program without minima, maxima and
metric objects that happens once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from unicron_lightning.data.streams import StreamEnds
from unicron_lightning.strategies.collectives.default_group import own_metrics
from unicron_lightning.strategies.metrics.recording import LogCall, Options, merge_calls
from unicron_lightning.strategies.state.module_buffers import STATISTICS, ModuleBuffers
from unicron_lightning.worker import codec
from unicron_lightning.worker.buckets import Bucket, FlatBucket
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine

MetricState = dict[str, Any]
"""The declared states of a metric, ``_update_count``, and ``_forwarded``: whether it was called, not only updated."""

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

    def begin(self, anew: bool = False) -> None:
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


_LOSS, _COUNT, _CHANGED, _HEADER = 0, 1, 2, 3


class Uses(Protocol):
    """Shows which parameters have received a gradient in this step; `GradientBuckets` implements it."""

    @property
    def used(self) -> Sequence[bool]: ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...


class AllUsed:
    """Reports all parameters as used: a parallelism whose workers need not agree on the unused ones."""

    used: Sequence[bool] = ()
    parameters: Sequence[nn.Parameter] = ()


class SumsLayout:
    """Agreement of the members from step to step: logged values of the vector, unused parameters, changing buffers,
    and the lengths of streams.
    """

    def __init__(self) -> None:
        self.options: list[Options] = []
        self.unused: list[int] = []
        self.buffers: list[int] = []
        self.streams = StreamEnds()

    def state(self) -> dict[str, Any]:
        options = [list(options) for options in self.options]
        streams = self.streams.state()
        return {"options": options, "unused": self.unused, "buffers": self.buffers, "streams": streams}

    def load_state(self, state: dict[str, Any]) -> None:
        self.options = [tuple(options) for options in state["options"]]
        self.unused = list(state["unused"])
        self.buffers = list(state["buffers"])
        if "streams" in state:  # not in checkpoints of earlier versions
            self.streams.load_state(state["streams"])


class _Statistic:
    """One statistic of a layer: the tensor that a step begins with, and its value then.

    Args:
        layer: owner.
        name: of the buffer.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer, self._name = layer, name
        self._tensor = self.now
        self.base = self._tensor.clone()

    @property
    def now(self) -> Tensor:
        """The layer's present tensor: code of a module may put another one in its place."""
        tensor = self._layer._buffers[self._name]
        assert tensor is not None
        return tensor

    def set(self, value: Tensor, *, unnoticed: bool = False) -> None:
        """Set the value of the step's tensor, and put it into the layer.

        Args:
            value: to be copied.
            unnoticed: keep the tensor's version.
        """
        (self._tensor.data if unnoticed else self._tensor).copy_(value)
        self._layer._buffers[self._name] = self._tensor

    def restore(self) -> None:
        """Restore the value at the step's start."""
        self.set(self.base)


class NormStatistics:
    """Running statistics of batch-norm layers: each micro-batch starts from the step's; the mean over all is kept.

    torch DDP keeps rank 0's, which depend on rank 0's data. Here they depend on the global batch only.

    Args:
        module: owner of the layers. Its code may replace the statistics and begin or end their tracking, between steps.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [each for each in module.modules() if isinstance(each, _NormBase)]
        self._floats: list[_Statistic] = []
        self._counts: list[_Statistic] = []
        self.bucket: FlatBucket | None = None
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        tracked = [layer for layer in self._layers if layer.track_running_stats]
        self._floats, self._counts = (
            [_Statistic(layer, name) for layer in tracked for name in names if layer._buffers.get(name) is not None]
            for names in (STATISTICS[:2], STATISTICS[2:])
        )
        if not self._floats:
            self.bucket = None
            return
        size = sum(each.base.numel() for each in self._floats) + len(
            self._counts
        )  # of each count: whether it has moved
        wide = any(each.base.dtype == torch.float64 for each in self._floats)
        values = torch.zeros(size, dtype=torch.float64 if wide else torch.float32, device=self._floats[0].base.device)
        if self.bucket is None or self.bucket.local.shape != values.shape or self.bucket.local.dtype != values.dtype:
            self.bucket = FlatBucket(values)
        else:
            self.bucket.local.zero_()

    def restore(self) -> None:
        """Restore the step's start after an exception in a micro-batch."""
        for each in (*self._floats, *self._counts):
            each.restore()

    def hold(self) -> list[Tensor]:
        """Return the present statistics for `put_back`, and restore the step's start.

        Graphs of paused micro-batches may have the statistics, so their versions stay the same.
        """
        held = [each.now.clone() for each in (*self._floats, *self._counts)]
        for each in (*self._floats, *self._counts):
            each.set(each.base, unnoticed=True)
        return held

    def put_back(self, held: Sequence[Tensor]) -> None:
        """Restore what `hold` has returned."""
        for each, value in zip([*self._floats, *self._counts], held, strict=True):
            each.set(value, unnoticed=True)

    def finish_micro_batch(self) -> None:
        """Add the micro-batch's changes to the sums and restore the step's start."""
        if self.bucket is None:
            return
        offset = 0
        for each in self._floats:
            self.bucket.local[offset : offset + each.base.numel()] += (each.now - each.base).reshape(-1)
            offset += each.base.numel()
        for slot, each in enumerate(self._counts):
            self.bucket.local[offset + slot] += (each.now - each.base).to(self.bucket.local.dtype)
        self.restore()

    def commit(self, num_micro_batches: int) -> None:
        """Set the mean over the global batch; a step counts as one batch."""
        if self.bucket is None:
            return
        offset = 0
        for each in self._floats:
            change = self.bucket.reduced[offset : offset + each.base.numel()].view_as(each.base)
            each.set(each.base + change / num_micro_batches)
            offset += each.base.numel()
        for slot, each in enumerate(self._counts):
            each.set(each.base + (self.bucket.reduced[offset + slot] > 0).to(each.base.dtype))


@dataclass(frozen=True, kw_only=True)
class _AgreedSums:
    """Agreement of the members in a step with new values."""

    calls: list[LogCall]
    unused: list[int]
    buffers: list[int]
    values: dict[int, Tensor]
    streams: list[dict[str, Any]]


class StepSums:
    """The sums of one step; implements `unicron_lightning.worker.step.Sums`.

    Args:
        layout: agreed; updated by `finish`.
        norms: the model's batch-norm statistics, begun.
        buffers: the model's other buffers, begun.
        gradients: shows which parameters were used.
        metrics: the module's metric objects, begun; None: they are left alone.
    """

    def __init__(
        self,
        layout: SumsLayout,
        norms: NormStatistics,
        buffers: ModuleBuffers,
        gradients: Uses,
        metrics: StepMetrics | None = None,
    ) -> None:
        self._layout = layout
        self._norms = norms
        self._buffers = buffers
        self._gradients = gradients
        self._metrics = metrics
        self._states: dict[int, Any] = {}
        self._totals: Sequence[float] = ()
        self._losses: list[Tensor] = []
        self._began = False
        self._calls: list[LogCall] = []
        self._agreed: _AgreedSums | None = None

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [*([] if self._norms.bucket is None else [self._norms.bucket]), *self._buffers.buckets]

    def add(self, loss: Tensor | None, calls: Sequence[LogCall]) -> None:
        """Add the results of one micro-batch; without a loss it does not count in the mean."""
        self._began = True
        if loss is not None:
            self._losses.append(loss.detach().reshape(()).double())
        self._calls.extend(calls)

    def totals(self) -> list[float]:
        totals = [0.0] * (_HEADER + 2 * len(self._layout.options))
        totals[_COUNT] = len(self._losses)
        if self._losses:
            totals[_LOSS] = float(torch.stack(self._losses).sum())
        merged = {call.options: call for call in merge_calls(self._calls)}
        for place, options in enumerate(self._layout.options):
            if (call := merged.get(options)) is not None and call.value is not None:
                factor = call.weight if options[6] == "mean" else 1.0
                totals[_HEADER + 2 * place] = float(call.value) * factor
                totals[_HEADER + 2 * place + 1] = call.weight
        known = set(self._layout.options)
        changed = any(options not in known for options in merged)
        changed = changed or self._unused() != self._layout.unused or bool(self._new_buffers())
        changed = changed or bool(self._metrics is not None and self._metrics.recorded)
        changed = changed or self._layout.streams.news() is not None
        totals[_CHANGED] = float(self._began and changed)
        return totals

    def read(self, totals: Sequence[float]) -> bool:
        self._totals = totals
        return totals[_CHANGED] != 0

    def settle(self, engine: Engine) -> None:
        new = self._new_buffers()
        mine = {
            "calls": [call.plain() for call in merge_calls(self._calls)],
            "unused": self._unused() if self._began else None,
            "metrics": {} if self._metrics is None else self._metrics.recorded,
            "buffers": new,
            "streams": self._layout.streams.news(),
            "values": {str(index): self._buffers.values[index].cpu() for index in new if index in self._buffers.values},
        }
        gathered = gather_bytes(engine.communicator, codec.encode(mine), engine.tag("sums"))
        parts = [codec.decode(part) for part in gathered]
        calls = merge_calls([LogCall.from_plain(call) for part in parts for call in part["calls"]])
        sets = [set(part["unused"]) for part in parts if part["unused"] is not None]
        self._states = {number: states for part in parts for number, states in part["metrics"].items()}
        self._agreed = _AgreedSums(
            calls=calls,
            unused=sorted(set.intersection(*sets)) if sets else [],
            buffers=sorted({index for part in parts for index in part["buffers"]}),
            values={int(index): value for part in parts for index, value in part["values"].items()},
            streams=[part["streams"] for part in parts if part["streams"] is not None],
        )

    def finish(self) -> tuple[float | None, list[LogCall], list[bool]]:
        """Set the buffers after the commit; return mean loss (None without any), global logged values, and whether each
        parameter was used.
        """
        if self._totals[_CHANGED] != 0:
            assert self._agreed is not None, "a step was committed unsettled"
            calls, self._layout.unused = self._agreed.calls, self._agreed.unused
            if self._metrics is not None:
                self._metrics.commit(self._states)
            summable = {call.options for call in calls if call.value is not None and call.options[6] in ("mean", "sum")}
            self._layout.options = sorted({*self._layout.options, *summable})
        else:
            calls = [call for call in map(self._call, range(len(self._layout.options))) if call is not None]
        self._buffers.commit({} if self._agreed is None else self._agreed.values)
        if self._agreed is not None:
            self._layout.buffers = sorted({*self._layout.buffers, *self._agreed.buffers})
            self._layout.streams.agree(self._agreed.streams)
        unused = set(self._layout.unused)
        used = [index not in unused for index in range(len(self._gradients.parameters))]
        count = self._totals[_COUNT]
        return self._totals[_LOSS] / count if count else None, calls, used

    def _call(self, place: int) -> LogCall | None:
        total, weight = self._totals[_HEADER + 2 * place : _HEADER + 2 * place + 2]
        options = self._layout.options[place]
        if weight == 0:
            return None
        value = torch.tensor(total / weight if options[6] == "mean" else total, dtype=torch.float64)
        return LogCall(options=options, value=value, weight=weight)

    def _new_buffers(self) -> list[int]:
        return sorted(self._buffers.changed.difference(self._layout.buffers))

    def _unused(self) -> list[int]:
        return [index for index, used in enumerate(self._gradients.used) if not used]
