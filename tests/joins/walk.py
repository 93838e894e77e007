"""Every attribute of a trainer, its loops, connectors, callbacks, loggers, optimizers and module, as plain values."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Path)
_LEFT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.GeneratorType)


def described(trainer: pl.Trainer) -> dict[str, Any]:
    """Return all values that can be reached from a trainer, by their path."""
    found: dict[str, Any] = {}
    seen: dict[int, str] = {}
    roots = {
        "module": trainer.lightning_module,
        "optimizers": trainer.optimizers,
        "schedulers": trainer.lr_scheduler_configs,
        "precision": trainer.precision_plugin,
        "trainer": trainer,
    }
    for name, root in roots.items():
        found.update(_walk(root, name, seen))
    return found


def _walk(value: Any, path: str, seen: dict[int, str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield path, value
        return
    if isinstance(value, torch.Tensor):
        own = value.to_local() if isinstance(value, DTensor) else value
        shown = [type(value).__name__, str(value.dtype), value.requires_grad, own.detach().cpu().clone()]
        yield path, shown
        return
    if isinstance(value, _LEFT) or not _looks(value):
        yield path, f"a {type(value).__qualname__}"
        return
    if id(value) in seen and not isinstance(value, tuple):
        yield path, f"as {seen[id(value)]}"
        return
    seen[id(value)] = path
    yield path, f"{type(value).__qualname__}{_size(value)}"
    if isinstance(value, Mapping):
        for place, (key, each) in enumerate(value.items()):
            name = str(key) if isinstance(key, (str, int)) else f"#{place}"
            yield from _walk(each, f"{path}[{name}]", seen)
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _walk(each, f"{path}[{place}]", seen)
    elif isinstance(value, (set, frozenset)):
        yield f"{path}()", sorted(map(str, value))
    for name, each in getattr(value, "__dict__", {}).items():
        if name == "_trainer":
            continue
        yield from _walk(each, f"{path}.{name}", seen)


def _size(value: Any) -> str:
    return f" of {len(value)}" if isinstance(value, (Mapping, list, tuple, set, frozenset)) else ""


def _looks(value: Any) -> bool:
    """Whether to look into an object: those of Lightning, of torch's optimizers and of scripts, and containers."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return True
    module = type(value).__module__
    if isinstance(value, pl.strategies.Strategy):
        return False
    names = ("lightning.", "torch.optim", "torch.nn", "torchmetrics", "joins.", "torch.amp", "pytorch_optimizer")
    return module.startswith(names)


def same(one: Any, other: Any) -> bool:
    """Whether two values of `described` are equal, bit by bit."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _bits(one) == _bits(other)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


EXPECTED = {
    ".callbacks[0].": "this test's own callback",
    "._opt_called": "torch's note that an optimizer has stepped, for a warning about the order of calls",
    "._combined_loader._iterator._idx": "the number of batches that this iterator has given, which nothing reads",
    ".val_loop._results": "values of the validation before, which the next one begins anew",
    "_step_post_hooks": "numbers that torch gives hooks in a process",
    ".val_loop._has_run": "whether a validation has run here, which the next one sets",
    ".val_loop._combined_loader._": "iterators and limits, which a validation sets when it begins",
    ".val_loop._data_fetcher": "made when a validation begins",
    ".val_loop._module_mode": "modes of the layers, which a validation notes when it begins",
    "._start_time": "a time of this process",
    "._last_time_checked": "a time of this process",
    "._last_val_time": "a time of this process",
    "._offset": "a time of this process",
    ".datamodule._hparams": "made when it is read",
    "._swa_scheduler.optimizer": "on a member that of the fit before, which nothing reads",
    "._accumulate_grad_batches": "set before it is read",
    "._numel_cache": "the number of parameters, which LBFGS counts in its first step",
    "._need_device_dtype_check_for_fused": "torch's note that a first step is to check devices",
    "].defaults[differentiable]": "torch adds it when a state is loaded",
    "].momenta": "of the fit before; set before they are read",
}
"""Parts of the paths of attributes in which a joiner may differ from the members, with the reason."""


def unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, by their path."""
    none = "missing"
    paths = dict.fromkeys([*one, *other])
    pairs = {path: (one.get(path, none), other.get(path, none)) for path in paths}
    differing = {path: pair for path, pair in pairs.items() if not same(*pair)}
    if any(path.endswith("].defaults[differentiable]") for path in differing):  # and so the number of defaults
        differing = {path: pair for path, pair in differing.items() if not path.endswith("].defaults")}
    return {path: pair for path, pair in differing.items() if not any(part in path for part in EXPECTED)}
