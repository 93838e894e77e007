"""The demo's first act, without time limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo.acts import play


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("with_figures")
def test_the_demo_heals_three_failures_and_proves_it(tmp_path: Path) -> None:
    play(1, tmp_path / "out", 380)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
