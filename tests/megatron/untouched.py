"""Original attributes of torch that the shim replaces, recorded before megatron-core or this package is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

REPLACEABLE = {
    torch: ("arange", "empty", "full", "ones", "tensor", "zeros"),
    torch.cuda: ("current_device", "synchronize", "get_rng_state", "set_rng_state", "manual_seed"),
    torch.Tensor: ("cuda", "type"),
}
BEFORE = {(owner, name): getattr(owner, name) for owner, names in REPLACEABLE.items() for name in names}


def compare(rank: int, world: int, folder: Path) -> list[list[str]]:
    """Scenario: attributes that differ after all imports, and attributes that are unchanged with the shim installed."""
    from unicron_lightning.megatron import shim

    changed = [name for (owner, name), before in BEFORE.items() if getattr(owner, name) is not before]
    assert shim.installed() == ()
    shim.install()
    assert shim.installed() == tuple(patch.name for patch in shim.PATCHES)
    return [changed, [name for (owner, name), before in BEFORE.items() if getattr(owner, name) is before]]
