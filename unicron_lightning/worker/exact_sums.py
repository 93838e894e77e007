"""Sums over micro-batches that have the same bits for any division among ranks and any order of additions.

Additions of floating-point numbers depend on their order, those of integers do not. Each micro-batch's value of a
tensor is rounded to a multiple of a power of two, its *grid*, and added in int64. The grid of a tensor is agreed by the
members, from step to step: values below 2**top become integers of `BITS` bits. A micro-batch whose largest value is not
below 2**top, or more than `SPAN` bits below it, is added apart, on a grid that depends on its own largest value only.
The sums of such grids are reduced before a second commit, and then the members agree on the tensor's next top. So
whichever rank runs a micro-batch, it rounds it equally, and nothing is computed twice.

A rounding is at most 2**-28 of the largest value of the tensor in the same micro-batch, usually 2**-44: less than that
of a sum of some micro-batches in float32. Infinite values and NaN are counted by element.

Loss and logged values are few: they stay apart by micro-batch, and are added in the order of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from unicron_lightning.worker import codec
from unicron_lightning.worker.buckets import Bucket, GradientBucket, GradientBuckets, is_kept
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.model_state import in_order_of
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.sums import CHANGED, LogCall, MetricRecords, NormStatistics, StepSums, SumsLayout, Uses
from unicron_lightning.worker.sums import merge_calls as merged

BITS: Final = 51
"""Bits of a micro-batch's integers; the other 12 are for the sum and its sign."""
HEADROOM: Final = 8
"""Bits that the next steps' values may be larger than the largest one when the top was agreed on."""
SPAN: Final = 24
"""Bits below the top in which a micro-batch's largest value must be; it then has at least 27 bits."""
CLASS: Final = 16
"""Distance of the tops of values that are added apart."""
MARKS: Final = 1 << 20
"""In place of a top: counts of infinities and NaN."""
_MOST_SHIFT: Final = 1000
"""A factor 2**1000 is a float64. Values of a tensor below 2**-1000 count as zeros."""
_PART: Final = 1 << 16
"""Elements that are converted at a time, in a cache."""
_GROUP: Final = 1 << 22
"""Elements from which sums that were added apart are reduced in another tensor."""
_CENTRE: Final = 1.5 * 2.0**52
"""Added to a float64 below 2**51, it leaves the nearest integer in the low bits."""
_CENTRE_BITS: Final = 0x4338 << 48
_COUNTS: Final = (0, 20, 40)
"""Places of the counts of positive and negative infinities and NaN, in bits."""


class ExactSum:
    """The sum of one tensor over a step's micro-batches.

    Args:
        local: gets this rank's part on the agreed grid: int64, one dimension.

    Attributes:
        apart: this rank's parts on other grids, by their tops.
        largest: least e such that all values were below 2**e; None: there was none but zeros.
        used: whether a value was added, zero or not.
    """

    def __init__(self, local: Tensor) -> None:
        self._local = local
        self._summed: Mapping[int, Tensor]
        self.begin(None, BITS)

    def begin(self, top: int | None, bits: int) -> None:
        """Start a step.

        Args:
            top: agreed; None: there is none yet.
            bits: of a micro-batch's integers.
        """
        self._top, self._bits = top, bits
        self._count = 0
        self.apart: dict[int, Tensor] = {}
        self.largest: int | None = None
        self.used = False
        self._summed = {}

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._local.numel()

    @property
    def nothing(self) -> Tensor:
        """Zeros in the place of a part that this rank does not have."""
        return self._local.new_zeros(1).expand(self.numel)

    def add(self, value: Tensor, largest: float | None = None) -> None:
        """Add a micro-batch's value.

        Args:
            value: of any shape and floating type.
            largest: its largest absolute value, if it is known.
        """
        self.used = True
        largest = magnitudes([value])[0] if largest is None else largest
        if not math.isfinite(largest):
            value = self._mark(value)
            largest = magnitudes([value])[0]
        if largest == 0.0:
            return
        exponent = math.frexp(largest)[1]
        self.largest = exponent if self.largest is None else max(self.largest, exponent)
        if self._top is not None and self._top - SPAN < exponent <= self._top:
            _accumulate(self._local, value, self._bits - self._top, first=self._count == 0)
            self._count += 1
            return
        top = -(-exponent // CLASS) * CLASS
        into = self.apart.get(top)
        if into is None:
            into = self.apart[top] = self._local.new_zeros(self.numel)
        _accumulate(into, value, self._bits - top, first=False)
        into.sub_(_CENTRE_BITS)

    def load(self, into: Tensor) -> None:
        """Copy this rank's part on the agreed grid."""
        if self._count == 0:
            into.zero_()
        else:
            torch.sub(self._local, _wrapped(self._count * _CENTRE_BITS), out=into)

    def take(self, summed: Mapping[int, Tensor]) -> None:
        """Learn the sums over the ranks on the other grids, by top; none of them is needed if none has any."""
        self._summed = summed

    def write(self, reduced: Tensor | None, out: Tensor) -> None:
        """Write the sum over the ranks.

        Args:
            reduced: of the agreed grid, see `load`.
            out: gets the sum, in its own type; one dimension.
        """
        parts = [(top, part) for top, part in self._summed.items() if top != MARKS]
        if reduced is not None and self._top is not None:
            parts.append((self._top, reduced))
        parts.sort(key=lambda each: each[0])
        if not parts:
            out.zero_()
        for start in range(0, out.numel() if parts else 0, _PART):
            span = slice(start, start + _PART)
            total, *rest = (part[span].double().mul_(2.0 ** -self._shift(top)) for top, part in parts)
            for each in rest:
                total.add_(each)
            out[span].copy_(total)
        if (marks := self._summed.get(MARKS)) is not None:
            plus, minus, nan = ((marks >> place & (1 << 20) - 1) > 0 for place in _COUNTS)
            out.masked_fill_(plus, math.inf).masked_fill_(minus, -math.inf).masked_fill_(nan | plus & minus, math.nan)

    def _shift(self, top: int) -> int:
        return min(self._bits - top, _MOST_SHIFT)

    def _mark(self, value: Tensor) -> Tensor:
        """Count infinities and NaN; return the value with zeros in their places."""
        flat = value.reshape(-1)
        found = (flat == math.inf, flat == -math.inf, flat != flat)
        counts = torch.stack([each.long() << place for each, place in zip(found, _COUNTS, strict=True)]).sum(0)
        marks = self.apart.setdefault(MARKS, torch.zeros_like(counts))
        marks.add_(counts)
        return torch.where(torch.isfinite(flat), flat, 0.0)


def magnitudes(values: Sequence[Tensor]) -> list[float]:
    """Return the largest absolute value of each tensor; NaN if it has one. One transfer from their device."""
    ends = [torch.aminmax(each) if each.numel() else each.new_zeros(2).unbind() for each in values]
    pairs = [torch.stack([low.double(), high.double()]) for low, high in ends]
    return [max(-low, high) if low == low else low for low, high in torch.stack(pairs).tolist()] if pairs else []


def _accumulate(total: Tensor, value: Tensor, shift: int, *, first: bool) -> None:
    """Add round(value * 2**shift) + `_CENTRE_BITS` to integers, or set them to it."""
    flat, scale = value.reshape(-1), 2.0 ** min(shift, _MOST_SHIFT)
    scratch = torch.empty(min(_PART, flat.numel()), dtype=torch.float64, device=flat.device)
    integers, centre = scratch.view(torch.int64), torch.tensor(_CENTRE, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART]
        number = part.numel()
        rounded = scratch[:number].copy_(part)
        torch.add(centre, rounded, alpha=scale, out=rounded)
        into = total[start : start + number]
        if first:
            into.copy_(integers[:number])
        else:
            into.add_(integers[:number])


def _wrapped(number: int) -> int:
    """Return a number modulo 2**64, as int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class ExactSums:
    """All sums of one step, and the members' agreement on those that have left their grids.

    Args:
        layout: has the agreed tops by name; changed by `agree`.
        micro_batches: number of the step's.
    """

    def __init__(self, layout: SumsLayout, micro_batches: int) -> None:
        self._layout = layout
        self._bits = min(BITS, 62 - (micro_batches - 1).bit_length())
        self._sums: dict[str, ExactSum] = {}
        self._largest: dict[str, int] = {}

    def begin(self, name: str, each: ExactSum) -> None:
        """Start a sum."""
        each.begin(self._layout.tops.get(name), self._bits)
        self._sums[name] = each

    @property
    def has_news(self) -> bool:
        """Whether a micro-batch of this rank has left a grid."""
        return any(each.apart for each in self._sums.values())

    def settle(self, engine: Engine) -> None:
        """Reduce what was added apart; repeatable."""
        mine = {name: [each.largest, sorted(each.apart)] for name, each in self._sums.items()}
        parts = [
            codec.decode(part) for part in gather_bytes(engine.communicator, codec.encode(mine), engine.tag("grids"))
        ]
        self._largest, wanted = {}, []
        for name, each in self._sums.items():
            tops = sorted({top for part in parts for top in part[name][1]})
            known = [part[name][0] for part in parts if part[name][0] is not None]
            if tops and known:
                self._largest[name] = max(known)
            wanted += [(each, top) for top in tops]
        communicator = engine.communicator
        reduce_apart(self._sums.values(), wanted, lambda tensor: communicator.wait(communicator.all_reduce(tensor)))

    def agree(self) -> None:
        """After the commit: set the next tops of the tensors that have left their grids."""
        for name, largest in self._largest.items():
            self._layout.tops[name] = largest + HEADROOM


def reduce_apart(
    sums: Iterable[ExactSum], wanted: Iterable[tuple[ExactSum, int]], reduce: Callable[[Tensor], None]
) -> None:
    """Reduce what was added apart, and give each sum its own.

    Args:
        sums: all of the step.
        wanted: which of them have something at a top on some rank: the same on all ranks.
        reduce: sums a tensor over the ranks, in place.
    """
    summed: dict[int, dict[int, Tensor]] = {}
    for group in _groups(wanted):
        flat = torch.cat([each.apart.get(top, each.nothing) for each, top in group])
        reduce(flat)
        for (each, top), part in zip(group, flat.split([each.numel for each, _ in group]), strict=True):
            summed.setdefault(id(each), {})[top] = part
    for each in sums:
        each.take(summed.get(id(each), {}))


def _groups(wanted: Iterable[tuple[ExactSum, int]]) -> Iterator[list[tuple[ExactSum, int]]]:
    """Divide sums into groups that are reduced in one tensor, each of one device."""
    group: list[tuple[ExactSum, int]] = []
    size = 0
    for each, top in wanted:
        if group and (size >= _GROUP or each.nothing.device != group[0][0].nothing.device):
            yield group
            group, size = [], 0
        group.append((each, top))
        size += each.numel
    if group:
        yield group


class ExactGradientBucket(GradientBucket):
    """The gradients of some parameters, as integers: this rank's sums are here and not in ``grad``."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        numbers = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
        Bucket.__init__(self, torch.empty(sum(numbers), dtype=torch.int64, device=parameters[0].device))
        self._parameters = parameters
        self._local = torch.empty_like(self.reduced)
        self._result: Tensor | None = None
        self.sums = [ExactSum(part) for part in self._local.split(numbers)]

    def take(self) -> None:
        """Move a micro-batch's gradients from the parameters to the sums."""
        found = [(each, p) for each, p in zip(self.sums, self._parameters, strict=True) if p.grad is not None]
        with torch.no_grad():
            gradients = [_dense(p.grad) for _, p in found if p.grad is not None]
            for (each, _), gradient, most in zip(found, gradients, magnitudes(gradients), strict=True):
                each.add(gradient, most)
        for _, parameter in found:
            parameter.grad = None

    @override
    def load(self) -> None:
        self.take()
        for each, part in zip(self.sums, self.reduced.split([each.numel for each in self.sums]), strict=True):
            each.load(part)

    @override
    def renew(self) -> None:
        Bucket.renew(self)

    @override
    def yield_kept(self) -> None:
        if self._result is not None and is_kept(self._result):
            self._result = None

    @override
    def views(self) -> Iterator[tuple[Parameter, Tensor]]:
        if self._result is None:
            self._result = torch.empty_like(self.reduced, dtype=self._parameters[0].dtype.to_real())
        numbers = [each.numel for each in self.sums]
        parts = zip(self.reduced.split(numbers), self._result.split(numbers), strict=True)
        for parameter, each, (integers, out) in zip(self._parameters, self.sums, parts, strict=True):
            each.write(integers, out)
            each.used = False
            if parameter.is_complex():
                out = torch.view_as_complex(out.view(-1, 2))
            yield parameter, in_order_of(parameter, out.view_as(parameter))


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient's numbers; a complex one has two for each element."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


class ExactGradients(GradientBuckets):
    """Buckets of a model's gradients whose sums have the same bits on any number of ranks; see `GradientBuckets`."""

    kind: ClassVar[type[GradientBucket]] = ExactGradientBucket

    def enter(self, exact: ExactSums) -> None:
        """Start the sums of a step."""
        names = {id(parameter): name for name, parameter in zip(self.names, self.parameters, strict=True)}
        for bucket in self._exact:
            for parameter, each in zip(bucket._parameters, bucket.sums, strict=True):
                exact.begin(names[id(parameter)], each)

    @property
    @override
    def used(self) -> list[bool]:
        taken = {id(p) for b in self._exact for p, each in zip(b._parameters, b.sums, strict=True) if each.used}
        return [parameter.grad is not None or id(parameter) in taken for parameter in self.parameters]

    @override
    def take(self) -> None:
        for bucket in self._exact:
            bucket.take()

    @property
    def _exact(self) -> Iterator[ExactGradientBucket]:
        return (each for each in self.buckets if isinstance(each, ExactGradientBucket))


class _StatisticsBucket(Bucket):
    """The changes of a model's batch-norm statistics, one sum for each tensor."""

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        super().__init__(torch.empty(sum(numbers), dtype=torch.int64, device=device))
        self.numbers = list(numbers)
        self.sums = [ExactSum(part) for part in torch.empty_like(self.reduced).split(self.numbers)]

    @override
    def load(self) -> None:
        for each, part in zip(self.sums, self.reduced.split(self.numbers), strict=True):
            each.load(part)


class ExactStatistics(NormStatistics):
    """Running statistics of batch-norm layers whose means over a step have the same bits on any number of ranks."""

    _exact: _StatisticsBucket | None = None

    @override
    def begin(self) -> None:
        super().begin()
        numbers = [each.base.numel() for each in (*self._floats, *self._counts)] if self._floats else []
        if not numbers:
            self._exact = None
        elif self._exact is None or self._exact.numbers != numbers:
            self._exact = _StatisticsBucket(numbers, self._floats[0].base.device)

    def enter(self, exact: ExactSums) -> None:
        """Start the sums of a step."""
        for place, each in enumerate([] if self._exact is None else self._exact.sums):
            exact.begin(f"statistic {place} of batch norm", each)

    @property
    @override
    def reduces(self) -> Sequence[Bucket]:
        return [] if self._exact is None else [self._exact]

    @override
    def finish_micro_batch(self) -> None:
        if self._exact is None:
            return
        for each, total in zip((*self._floats, *self._counts), self._exact.sums, strict=True):
            total.add((each.now - each.base).double())
        self.restore()

    @override
    def commit(self, num_micro_batches: int) -> None:
        if self._exact is None:
            return
        parts = zip(self._exact.sums, self._exact.reduced.split(self._exact.numbers), strict=True)
        for each, (total, integers) in zip((*self._floats, *self._counts), parts, strict=True):
            change = torch.empty(integers.numel(), dtype=torch.float64, device=integers.device)
            total.write(integers, change)
            whole = not each.base.is_floating_point()
            change = (change > 0).double() if whole else change / num_micro_batches
            each.set(each.base + change.view_as(each.base).to(each.base.dtype))


class OrderedSums(StepSums):
    """The sums of one step, independent of the division of its micro-batches; see `StepSums`.

    Args:
        layout, norms, buffers, gradients, metrics: as of `StepSums`.
        micro_batches: all of the step, by number.
        exact: the large sums.
    """

    def __init__(
        self,
        layout: SumsLayout,
        norms: NormStatistics,
        buffers: ModuleBuffers,
        gradients: Uses,
        metrics: MetricRecords | None,
        micro_batches: Sequence[int],
        exact: ExactSums,
    ) -> None:
        super().__init__(layout, norms, buffers, gradients, metrics)
        self._numbers = list(micro_batches)
        self._exact = exact
        self._parts: dict[int, tuple[Tensor | None, list[LogCall]]] = {}
        self._rows: list[list[float]] = []

    @override
    def add(self, loss: Tensor | None, calls: Sequence[LogCall], number: int = 0) -> None:
        super().add(loss, calls, number)
        self._parts[number] = None if loss is None else loss.detach().clone(), merged(calls)

    @override
    def totals(self) -> list[float]:
        calls = [call for _, found in self._parts.values() for call in found]
        news = self._has_news({call.options for call in calls}) or (self._began and self._exact.has_news)
        found = [0.0] * CHANGED + [float(news)]
        for number in self._numbers:
            loss, logged = self._parts.get(number, (None, []))
            found += [float(loss is not None), 0.0 if loss is None else float(loss.double())]
            own = {call.options: call for call in logged}
            for options in self._layout.options:
                call = own.get(options)
                value = None if call is None else call.value
                found += [0.0, 0.0] if call is None or value is None else [float(value), call.weight]
        return [each + 0.0 for each in found]  # without negative zeros, which a sum with zeros does not keep

    @override
    def read(self, totals: Sequence[float]) -> bool:
        head, rest = totals[: CHANGED + 1], totals[CHANGED + 1 :]
        width = 2 + 2 * len(self._layout.options)
        self._rows = [list(rest[place * width : (place + 1) * width]) for place in range(len(self._numbers))]
        loss = count = 0.0
        for has, value, *_ in self._rows:
            loss, count = loss + value, count + has
        return super().read([loss, count, head[CHANGED]])

    @override
    def settle(self, engine: Engine) -> None:
        super().settle(engine)
        self._exact.settle(engine)

    @override
    def finish(self) -> tuple[float | None, list[LogCall], list[bool]]:
        found = super().finish()
        self._exact.agree()
        return found

    @override
    def _plain_calls(self) -> list[list[object]]:
        return [[number, call.plain()] for number, (_, calls) in self._parts.items() for call in calls if call.weight]

    @override
    def _merged(self, plain: Iterable[list[object]]) -> list[LogCall]:
        ordered = sorted(plain, key=lambda each: each[0])  # type: ignore[arg-type, return-value]
        return merged([LogCall.from_plain(call) for _, call in ordered])  # type: ignore[arg-type]

    @override
    def _known_calls(self) -> list[LogCall]:
        calls = []
        for _, _, *values in self._rows:
            pairs = zip(self._layout.options, values[::2], values[1::2], strict=True)
            found = ((options, value, weight) for options, value, weight in pairs if weight)
            calls += [LogCall.from_plain([options, value, weight, None]) for options, value, weight in found]
        return merged(calls)


def step_sums(
    layout: SumsLayout,
    norms: NormStatistics,
    buffers: ModuleBuffers,
    gradients: GradientBuckets,
    metrics: MetricRecords | None,
    micro_batches: Sequence[int],
) -> StepSums:
    """Return the sums of a step, exact ones if the gradients are; arguments as of `OrderedSums`."""
    if not isinstance(gradients, ExactGradients):
        return StepSums(layout, norms, buffers, gradients, metrics)
    exact = ExactSums(layout, len(micro_batches))
    gradients.enter(exact)
    if isinstance(norms, ExactStatistics):
        norms.enter(exact)
    return OrderedSums(layout, norms, buffers, gradients, metrics, micro_batches, exact)
