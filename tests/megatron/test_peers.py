"""Waits in Megatron's groups end with the connections, even if gloo has lost track of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from worlds.client import Worlds

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(("operation", "cuts"), [("reduce-scatter", True), ("message", True), ("message", False)])
def test_a_sender_that_dies_amid_its_message(worlds: Worlds, tmp_path: Path, operation: str, cuts: bool) -> None:
    _, found = worlds.run("broken:killed_while_sending", 2, tmp_path, killed=(0,), operation=operation, cuts=cuts)
    assert 0 < found["arrived"] < 1, "the sender died before or after its message"
    assert found["reason"] == "the group's connections are closed"
    assert found["seconds"] < 5
    assert found["later"] == found["arrived"], "written to after the wait was over"
    assert found["closing"] < 1


@pytest.mark.parametrize("all_pairs", [False, True])
def test_a_group_connects_the_peers_that_it_needs(worlds: Worlds, tmp_path: Path, all_pairs: bool) -> None:
    """Each of six members is connected to those at distance 1 and 2, or to all; collectives need no others."""
    found = worlds.run("broken:connected_as_needed", 6, tmp_path, all_pairs=all_pairs)
    assert [each["connections"] for each in found] == [[5, 5] if all_pairs else [4, 4]] * 6
    assert [(each["sum"], each["disconnected"]) for each in found] == [(6.0, False)] * 6
    assert 0 < found[1]["released"] < 5, "a wait for peers that do nothing outlasted the cut"


def test_reduce_scatters_give_each_its_part(worlds: Worlds, tmp_path: Path) -> None:
    """No ended work is kept, unlike in torch's own implementation, which never reports completion."""
    first, second = worlds.run("broken:scattered", 2, tmp_path)
    assert first == [[[1.0, 3.0], [10.0], [1.0, 3.0]], [0.0, 1.0, 2.0, 3.0], 0]
    assert second == [[[5.0, 7.0], [14.0], [5.0, 7.0]], [1.0, 2.0, 3.0, 4.0], 0]


def test_a_partner_that_lets_go_has_the_groups_on_the_accelerator_aborted(worlds: Worlds, tmp_path: Path) -> None:
    """Among three groups only the connection with that partner is closed."""
    _, second, third = worlds.run("broken:let_go_by_a_partner", 3, tmp_path)
    assert second == third == {"early": False, "aborted": True, "intact": False, "threads": []}


def test_leaving_a_world_does_not_wait_for_groups_on_the_accelerator_and_entering_the_next_one_does(
    worlds: Worlds, tmp_path: Path
) -> None:
    [[left, early, ended, threads, size]] = worlds.run("broken:left_groups", 1, tmp_path)
    assert left < 2.0 and not early and ended and size == 1
    assert threads and all(thread.startswith("unicron-abort") for thread in threads)
