"""Scenarios of several loaders that are read at once, some of them streams."""

from __future__ import annotations

from typing import Any

from conformance.data import Seeing, Stream
from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader


@scenario(
    cycle={"mode": "max_size_cycle"},
    cycle_of_stream={"mode": "max_size_cycle", "long": 4},
    longest={"mode": "max_size"},
    longest_stream={"mode": "max_size", "long": 4},
    shortest={"mode": "min_size"},
    shortest_stream={"mode": "min_size", "stream": 4},
    limited={"mode": "max_size_cycle", "limit_train_batches": 4},
    limited_shortest={"mode": "min_size", "limit_train_batches": 4},
    workers={"mode": "max_size_cycle", "num_workers": 1},
    divided={"mode": "max_size_cycle", "limit_train_batches": 0.5},
    overfitted={"mode": "max_size_cycle", "overfit_batches": 2},
    interval={"mode": "max_size_cycle", "val_check_interval": 2},
)
def loaders_with_a_stream(
    lab: Lab, mode: Any, long: int = 12, stream: int = 8, num_workers: int = 0, **settings: Any
) -> None:
    options: Any = {"batch_size": 2, "num_workers": num_workers}
    several = {"indexed": loader(long, **options), "stream": DataLoader(Stream(stream), **options)}
    trainer = lab.trainer(**{"num_sanity_val_steps": 0} | settings)
    trainer.fit(Seeing(lab), CombinedLoader(several, mode), loader(4))
    lab.see(kinds=[type(each).__name__ for each in trainer.train_dataloader.values()])


@scenario(
    outer={"mode": "min_size"},
    longest={"mode": "max_size"},
    cycle={"mode": "max_size_cycle"},
)
def combined_validation(lab: Lab, mode: str) -> None:
    class Combined(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            lab.see(**{f"sizes{batch_idx}": [0 if each is None else len(each[0]) for each in batch]})

    lab.trainer().validate(Combined(), CombinedLoader([loader(4), loader(6)], mode), verbose=False)


@scenario(
    shortest={"mode": "min_size"},
    longest={"mode": "max_size"},
    cycle={"mode": "max_size_cycle"},
    test={"mode": "max_size_cycle", "run": "test"},
    limited={"mode": "max_size", "limit_val_batches": 2},
    share={"mode": "max_size", "limit_val_batches": 0.5},
    stream={"mode": "max_size", "stream": True},
    stream_shortest={"mode": "min_size", "stream": True},
    stream_cycle={"mode": "max_size_cycle", "stream": True},
    stream_limited={"mode": "max_size_cycle", "stream": True, "limit_val_batches": 4},
    fit={"mode": "min_size", "run": "fit"},
    stream_fit={"mode": "max_size_cycle", "stream": True, "run": "fit"},
    single={"mode": "min_size", "number": 1},
)
def evaluation_of_loaders_at_once(
    lab: Lab, mode: Any, run: str = "validate", stream: bool = False, number: int = 2, **settings: Any
) -> None:
    class Combined(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append([batch_idx, {name: part and part[0].tolist() for name, part in batch.items()}])
            for name, part in batch.items():
                if part is not None:
                    self.log(name, self.loss(part), batch_size=len(part[0]))
                    self.log(f"{name}_sum", part[0].sum(), reduce_fx="sum", on_step=True, on_epoch=True)

        test_step = validation_step

    seen: list[Any] = []
    several = {"long": loader(12), "short": DataLoader(Stream(8), batch_size=2) if stream else loader(8)}
    combined = CombinedLoader(dict(list(several.items())[:number]), mode)
    trainer, module = lab.trainer(**settings), Combined()
    trainer.fit(module, loader(), combined) if run == "fit" else getattr(trainer, run)(module, combined, verbose=False)
    lab.see(seen=seen)
