"""Optimizers of all kinds: through deaths in their updates parameters and states equal those without failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from joins.running import Site, results, site
from joins.walk import described, unequal
from optimizers.table import HAS_PACKAGE, OF_PACKAGE, OPTIMIZERS, PACKAGE, SAMPLES, Matrices, data
from optimizers.worker import DEATHS, DEATHS_OF_CLOSURES, EPOCHS, train
from torch.utils.data import DataLoader, IterableDataset

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
    deaths = DEATHS_OF_CLOSURES if "lbfgs" in name else DEATHS
    assert len(list(folder.glob("struck-*"))) == len(deaths)
    joined = sorted(folder.glob("joiner-*.pt"))
    assert len(joined) == len(deaths)
    for path in joined:
        member = path.with_name(path.name.replace("joiner", "member"))
        assert unequal(torch.load(member, weights_only=False), torch.load(path, weights_only=False)) == {}
    alone = train(name, tmp_path, alone=True)
    ends = results(folder)
    assert [far(each["end"], alone) for each in ends] == [{}, {}]
    states = [path for path in alone if path.startswith("optimizers[0].state") and isinstance(alone[path], list)]
    assert states, "no state was compared"


class Stream(IterableDataset[Any]):
    """The samples of `data` in their order, dealt to the devices."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return iter([sample for number, sample in enumerate(data().dataset) if number % size == rank])


def in_order(batch_size: int) -> DataLoader[Any]:
    """Return the samples of `data` in their order, which a sampler of one's own keeps."""
    return DataLoader(data().dataset, batch_size=batch_size, sampler=range(SAMPLES))


def fit(name: str, folder: Path, loader: Any, **options: Any) -> dict[str, Any]:
    """Train without dropout, in this process alone; return parameters and the optimizer's state."""
    pl.seed_everything(3, verbose=False)
    settings: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": EPOCHS, "logger": False}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Matrices(OPTIMIZERS[name], dropout=0.0)
    trainer = pl.Trainer(**settings, **options, default_root_dir=folder)
    trainer.fit(module, loader)
    return {path: each for path, each in described(trainer).items() if path.startswith(("module.net", "optimizers"))}


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.parametrize("name", ["lbfgs", "lbfgs-wolfe", "muon"])
def test_the_result_is_lightnings_own(name: str, tmp_path: Path) -> None:
    whole = fit(name, tmp_path, in_order(4), devices=1)
    parts = fit(name, tmp_path, in_order(2), devices=2, strategy="unicron")
    parameters = {path: each for path, each in whole.items() if path.startswith("module.net")}
    assert far(parts, parameters, 1e-10) == {}  # LBFGS amplifies the roundings of sums of micro-batches


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
def test_closures_of_streams(tmp_path: Path) -> None:
    options: dict[str, Any] = {"devices": 2, "strategy": "unicron"}
    index = fit("lbfgs", tmp_path, in_order(2), **options)
    stream = fit("lbfgs", tmp_path, DataLoader(Stream(), batch_size=2), **options)
    assert far(index, stream) == {}


def far(one: dict[str, Any], other: dict[str, Any], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Return the values of modules and optimizers that differ."""
    paths = [path for path in other if path.startswith(("module", "optimizers"))]
    pairs = {path: (one.get(path), other[path]) for path in paths}
    return {path: pair for path, pair in pairs.items() if not close(*pair, tolerance)}


def close(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) == 4:
        return one[1:3] == other[1:3] and torch.allclose(one[3].double(), other[3].double(), rtol=0, atol=tolerance)
    return bool(one == pytest.approx(other, rel=1e-12, abs=1e-12)) if isinstance(one, float) else True
