"""Predicts as tests/system/predicting.py does, with a sharded model.

FOLDER/after: it dies after its forward. FOLDER/slices: the two workers of a replica are one lane.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from system.predicting import Line, main
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from unicron_lightning import UnicronFSDPStrategy


class Sharded(Line):
    """A layer of known parameters, half on each worker; the predictions are the samples."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.layer = nn.Linear(1, 4)
        nn.init.constant_(self.layer.weight, 2.0)
        nn.init.constant_(self.layer.bias, 1.0)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh["tensor_parallel"].size() > 1 and not isinstance(self.layer, FSDPModule):
            plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            self.layer = parallelize_module(self.layer, mesh["tensor_parallel"], plan)
            fully_shard(self.layer, mesh=mesh["data_parallel"])

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> Tensor:
        late = (self.folder / "after").exists()
        if not late:
            self.die(batch_idx, dataloader_idx)
        columns = (self.layer(batch[0]) - 1.0) / 2.0
        if late:
            self.die(batch_idx, dataloader_idx)
        if isinstance(columns, DTensor):
            assert columns.to_local().shape[-1] == 2
            return columns.sum(-1) / 4  # of all parts
        assert torch.equal(columns, batch[0].expand_as(columns))
        found: Tensor = columns[:, -1]
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


if __name__ == "__main__":
    sizes = (1, 2) if Path(sys.argv[1], "slices").exists() else (2, 1)
    main(Sharded, UnicronFSDPStrategy(shard_size=sizes[0], tensor_parallel_size=sizes[1]), 4)
