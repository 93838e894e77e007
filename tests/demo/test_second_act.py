"""The demo's second act, which reports how long tasks paused."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo.acts import play


@pytest.mark.chaos  # to keep `make test` short; tests/node shares nodes between tasks, too
@pytest.mark.timeout(560)
@pytest.mark.usefixtures("with_figures")
def test_two_tasks_share_a_cluster_through_a_nodes_death(tmp_path: Path) -> None:
    play(2, tmp_path / "out", 540)
    assert (tmp_path / "out" / "sharing" / "sharing.png").stat().st_size > 10_000
