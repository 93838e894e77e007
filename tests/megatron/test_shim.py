"""The CPU shim: off by default, refused beside CUDA, each patch needed, and sufficient for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron import shim

if TYPE_CHECKING:
    from pathlib import Path

    from worlds.client import Worlds

OF_EXPERTS = "streams", "router_gemm", "token_splits"
"""Patches that dense models do not need."""


@pytest.mark.faults
def test_nothing_is_replaced_until_it_is_installed(worlds: Worlds, tmp_path: Path) -> None:
    [[changed_by_import, left_by_install]] = worlds.run("untouched:compare", 1, tmp_path)
    assert (changed_by_import, left_by_install) == ([], [])


def test_it_is_refused_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA is available"):
        shim.install()
    assert shim.installed() == ()


def test_an_unknown_patch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"without=\['graphs'\]: expected names among"):
        shim.install(without={"graphs"})


@pytest.mark.faults
@pytest.mark.parametrize("patch", [patch.name for patch in shim.PATCHES])
def test_each_patch_is_needed(worlds: Worlds, tmp_path: Path, patch: str) -> None:
    layout: dict[str, Any] = {"pp": 2, "options": {"dropout": 0.1}}
    if patch in OF_EXPERTS:
        layout = {"ep": 2, "options": {"experts": 4, "router": {"moe_token_dispatcher_type": "alltoall"}}}
    exits = worlds.exits("plain:train", 2, tmp_path, steps=1, without=patch, **layout)
    assert 1 in exits


@pytest.mark.faults
def test_layouts_agree(worlds: Worlds, tmp_path: Path) -> None:
    """TP with sequence parallelism trains like one process, and ZeRO-1 with overlap like plain data parallelism.

    Stages draw their own initial values, so layouts with pipelines are compared among themselves.
    """
    one = worlds.run("plain:train", 1, tmp_path / "one")
    tp = worlds.run("plain:train", 2, tmp_path / "tp", tp=2, options={"sequence_parallel": True})
    pp = worlds.run("plain:train", 2, tmp_path / "pp", pp=2)
    both = worlds.run("plain:train", 4, tmp_path / "both", pp=2, zero1=True, overlap_grad_reduce=True)
    assert tp == [pytest.approx(one[0], rel=1e-5)] * 2
    assert both == [pytest.approx(pp[0], rel=1e-5)] * 4
