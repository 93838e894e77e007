"""CPU replacements for megatron-core's uses of CUDA, for tests and demonstrations without an accelerator.

**Never for training.** The patches change torch itself for the whole process (`torch.zeros`, `Tensor.type`, ...), so
they are installed in separate processes, and `install` refuses where CUDA is available. Importing this module changes
nothing.

Written for megatron-core 0.16 and its modules without Transformer Engine and Apex ("local" layer specs). Each patch has
its reason beside it; tests/megatron/test_shim.py trains without each in turn, and fails if one has become unnecessary.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replacement.

    Args:
        name: for `install`'s ``without``.
        reason: failure of megatron-core without the patch.
        apply: applies the patch.
    """

    name: str
    reason: str
    apply: Callable[[], None]


_installed: list[str] = []


def install(*, without: Collection[str] = ()) -> None:
    """Patch torch and megatron-core in this process; a second call does nothing.

    Args:
        without: names of patches to leave out; for the test that each is needed.

    Raises:
        ConfigError: CUDA is available, or ``without`` names no patch.
    """
    if torch.cuda.is_available():
        raise ConfigError("the CPU shim for megatron-core: CUDA is available here; it is for machines without it only")
    if unknown := set(without) - {patch.name for patch in PATCHES}:
        raise ConfigError(f"without={sorted(unknown)}: expected names among {[patch.name for patch in PATCHES]}")
    if _installed:
        return
    for patch in PATCHES:
        if patch.name not in without:
            patch.apply()
            _installed.append(patch.name)


def installed() -> tuple[str, ...]:
    """The names of the installed patches in this process; empty unless `install` was called."""
    return tuple(_installed)


def _replace(owner: Any, name: str, value: object) -> None:
    setattr(owner, name, value)


def _current_device() -> None:
    _replace(torch.cuda, "current_device", lambda: "cpu")


def _synchronize() -> None:
    _replace(torch.cuda, "synchronize", lambda *args, **kwargs: None)


def _generator() -> None:
    _replace(torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _replace(torch.cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    _replace(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed))


def _rng_tracker() -> None:
    from megatron.core.tensor_parallel import random

    _replace(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _replace(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    # Its fork() warns whenever the CPU's generator changes within it, which is intended here.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _factories() -> None:
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        _replace(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory with devices that mean CUDA (an index, "cuda", "cuda:0") replaced."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _tensor_cuda() -> None:
    _replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


def _tensor_type() -> None:
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None or args or kwargs:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    _replace(torch.Tensor, "type", type_)


class _HostStream:
    """A CUDA stream, or an event of one: without CUDA all work is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def record_event(self, *args: Any) -> _HostStream:
        """Return an event that has occurred."""
        return self


def _streams() -> None:
    stream = _HostStream()
    _replace(torch.cuda, "Stream", _HostStream)
    _replace(torch.cuda, "current_stream", lambda *args, **kwargs: stream)
    _replace(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    _replace(torch.Tensor, "record_stream", lambda self, stream: None)


def _router_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        _replace(moe_utils, "te_general_gemm", None)


def _token_splits() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else original(tensor, as_numpy, record_stream)

    _replace(token_dispatcher, "maybe_move_tensor_to_cpu", moved)


PATCHES = (
    Patch(
        name="current_device",
        reason="buffers, layers and pipeline messages are allocated on torch.cuda.current_device()",
        apply=_current_device,
    ),
    Patch(
        name="synchronize",
        reason="pipeline stages wait for the device after each batch of messages (batch_p2p_sync)",
        apply=_synchronize,
    ),
    Patch(
        name="generator",
        reason="model_parallel_cuda_manual_seed derives its states from CUDA's default generator",
        apply=_generator,
    ),
    Patch(
        name="rng_tracker",
        reason="the tracker of random states reads and sets the generator of a CUDA device directly",
        apply=_rng_tracker,
    ),
    Patch(
        name="factories",
        reason='schedules, optimizers, gradient norms and causal masks write device="cuda" or an index',
        apply=_factories,
    ),
    Patch(
        name="tensor_cuda",
        reason="tied embeddings across pipeline stages are moved by Tensor.cuda()",
        apply=_tensor_cuda,
    ),
    Patch(
        name="tensor_type",
        reason='optimizers and clipping compare Tensor.type() with names such as "torch.cuda.FloatTensor"',
        apply=_tensor_type,
    ),
    Patch(
        name="streams",
        reason="the alltoall dispatcher of tokens copies their numbers to host memory on a stream of its own",
        apply=_streams,
    ),
    Patch(
        name="router_gemm",
        reason="routers look for a function of Transformer Engine that is imported only where that is installed",
        apply=_router_gemm,
    ),
    Patch(
        name="token_splits",
        reason="the alltoall dispatcher gives torch the split sizes as arrays only if it has moved them from CUDA",
        apply=_token_splits,
    ),
)
