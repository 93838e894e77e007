"""Optimizers of all kinds: through deaths in their updates parameters and states equal those without failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from joins.running import Site, results, site
from joins.walk import unequal
from optimizers.table import HAS_PACKAGE, OF_PACKAGE, OPTIMIZERS, PACKAGE
from optimizers.worker import DEATHS, train

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("optimizers")) as made:
        yield made


def named(name: str) -> Any:
    absent = pytest.mark.skipif(not HAS_PACKAGE, reason=f"needs pip install --no-deps {PACKAGE}")
    return pytest.param(name, marks=[absent] if name in OF_PACKAGE else [])


@pytest.mark.parametrize("name", [*map(named, OPTIMIZERS)])
def test_deaths_around_updates_change_nothing(name: str, place: Site, tmp_path: Path) -> None:
    folder = place.run(name, "optimizers.worker", restarts=6)
    assert len(list(folder.glob("struck-*"))) == len(DEATHS)
    joined = sorted(folder.glob("joiner-*.pt"))
    assert len(joined) == len(DEATHS)
    for path in joined:
        member = path.with_name(path.name.replace("joiner", "member"))
        assert unequal(torch.load(member, weights_only=False), torch.load(path, weights_only=False)) == {}
    alone = train(name, tmp_path, alone=True)
    ends = results(folder)
    assert [far(each["end"], alone) for each in ends] == [{}, {}]
    states = [path for path in alone if path.startswith("optimizers[0].state") and isinstance(alone[path], list)]
    assert states, "no state was compared"


def far(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the values of modules and optimizers that differ."""
    paths = [path for path in other if path.startswith(("module", "optimizers"))]
    pairs = {path: (one.get(path), other[path]) for path in paths}
    return {path: pair for path, pair in pairs.items() if not close(*pair)}


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) == 4:
        return one[1:3] == other[1:3] and torch.allclose(one[3].double(), other[3].double(), rtol=0, atol=TOLERANCE)
    return bool(one == pytest.approx(other, rel=1e-12, abs=1e-12)) if isinstance(one, float) else True
