"""``self.log`` in steps, made independent of the distribution of micro-batches.

Values that a step logs are recorded per micro-batch (or evaluation batch) instead of going to Lightning's results at
once. When the step commits (the evaluation pass ends) the records of all ranks are reduced, and every rank logs the
same global values. So no logged value is lost with a rank, and a joiner can receive the accumulated results from a
peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
    warning_cache,
)
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.worker.sums import LogCall, Options

Recording = tuple[Any, int | None, list[LogCall] | None]
"""A batch, its size if it is known, and the list that takes log calls; None: they are not recorded."""


def logged_dtype(plugin: Precision) -> torch.dtype | None:
    """Return the type of logged values if it is not torch's default, which is single outside of double steps."""
    return torch.float64 if isinstance(plugin, DoublePrecision) else None


class RecordingResults(_ResultCollection):
    """Lightning's result collection with a tap.

    Args:
        training: as upstream.
        reduce: the strategy's reduction, for hooks that log with ``sync_dist=True``.
        on_epoch_metrics: called before epoch-level metrics are read: the place to finish an evaluation pass.
        is_local: tells whether what is logged now stays on this rank, whatever ``sync_dist`` says.
        dtype: of values that steps have logged; None: torch's default.

    Attributes:
        at_epoch_start: the trainer's metrics (of callbacks, logged, of the progress bar) when the present epoch began.
    """

    def __init__(
        self,
        training: bool,
        reduce: Callable[..., Any] = lambda tensor, group=None, reduce_op="mean": tensor,
        on_epoch_metrics: Callable[[], None] = lambda: None,
        is_local: Callable[[], bool] = lambda: False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(training)
        self._calls: list[LogCall] | None = None
        self._reduce = reduce
        self._on_epoch_metrics = on_epoch_metrics
        self._is_local = is_local
        self._was_local = False
        self._dtype = dtype
        self.at_epoch_start: list[dict[str, Any]] = [{}, {}, {}]

    @contextmanager
    def recording(self, batch: Any) -> Iterator[list[LogCall]]:
        """Record all log calls of the block in the yielded list only; ``batch`` provides the batch size."""
        calls: list[LogCall] = []
        before = self.exchange((batch, None, calls))
        try:
            yield calls
        finally:
            self.exchange(before)

    def exchange(self, recording: Recording) -> Recording:
        """Put another recording in place, and return the present one."""
        before = self.batch, self.batch_size, self._calls
        self.batch, self.batch_size, self._calls = recording
        return before

    def record_into(self, calls: list[LogCall] | None) -> None:
        """Record into ``calls`` from now on (None: stop recording)."""
        self._calls = calls

    @override
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._calls is None or args:
            self._log_in_hook(fx, name, value, *args, **kwargs)
            return
        options: Options = (
            fx,
            name,
            kwargs.get("prog_bar", False),
            kwargs.get("logger", True),
            kwargs.get("on_step", False),
            kwargs.get("on_epoch", True),
            _reduction_name(kwargs.get("reduce_fx", torch.mean)),
            kwargs.get("add_dataloader_idx", True),
        )
        if isinstance(value, Metric):
            call = LogCall(options=options, value=None, weight=1.0, metric=kwargs.get("metric_attribute"))
        else:
            weight = self._weight(options, kwargs.get("batch_size"))
            if isinstance(value, Tensor) and not value.is_floating_point():
                self._warn_of_type(options, value)
            value = value.full_tensor() if hasattr(value, "full_tensor") else value  # of a parallel loss
            call = LogCall(options=options, value=torch.as_tensor(value).detach(), weight=weight)
        self._calls.append(call)

    def replay(self, call: LogCall, module: torch.nn.Module, device: torch.device) -> None:
        """Log a global value, as if the step had logged it once."""
        value: Any
        if call.value is None:
            value = module.get_submodule(call.metric or "")
        else:
            value = call.value.to(device=device, dtype=self._dtype or torch.get_default_dtype())
        self._log_as(call.options, value, max(1, round(call.weight)), call.metric)

    @override
    def metrics(self, on_step: bool) -> Any:
        if not on_step:
            self._on_epoch_metrics()
            # Reduced in one order on all ranks: a joiner may have logged in another one.
            for _, metric in sorted(self.valid_items(), key=lambda item: str(item[0])):
                self._get_cache(metric, on_step)
        return super().metrics(on_step)

    @staticmethod
    @override
    def _get_cache(result_metric: _ResultMetric, on_step: bool) -> Tensor | None:
        """As upstream, without the advice to reduce over the ranks: what steps log is reduced already."""
        if not on_step and result_metric.meta.on_epoch and result_metric._computed is None:
            should = result_metric.meta.sync.should
            computed = result_metric.compute()
            result_metric.meta.sync.should = should
            if result_metric.is_tensor:  # a mean is divided by batch sizes that `_synchronise` has made double
                result_metric._computed = computed.to(result_metric.value.dtype)  # type: ignore[assignment]
        return _ResultCollection._get_cache(result_metric, on_step)

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy has the values, and no part in this process's run."""
        state = {"at_epoch_start": self.at_epoch_start}
        return type(self), (self.training,), state, None, iter(self.items())

    def state(self) -> list[Any]:
        """Return accumulated results, as plain data for a joiner; of metric objects only that they were logged."""
        return [
            [
                _options(m),
                [m.enable_graph, m.sync.should, m.sync.rank_zero_only, m.sync.fn is not _Sync.no_op],
                metric.value if metric.is_tensor else m.metric_attribute,
                metric.cumulated_batch_size if metric.is_tensor and m.is_mean_reduction else None,
                metric.has_reset,
                metric._forward_cache,
                metric._update_count,
            ]
            for metric in self.values()
            if (m := metric.meta) and (metric.is_tensor or m.metric_attribute)
        ]

    def load_state(
        self, state: Sequence[Sequence[Any]], device: torch.device, module: torch.nn.Module | None = None
    ) -> None:
        """Replace the values that this worker has logged alone by another worker's `state`.

        Args:
            state: the other worker's state.
            device: device of tensors.
            module: owner of the metric objects.
        """
        self.clear()
        for options, sync, value, batch_size, has_reset, cache, updates in state:
            meta = self._metadata(options, *sync)
            attribute = value if isinstance(value, str) else None
            meta.metric_attribute = attribute
            self[f"{meta.fx}.{meta.name}"] = metric = _ResultMetric(meta, attribute is None)
            metric.value = value
            if attribute is not None:
                assert module is not None
                metric.value = module.get_submodule(attribute)
            elif meta.is_mean_reduction:
                metric.cumulated_batch_size = batch_size
            metric._forward_cache, metric.has_reset, metric._update_count = cache, has_reset, updates
            metric.to(device)

    def _metadata(
        self, options: Sequence[Any], graph: bool, synchronised: bool, first_rank: bool, in_hook: bool
    ) -> _Metadata:
        """Create metadata equal to those with which Lightning, or `replay`, will log the value again."""
        meta = _Metadata(**_named(options), enable_graph=graph)
        function = self._synchronise if in_hook else _Sync.no_op
        meta.sync = _Sync(fn=function, _should=synchronised, rank_zero_only=first_rank)
        return meta

    def _log_in_hook(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log outside the steps: Lightning keeps the value on this rank, and reduces it on demand."""
        if self._forget_local():
            kwargs["sync_dist"] = False
        if "sync_dist_fn" in kwargs:
            kwargs["sync_dist_fn"] = self._synchronise
        if kwargs.get("reduce_fx") in (min, max, sum):  # the same function of torch's, as for a joiner
            kwargs["reduce_fx"] = kwargs["reduce_fx"].__name__
        if isinstance(self.batch, GlobalBatch) and kwargs.get("batch_size") is None and kwargs.get("on_epoch", True):
            kwargs["batch_size"] = self.batch.num_samples()  # a rank's own part depends on the present world
        super().log(fx, name, value, *args, **kwargs)

    def _warn_of_type(self, options: Options, value: Tensor) -> None:
        """Give Lightning's warning about a logged tensor of integers."""
        fx, name, dtype = options[0], options[1], self._dtype or torch.get_default_dtype()
        warning_cache.warn(
            f"You called `self.log({name!r}, ...)` in your `{fx}` but the value needs to be floating to be reduced."
            f" Converting it to {dtype}. You can silence this warning by converting the value to floating point"
            " yourself. If you don't intend to reduce the value (for instance when logging the global step or epoch)"
            f" then you can use `self.logger.log_metrics({{{name!r}: ...}})` instead."
        )

    def _forget_local(self) -> bool:
        """Return whether values stay on this rank. When that changes, values logged with other options are dropped."""
        local = self._is_local()
        if self._was_local != local:
            self.clear()
        self._was_local = local
        return local

    def _synchronise(self, value: Tensor, *, reduce_op: str | None, group: Any) -> Any:
        """Reduce in floating point: Lightning also takes the mean of batch sizes, which are integers."""
        return self._reduce(value if value.is_floating_point() else value.double(), group=group, reduce_op=reduce_op)

    def _log_as(self, options: Options, value: Any, batch_size: int, metric: str | None) -> None:
        self._forget_local()
        super().log(value=value, **_named(options), batch_size=batch_size, metric_attribute=metric)

    def _weight(self, options: Options, batch_size: int | None) -> float:
        if batch_size is not None:
            return float(batch_size)
        if self.batch is None or options[6] != "mean":
            return 1.0
        if self.batch_size is None:
            self.batch_size = extract_batch_size(self.batch) if options[5] else 1
        return float(self.batch_size)


def _options(meta: Any) -> list[Any]:
    own = [meta.fx, meta.name, meta.prog_bar, meta.logger, meta.on_step, meta.on_epoch]
    return [*own, _reduction_name(meta.reduce_fx), meta.add_dataloader_idx]


def _named(options: Sequence[Any]) -> dict[str, Any]:
    """Return the identity of a logged value as Lightning's arguments."""
    names = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx")
    found = dict(zip(names, options, strict=True))
    return {**found, "reduce_fx": getattr(torch, found["reduce_fx"])}


def _reduction_name(function: Any) -> str:
    name = function.lower() if isinstance(function, str) else getattr(function, "__name__", str(function))
    name = {"avg": "mean", "amax": "max", "amin": "min"}.get(name, name)
    if name not in ("mean", "sum", "min", "max"):
        raise MisconfigurationException(
            "Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported. If you need a custom reduction, please "
            f"log a `torchmetrics.Metric` instance instead. Found: {function}"
        )
    return name
