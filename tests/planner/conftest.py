"""The tests of the planner use compiled loops; `search/test_compiler.py` compares them with interpreted ones."""

from __future__ import annotations

import pytest

from unicron_lightning.planner.search.dynamic_program import compile_all


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    assert compile_all()
