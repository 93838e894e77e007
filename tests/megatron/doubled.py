"""Megatron's distributed optimizer in float64, for tests: it refuses all types but three, and knows float32 by name.

Copies of shards have torch's default type, so they are in float64, too.
"""

from __future__ import annotations

from typing import Any

import torch

from unicron_lightning.megatron import shim


def install(settings: dict[str, Any]) -> None:
    """Install Megatron's replacements for CUDA and, if a run's settings need it, patch torch in this process."""
    shim.install()
    if not (settings["toy"].get("double") and settings["ddp"].get("use_distributed_optimizer")):
        return
    original: Any = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return "torch.cuda.FloatTensor" if found == "torch.cuda.DoubleTensor" else found

    single: Any = torch.Tensor.float

    def kept(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = self if self.dtype == torch.float64 else single(self, *args, **kwargs)
        return found

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    torch.Tensor.float = kept  # type: ignore[method-assign, assignment]
    torch.set_default_dtype(torch.float64)
