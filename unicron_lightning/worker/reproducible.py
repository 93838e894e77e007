"""The reproducible mode beside its sums (`exact_sums`): kernels, conditions that workers must share, and digests.

Training then has the same bits for any history of failures, joins and resizes, and any number of workers, if a
micro-batch's gradients have. They depend on the processor, the number of threads and the version of torch, which are
compared between workers; and on kernels: those without a deterministic form raise an error.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from unicron_lightning.worker.agreement import words_of

_PART: Final = 1 << 20
"""Words that are weighted at a time."""
_MIX: Final = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))


def use_deterministic_kernels() -> tuple[bool, ...]:
    """Have torch use deterministic kernels, and raise an error for those that have none.

    Returns:
        The settings before, for `restore_kernels`.
    """
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled, searched = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise torch refuses products of matrices
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    return was, warns, filled, searched


def restore_kernels(settings: tuple[bool, ...]) -> None:
    """Restore the settings before `use_deterministic_kernels`."""
    memory: Any = torch.utils.deterministic
    was, warns, memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = settings
    torch.use_deterministic_algorithms(was, warn_only=warns)


def conditions(device: torch.device) -> dict[str, str]:
    """Describe what the bits of a micro-batch depend on beside the script, for a device of the model."""
    capability = torch.backends.cpu.get_cpu_capability()
    kinds = [f"{_processor()} with {capability}"]
    if device.type == "cuda":
        kinds.append(torch.cuda.get_device_name(device))
    return {"processor": ", ".join(kinds), "threads": str(torch.get_num_threads()), "reproducible": "True"}


def announced(device: torch.device, shards: int = 1) -> str:
    """Return the line that states at the start which conditions the bits have.

    Args:
        device: of the model.
        shards: workers of a replica.
    """
    found = conditions(device)
    sharded = f", {shards} shards" if shards > 1 else ""
    return (
        f"reproducible: the same bits for all histories with torch {torch.__version__}, {found['processor']}, "
        f"{found['threads']} threads{sharded}; another of these gives other bits"
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def digest_of(state: Any) -> str:
    """Return a digest of a nested state: of the types, shapes and bits of its tensors, on any kind of device."""
    return digest_from({name: (f"{each.dtype}", [*each.shape], weighted(each)) for name, each in state_tensors(state)})


def digest_from(found: Mapping[str, tuple[str, list[int], int]]) -> str:
    """Return the digest of tensors of which type, shape and `weighted` are known, by name."""
    plain = sorted((name, dtype, list(shape), number) for name, (dtype, shape, number) in found.items())
    return hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()


def weighted(tensor: Tensor, within: Sequence[slice] = (), whole: Sequence[int] = ()) -> int:
    """Return the sum of a tensor's words, each times a number that depends on its place, modulo 2**64.

    Args:
        tensor: a whole one, or a block of one.
        within: place of the block along each axis of the whole; empty for a whole one.
        whole: shape of the whole.
    """
    flat, total = words_of(tensor.detach()), 0
    words_each = 2 if tensor.is_complex() else 1
    for start in range(0, flat.numel(), _PART):
        words = flat[start : start + _PART].long()
        places = torch.arange(start, start + words.numel(), device=flat.device)
        if within:
            places = _in_whole(places // words_each, within, whole) * words_each + places % words_each
        weights = (places + 1) * _MIX[0]
        weights = (weights ^ (weights >> 29)) * _MIX[1]
        total += int(((weights ^ (weights >> 32)) | 1).mul_(words).sum())
    return total % (1 << 64)


def _in_whole(places: Tensor, within: Sequence[slice], whole: Sequence[int]) -> Tensor:
    """Return the places in a whole tensor of elements of a block of it; the arguments are those of `weighted`."""
    found, stride = torch.zeros_like(places), 1
    for along, size in zip(reversed(within), reversed(whole), strict=True):
        extent = along.stop - along.start
        found += (places % extent + along.start) * stride
        places, stride = places // extent, stride * size
    return found


def state_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and numbers of a nested state, by names that have their places."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from state_tensors(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from state_tensors(each, f"{name}.{place}")
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(value, dtype=torch.float64)
