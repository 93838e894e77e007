"""Skips the kit where it cannot run, divides it into portions, and collects its report.

`pytest -m gpu tests/gpu` runs it. UNICRON_KIT_REPORT names the document that has the results and gets new ones, each at
once; UNICRON_KIT_ITEMS the items to run, as in K1,K2, by default all. With UNICRON_KIT_BUDGET, in seconds, only tests
run that have not passed yet, the most valuable ones first, and none is begun for which too little time is left.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import kit, report
from gpu.portions import Portion, cost_of, order_of

_portions: dict[str, Portion] = {}
_began = time.monotonic()
BUDGET = float(os.environ.get("UNICRON_KIT_BUDGET") or 0.0)


def _rows() -> dict[str, report.Row]:
    """Results so far."""
    path = os.environ.get("UNICRON_KIT_REPORT")
    return {} if path is None else report.rows_of(Path(path).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork ranks from a process that has imported everything."""
    with kit.forking(tmp_path_factory.mktemp("ranks")):
        yield


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
        else:
            _portions[item.name] = Portion(test=item.name, **marker.kwargs)
    if BUDGET and _portions:
        order = {name: place for place, name in enumerate(order_of(list(_portions.values()), _rows()))}
        for item in items:
            if item.name in _portions and item.name not in order:
                item.add_marker(pytest.mark.skip(reason="it has passed"))
        items.sort(key=lambda item: order.get(item.name, len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test for which too little time is left."""
    if BUDGET and (portion := _portions.get(item.name)) is not None:
        left, cost = BUDGET - (time.monotonic() - _began), cost_of(portion, _rows())
        if cost > left:
            pytest.skip(f"it takes about {cost:.0f} s, and {left:.0f} s are left")


def passed_on_a_gpu() -> set[str]:
    """Tests whose results on a GPU a rehearsal must not replace."""
    return {name for name, row in _rows().items() if row[2] == "passed"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write an item's result where a report is asked for, before the next item may be cut short."""
    result: pytest.TestReport = yield
    marker, path = item.get_closest_marker("gpu"), os.environ.get("UNICRON_KIT_REPORT")
    ended = result.when == "call" or (result.when == "setup" and result.outcome == "failed")
    if marker is not None and ended and path and kit.device() is not None:
        measured = json.dumps(dict(result.user_properties)).replace("|", "/")
        about = " ".join(f"{name} {value}" for name, value in kit.versions().items())
        outcome = result.outcome if kit.device() == "cuda" else f"{result.outcome} (rehearsal)"
        row = (marker.args[0], item.name, outcome, f"{result.duration:.1f}", measured, about)
        if kit.device() == "cuda" or item.name not in passed_on_a_gpu():
            report.update(Path(path), {item.name: row})
    return result
