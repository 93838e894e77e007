"""Random numbers of evaluations depend on the batch, and those of hooks on neither batches nor worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from unicron_lightning.data import passes
from unicron_lightning.worker.rows import RowPlan

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


class Drawing(pl.LightningModule):
    """Records a random number of each batch, and those that hooks draw at the start and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.drawn: dict[int, float] = {}
        self.hooks: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.drawn[int(batch)] = float(torch.rand(()))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.validation_step(batch, batch_idx)
        return batch

    def _draw(self) -> None:
        self.hooks.append(float(torch.rand(())))

    on_validation_start = on_validation_end = on_test_start = on_test_end = on_predict_start = on_predict_end = _draw


def run(name: str, folder: Path, workers: int) -> Drawing:
    pl.seed_everything(3, verbose=False)
    module = Drawing()
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy="unicron", accelerator="cpu", devices=1, default_root_dir=folder, **settings)
    samples: Any = [torch.tensor([float(number)]) for number in range(4)]
    getattr(trainer, name)(module, DataLoader(samples, num_workers=workers))
    return module


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_numbers_are_those_of_the_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another rank runs a batch after other ones, with samples that were read ahead or not."""
    one = run(name, tmp_path, 0)
    monkeypatch.setattr(passes, "plan_rows", lambda *_, **__: RowPlan(calls=((3, 2, 1, 0),), lost=()))
    other = run(name, tmp_path, 1)
    assert list(one.drawn) == [0, 1, 2, 3] and list(other.drawn) == [3, 2, 1, 0]
    assert one.drawn == other.drawn and one.hooks == other.hooks
    assert len({*one.drawn.values(), *one.hooks}) == 6
