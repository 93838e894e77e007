"""Megatron's distributed optimizer, and that with a loss scale, in float64, for tests.

They refuse all types but three, and know float32 by name. Copies of shards have torch's default type, so they are in
float64, too.
"""

from __future__ import annotations

from typing import Any

import torch

from unicron_lightning.megatron import shim


def install(settings: dict[str, Any]) -> None:
    """Install Megatron's replacements for CUDA and, if a run's settings need it, patch torch in this process."""
    shim.install()
    distributed = settings["ddp"].get("use_distributed_optimizer")
    if not settings["toy"].get("double") or not (distributed or settings["toy"].get("fp16")):
        return
    original: Any = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return "torch.cuda.FloatTensor" if found == "torch.cuda.DoubleTensor" else found

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    if not distributed:
        return
    single: Any = torch.Tensor.float

    def kept(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = self if self.dtype == torch.float64 else single(self, *args, **kwargs)
        return found

    torch.Tensor.float = kept  # type: ignore[method-assign, assignment]
    torch.set_default_dtype(torch.float64)
