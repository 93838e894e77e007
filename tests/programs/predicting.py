"""Predictions, each run under Lightning's ddp and under unicron, and their compared results.

As a script, under torchrun: ``predicting.py STRATEGY OUT CASE...`` writes what each rank has got, per case and rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.data import sized_len
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs.stream_worker import Numbers

DEVICES = 2
CASES: dict[str, dict[str, Any]] = {
    "even": {"sizes": (32,)},
    "uneven": {"sizes": (45,)},
    "several": {"sizes": (21, 34)},
    "limited": {"sizes": (45, 45), "limit_predict_batches": 3},
    "fraction": {"sizes": (45,), "limit_predict_batches": 0.5},
    "drop_last": {"sizes": (30,), "loader": {"drop_last": True}},
    "workers": {"sizes": (45,), "loader": {"num_workers": 2}},
    "batches": {"sizes": (45,), "interval": "batch", "returned": False},
    "epoch": {"sizes": (45, 23), "interval": "epoch", "returned": False},
    "nothing": {"sizes": (45,), "interval": "batch", "returned": False, "silent": True},
    "stream": {"sizes": (45,), "stream": True},
    "streams": {"sizes": (21, 34), "stream": True, "loader": {"num_workers": 2}},
    "limited_stream": {"sizes": (45, 9), "stream": True, "limit_predict_batches": 3},
    "written_stream": {"sizes": (46,), "stream": True, "interval": "batch", "returned": False},
    "epoch_of_streams": {"sizes": (46, 23), "stream": True, "interval": "epoch", "returned": False},
}


class Stream(Numbers):
    """Numbers as samples of a `TensorDataset`."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((number.float().unsqueeze(0),) for number in super().__iter__())


class Predicting(pl.LightningModule):
    """Predicts the samples' own numbers, and records all hooks."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.silent = silent
        self.hooks: list[tuple[Any, ...]] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        assert not torch.is_grad_enabled() and not self.training
        self.hooks.append(("step", batch_idx, dataloader_idx))
        return None if self.silent else {"number": batch[0].flatten() + 1000 * dataloader_idx}

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooks.append(("start", batch_idx, dataloader_idx, batch[0].flatten().tolist()))

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooks.append(("end", batch_idx, dataloader_idx, plain(outputs)))

    def on_predict_epoch_start(self) -> None:
        self.hooks.append(("epoch_start",))

    def on_predict_epoch_end(self) -> None:
        self.hooks.append(("epoch_end",))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Writer(BasePredictionWriter):
    """Keeps what a writer receives."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.written.append((plain(prediction), list(batch_indices), batch_idx, loader))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written.append((plain(predictions), batch_indices))


def plain(value: Any) -> Any:
    """Tensors as lists, at any depth."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def numbers(size: int, *, stream: bool = False, **settings: Any) -> DataLoader[Any]:
    data: Any = Stream(size) if stream else TensorDataset(torch.arange(float(size)).unsqueeze(1))
    return DataLoader(data, **{"batch_size": 4} | settings)


def predict(name: str, strategy: Any, folder: Path, fits: bool = False) -> dict[str, Any]:
    """Predict a case, after a fit or alone."""
    case = CASES[name]
    writer = Writer(case["interval"]) if "interval" in case else None
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=DEVICES,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        max_epochs=1,
        callbacks=[] if writer is None else [writer],
        limit_predict_batches=case.get("limit_predict_batches"),
    )
    module = Predicting(case.get("silent", False))
    if fits:
        trainer.fit(module, numbers(16))
    loaders = [numbers(size, stream=case.get("stream", False), **case.get("loader", {})) for size in case["sizes"]]
    given = loaders[0] if len(loaders) == 1 else loaders
    returned = trainer.predict(module, given, return_predictions=case.get("returned"))
    shown: Any = trainer.predict_dataloaders
    return {
        "returned": plain(returned),
        "hooks": module.hooks,
        "written": None if writer is None else writer.written,
        "training": module.training,
        "shown": [sized_len(each) for each in ([shown] if len(loaders) == 1 else shown)],
        "sequential": isinstance(loaders[0].sampler, SequentialSampler),
    }


def main() -> None:
    strategy, out, *names = sys.argv[1:]
    Path(out).mkdir(exist_ok=True)
    for name in names:
        result = predict(name, strategy, Path(out), fits=name == "several")
        torch.save(result, Path(out) / f"{name}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
