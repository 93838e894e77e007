"""Sums over a step's micro-batches besides the gradients: loss, logged values, statistics and other buffers.

One float64 vector per step, the last bucket, carries the loss and the logged means and sums; its layout is the set
of values logged in the previous step, which all ranks know. Some steps log a new value (or a minimum or maximum),
update torchmetrics objects, leave other parameters unused than before, or change other buffers. Then the ranks exchange
their records as bytes, agree on the new layout and commit once more. In a steady program without minima, maxima and
metric objects that happens once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unicron_lightning.data.streams import StreamEnds
from unicron_lightning.worker import codec
from unicron_lightning.worker.buckets import Bucket, FlatBucket
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.module_buffers import STATISTICS, ModuleBuffers

Options = tuple[str, str, bool, bool, bool, bool, str, bool]
"""fx, name, prog_bar, logger, on_step, on_epoch, reduce, add_dataloader_idx: the identity of a logged value."""


@dataclass(frozen=True, kw_only=True)
class LogCall:
    """One value that a step logged.

    Attributes:
        value: scalar; None for a torchmetrics object, whose attribute name is then ``metric``.
        weight: batch size by which means are weighted.
    """

    options: Options
    value: Tensor | None
    weight: float
    metric: str | None = None

    def plain(self) -> list[Any]:
        """Return the call as plain data."""
        value = None if self.value is None else float(self.value)
        return [list(self.options), value, self.weight, self.metric]

    @classmethod
    def from_plain(cls, data: Sequence[Any]) -> LogCall:
        """Convert the result of `plain` back."""
        options, value, weight, metric = data
        scalar = None if value is None else torch.tensor(value, dtype=torch.float64)
        return cls(options=tuple(options), value=scalar, weight=weight, metric=metric)


def merge_calls(calls: Sequence[LogCall]) -> list[LogCall]:
    """Merge to one call per logged value: means are weighted by batch size, as in Lightning's epoch means."""
    grouped: dict[Options, list[LogCall]] = {}
    for call in calls:
        grouped.setdefault(call.options, []).append(call)
    return [_merge(options, group) for options, group in grouped.items()]


def _merge(options: Options, calls: Sequence[LogCall]) -> LogCall:
    if len(calls) == 1 or calls[0].value is None:
        return calls[0]
    values = torch.stack([call.value.double().cpu().reshape(()) for call in calls if call.value is not None])
    weights = torch.tensor([call.weight for call in calls], dtype=torch.float64)
    match options[6]:
        case "mean":
            value = (values * weights).sum() / weights.sum()
        case "sum":
            value = values.sum()
        case "min":
            value = values.min()
        case _:
            value = values.max()
    return LogCall(options=options, value=value, weight=float(weights.sum()))


_LOSS, _COUNT, CHANGED, _HEADER = 0, 1, 2, 3


class Uses(Protocol):
    """Shows which parameters have received a gradient in this step; `GradientBuckets` implements it."""

    @property
    def used(self) -> Sequence[bool]: ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...


class MetricRecords(Protocol):
    """States of metric objects, recorded by micro-batch.

    Attributes:
        recorded: states by micro-batch and name of the object.
    """

    recorded: dict[int, dict[str, dict[str, Any]]]

    def commit(self, recorded: Mapping[int, Mapping[str, dict[str, Any]]]) -> None:
        """Add the records of all ranks."""


class AllUsed:
    """Reports all parameters as used: a parallelism whose workers need not agree on the unused ones."""

    used: Sequence[bool] = ()
    parameters: Sequence[nn.Parameter] = ()


class SumsLayout:
    """Agreement of the members from step to step: logged values of the vector, unused parameters, changing buffers,
    the lengths of streams, and the grids of exact sums (`exact_sums`), if there are any.
    """

    def __init__(self) -> None:
        self.options: list[Options] = []
        self.unused: list[int] = []
        self.buffers: list[int] = []
        self.streams = StreamEnds()
        self.tops: dict[str, int] = {}

    def state(self) -> dict[str, Any]:
        options = [list(options) for options in self.options]
        streams = self.streams.state()
        found = {"options": options, "unused": self.unused, "buffers": self.buffers, "streams": streams}
        return {**found, "tops": dict(self.tops)} if self.tops else found

    def load_state(self, state: dict[str, Any]) -> None:
        self.options = [tuple(options) for options in state["options"]]
        self.unused = list(state["unused"])
        self.buffers = list(state["buffers"])
        self.tops = dict(state.get("tops", {}))
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

    @property
    def reduces(self) -> Sequence[Bucket]:
        """What is summed over the ranks."""
        return [] if self.bucket is None else [self.bucket]

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
        metrics: MetricRecords | None = None,
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
        return [*self._norms.reduces, *self._buffers.buckets]

    def add(self, loss: Tensor | None, calls: Sequence[LogCall], number: int = 0) -> None:
        """Add the results of one micro-batch, by its number; without a loss it does not count in the mean."""
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
        totals[CHANGED] = float(self._has_news(merged))
        return totals

    def _has_news(self, logged: Iterable[Options]) -> bool:
        """Whether the step has something new on this rank, which has logged these values."""
        known = set(self._layout.options)
        changed = any(options not in known for options in logged)
        changed = changed or self._unused() != self._layout.unused or bool(self._new_buffers())
        changed = changed or bool(self._metrics is not None and self._metrics.recorded)
        changed = changed or self._layout.streams.news() is not None
        return self._began and changed

    def read(self, totals: Sequence[float]) -> bool:
        self._totals = totals
        return totals[CHANGED] != 0

    def settle(self, engine: Engine) -> None:
        new = self._new_buffers()
        mine = {
            "calls": self._plain_calls(),
            "unused": self._unused() if self._began else None,
            "metrics": {} if self._metrics is None else self._metrics.recorded,
            "buffers": new,
            "streams": self._layout.streams.news(),
            "values": {str(index): self._buffers.values[index].cpu() for index in new if index in self._buffers.values},
        }
        gathered = gather_bytes(engine.communicator, codec.encode(mine), engine.tag("sums"))
        parts = [codec.decode(part) for part in gathered]
        calls = self._merged(call for part in parts for call in part["calls"])
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
        if self._totals[CHANGED] != 0:
            assert self._agreed is not None, "a step was committed unsettled"
            calls, self._layout.unused = self._agreed.calls, self._agreed.unused
            if self._metrics is not None:
                self._metrics.commit(self._states)
            summable = {call.options for call in calls if call.value is not None and call.options[6] in ("mean", "sum")}
            self._layout.options = sorted({*self._layout.options, *summable})
        else:
            calls = self._known_calls()
        self._buffers.commit({} if self._agreed is None else self._agreed.values)
        if self._agreed is not None:
            self._layout.buffers = sorted({*self._layout.buffers, *self._agreed.buffers})
            self._layout.streams.agree(self._agreed.streams)
        unused = set(self._layout.unused)
        used = [index not in unused for index in range(len(self._gradients.parameters))]
        count = self._totals[_COUNT]
        return self._totals[_LOSS] / count if count else None, calls, used

    def _plain_calls(self) -> list[Any]:
        """Return the values that this rank's micro-batches have logged, as plain data."""
        return [call.plain() for call in merge_calls(self._calls)]

    def _merged(self, plain: Iterable[Any]) -> list[LogCall]:
        """Merge the `_plain_calls` of all ranks."""
        return merge_calls([LogCall.from_plain(call) for call in plain])

    def _known_calls(self) -> list[LogCall]:
        """Return the values of a step without news, over all ranks."""
        return [call for call in map(self._call, range(len(self._layout.options))) if call is not None]

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
