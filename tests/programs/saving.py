"""Train, save to a folder or URL by UnicronCheckpoint, and resume from there: python saving.py PLACE.

Prints, as JSON, the names of checkpoints, and whether a resumed run ends as one that was not interrupted, and whether
plain torch and `unicron export` read the same parameters.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.callbacks import UnicronCheckpoint
from unicron_lightning.fsdp.export import export_checkpoint


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).sub(batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(steps: int, place: str, resume: str | None = None) -> tuple[Regression, UnicronCheckpoint]:
    pl.seed_everything(1, verbose=False)
    saver = UnicronCheckpoint(place, monitor="loss", every_n_train_steps=5, save_last=True)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    data = TensorDataset(torch.randn(400, 8, generator=torch.Generator().manual_seed(0)))
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
    return module, saver


def main() -> None:
    place = sys.argv[1]
    whole, _ = train(20, f"{place}/whole")
    _, saver = train(10, f"{place}/first")
    resumed, _ = train(20, f"{place}/second", saver.last_model_path)
    read = {"state_dict": Regression().state_dict()}
    dcp.load(read, storage_reader=FsspecReader(f"{place}/whole/last.ckpt"))
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "model.safetensors"
        export_checkpoint(f"{place}/whole/last.ckpt", exported)
        single = load_file(exported)
    state = whole.state_dict()
    answer = {
        "saved": [saver.best_model_path, saver.last_model_path],
        "resumed": all(torch.equal(state[name], each) for name, each in resumed.state_dict().items()),
        "read": all(torch.equal(state[name], each) for name, each in read["state_dict"].items()),
        "exported": all(torch.equal(state[name], each) for name, each in single.items()) and len(single) == len(state),
        "names": sorted(path.rsplit("/", 1)[-1] for path in saver._fs.ls(f"{place}/first", detail=False)),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
