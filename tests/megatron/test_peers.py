"""Waits in Megatron's groups end when the connections have, also where gloo has forgotten them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from megatron.conftest import Worlds

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(("operation", "cuts"), [("broadcast", True), ("message", True), ("message", False)])
def test_a_sender_that_dies_amid_its_message(worlds: Worlds, tmp_path: Path, operation: str, cuts: bool) -> None:
    _, found = worlds.run("broken:killed_while_sending", 2, tmp_path, killed=(0,), operation=operation, cuts=cuts)
    assert 0 < found["arrived"] < 1, "the sender died before or after its message"
    assert found["reason"] == "the group's connections are closed"
    assert found["seconds"] < 5
    assert found["later"] == found["arrived"], "written to after the wait was over"
    assert found["closing"] < 1
