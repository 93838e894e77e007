"""Skips the kit where it cannot run, and collects its report.

`pytest -m gpu tests/gpu` runs it. UNICRON_KIT_REPORT names the document that gets the results, UNICRON_KIT_ITEMS the
items to run, as in K1,K2; all by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import kit, report

_rows: dict[str, report.Row] = {}


@pytest.fixture(scope="session", autouse=True)
def hidden_transformers(lean_processes: None) -> Iterator[None]:
    """Hide transformers, too: torchmetrics imports it where it is installed, and it needs packages that are hidden."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNICRON_TEST_HIDDEN", "transformers")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    on = kit.device()
    picked = set(os.environ.get("UNICRON_KIT_ITEMS", "").replace(",", " ").split())
    for item in items:
        if (marker := item.get_closest_marker("gpu")) is None:
            continue
        if picked and marker.args[0] not in picked:
            item.add_marker(pytest.mark.skip(reason="not among UNICRON_KIT_ITEMS"))
        elif on is None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and a torch with NCCL"))
        elif on == "cpu" and item.get_closest_marker("hardware") is not None:
            item.add_marker(pytest.mark.skip(reason="the rehearsal on the CPU cannot show it"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note an item's result."""
    result: pytest.TestReport = yield
    marker = item.get_closest_marker("gpu")
    if marker is not None and result.when == "call" and kit.device() is not None:
        measured = json.dumps(dict(result.user_properties)).replace("|", "/")
        about = " ".join(f"{name} {value}" for name, value in kit.versions().items())
        outcome = result.outcome if kit.device() == "cuda" else f"{result.outcome} (rehearsal)"
        _rows[item.name] = (marker.args[0], item.name, outcome, f"{result.duration:.1f}", measured, about)
    return result


def pytest_sessionfinish() -> None:
    """Write the report, where one is asked for."""
    if _rows and (path := os.environ.get("UNICRON_KIT_REPORT")):
        report.update(Path(path), _rows)
