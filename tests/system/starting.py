"""A small training that notes its processes: ``starting.py FOLDER``.

It notes whether torch was there at its first line, and sets a variable between the imports of torch and Lightning if
FOLDER/sets exists.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
HAD_TORCH = "torch" in sys.modules

import torch  # noqa: E402

if (FOLDER / "sets").exists():
    os.environ["HF_HOME"] = "elsewhere"

import lightning.pytorch as pl  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step % 10 == 0:
            note = {"had_torch": HAD_TORCH, "home": os.environ.get("HF_HOME")}
            (FOLDER / f"note-{os.getpid()}").write_text(json.dumps(note))
        self.trainer.should_stop = (FOLDER / "stop").exists()


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="unicron", accelerator="cpu", devices=1, num_nodes=2, max_steps=10**6, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(4000, 8)), batch_size=4))
