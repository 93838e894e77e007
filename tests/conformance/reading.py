"""Scenarios of data that is read once, and of data without an end: how many batches are read, and which."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from conformance.lab import Lab
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset


class Source:
    """Yields numbered batches or samples, and counts those that were read."""

    def __init__(self) -> None:
        self.read = 0

    def batches(self, number: int | None = None) -> Iterator[Any]:
        """Yield batches of two samples, by default without an end."""
        for x, y in self.samples(number):
            yield [torch.stack([x, x + 1]), torch.stack([y, y])]

    def samples(self, number: int | None = None) -> Iterator[Any]:
        """Yield samples, by default without an end."""
        for count in itertools.count() if number is None else range(number):
            self.read += 1
            yield torch.full((3,), 0.1 * count), torch.ones(1)


class Opened:
    """A loader whose iterators are independent of each other, without a length."""

    def __init__(self, source: Source, number: int | None = None) -> None:
        self.source, self.number = source, number

    def __iter__(self) -> Iterator[Any]:
        return self.source.batches(self.number)


class Sized(Opened):
    """The same with a length, which may be a false one."""

    def __init__(self, source: Source, number: int, length: int) -> None:
        super().__init__(source, number)
        self.length = length

    def __len__(self) -> int:
        return self.length


class Itself:
    """An iterator with a length."""

    def __init__(self, items: Iterator[Any], length: int) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Itself:
        return self

    def __next__(self) -> Any:
        return next(self.items)


class Rewound:
    """An iterator that begins again when it is iterated."""

    def __init__(self, source: Source, number: int) -> None:
        self.source, self.number = source, number

    def __iter__(self) -> Rewound:
        self.items = self.source.batches(self.number)
        return self

    def __next__(self) -> Any:
        return next(self.items)


class Samples(IterableDataset):
    """Samples, read once or anew by each iterator."""

    def __init__(self, source: Source, number: int | None, once: bool = False) -> None:
        self.source, self.number = source, number
        self.items = source.samples(number) if once else None

    def __iter__(self) -> Iterator[Any]:
        return self.source.samples(self.number) if self.items is None else self.items


class SizedSamples(Samples):
    """The same with a length."""

    def __len__(self) -> int:
        assert self.number is not None
        return self.number


class Reading(Net):
    """Records each step's samples, and how many batches or samples were read until then.

    In an evaluation of all data Lightning reads a batch ahead, and ``unicron`` does not.
    """

    def __init__(self, lab: Lab, source: Source, counts: bool = True) -> None:
        super().__init__()
        self.source, self.counts = source, counts
        self.steps: list[Any] = []
        lab.record["steps"] = self.steps

    def note(self, name: str, batch: Any, batch_idx: int) -> None:
        """Record a step."""
        parts = batch.values() if isinstance(batch, dict) else [batch]
        seen = [None if part is None else part[0][:, 0].tolist() for part in parts]
        self.steps.append([name, self.current_epoch, batch_idx, self.source.read if self.counts else None, seen])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train", batch, batch_idx)
        return super().training_step(batch["once"] if isinstance(batch, dict) else batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.note(f"val {dataloader_idx}", batch, batch_idx)
        return super().validation_step(batch["once"] if isinstance(batch, dict) else batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("test", batch, batch_idx)
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("predict", batch, batch_idx)
        return super().predict_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self.steps.append(["start", batch_idx, self.source.read, last])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(["end", batch_idx, self.source.read, self.trainer.is_last_batch])


KINDS: dict[str, Any] = {
    "generator": lambda source: source.batches(6),
    "iterator": lambda source: iter([*Source().batches(6)]),
    "itself": lambda source: Itself(source.batches(20), 6),
    "itself_short": lambda source: Itself(source.batches(4), 6),
    "rewound": lambda source: Rewound(source, 6),
    "opened": lambda source: Opened(source, 6),
    "sized": lambda source: Sized(source, 6, 6),
    "sized_long": lambda source: Sized(source, 8, 6),
    "endless": lambda source: source.batches(),
    "endless_opened": lambda source: Opened(source),
    "samples": lambda source: DataLoader(Samples(source, 11), batch_size=2),
    "samples_once": lambda source: DataLoader(Samples(source, 19, once=True), batch_size=2),
    "samples_sized": lambda source: DataLoader(SizedSamples(source, 11), batch_size=2),
    "samples_drop": lambda source: DataLoader(Samples(source, 11, once=True), batch_size=2, drop_last=True),
    "samples_endless": lambda source: DataLoader(Samples(source, None, once=True), batch_size=2),
    "empty": lambda source: source.batches(0),
}
WITHOUT_END = ("endless", "endless_opened", "samples_endless")
LIMITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "limited": {"limit_train_batches": 4, "limit_val_batches": 2, "limit_test_batches": 2, "limit_predict_batches": 2},
    "steps": {"max_steps": 5},
    "share": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
}
WITH_LENGTH = ("itself", "sized", "samples_sized")
TRAININGS = {
    f"{kind}_{limit}": {"kind": kind, **settings}
    for kind in KINDS
    for limit, settings in LIMITS.items()
    if limit in ("limited", "steps")
    or (limit == "whole" and kind not in WITHOUT_END)
    or (limit == "share" and kind in (*WITH_LENGTH, "generator"))
}


@scenario(alone=True, **TRAININGS)
def training(lab: Lab, kind: str, **settings: Any) -> None:
    source = Source()
    lab.trainer(num_sanity_val_steps=0, **settings).fit(Reading(lab, source), KINDS[kind](source), loader(4))
    lab.see(read=source.read)


@scenario(alone=True, **{name: {"kind": name} for name in KINDS if name not in WITHOUT_END})
def evaluation(lab: Lab, kind: str) -> None:
    source = Source()
    trainer, module = lab.trainer(), Reading(lab, source, counts=False)
    data = KINDS[kind](source)
    lab.see(first=trainer.validate(module, data, verbose=False), second=trainer.validate(module, data, verbose=False))
    lab.see(read=source.read)


@scenario(
    alone=True,
    **{name: {"kind": name} for name in KINDS},
    share={"kind": "itself", "limit": 0.5},
    test={"kind": "generator", "run": "test"},
)
def limited_evaluation(lab: Lab, kind: str, run: str = "validate", limit: float = 3) -> None:
    source = Source()
    settings: Any = {"limit_val_batches": limit, "limit_test_batches": limit}
    trainer, module, data = lab.trainer(**settings), Reading(lab, source), KINDS[kind](source)
    for turn in range(2):
        lab.see(**{f"results{turn}": getattr(trainer, run)(module, data, verbose=False), f"read{turn}": source.read})


@scenario(alone=True, **{name: {"kind": name} for name in KINDS})
def prediction(lab: Lab, kind: str) -> None:
    source = Source()
    trainer, module, data = lab.trainer(limit_predict_batches=3), Reading(lab, source), KINDS[kind](source)
    for turn in range(2):
        lab.see(**{f"results{turn}": trainer.predict(module, data), f"read{turn}": source.read})


@scenario(
    alone=True,
    **{
        f"{kind}_{name}": {"kind": kind, **settings}
        for kind in ("generator", "endless")
        for name, settings in {
            "checked": {"limit_val_batches": 2},
            "unchecked": {"limit_val_batches": 2, "num_sanity_val_steps": 0},
            "checked_whole": {"num_sanity_val_steps": -1, "limit_val_batches": 3},
            "interval": {"limit_val_batches": 1, "val_check_interval": 2},
            "overfitted": {"overfit_batches": 2},
            "quick": {"fast_dev_run": 2},
        }.items()
    },
    itself_checked={"kind": "itself", "limit_val_batches": 0.5},
    samples_once_checked={"kind": "samples_once", "limit_val_batches": 2},
    generator_unlimited={"kind": "generator", "counts": False},
)
def validation_in_fit(lab: Lab, kind: str, counts: bool = True, **settings: Any) -> None:
    source, other = Source(), Source()
    trainer = lab.trainer(**{"limit_train_batches": 4} | settings)
    trainer.fit(Reading(lab, source, counts), Opened(other, 5), KINDS[kind](source))
    lab.see(read=[source.read, other.read])


@scenario(
    alone=True,
    **{
        f"{mode}_{name}": {"mode": mode, **settings}
        for mode in ("max_size_cycle", "max_size", "min_size")
        for name, settings in {
            "generator": {"number": 5},
            "short": {"number": 2},
            "limited": {"number": None, "limit_train_batches": 4},
            "steps": {"number": 5, "max_steps": 4},
        }.items()
    },
    min_size_endless={"mode": "min_size", "number": None},
    steps_endless={"mode": "max_size_cycle", "number": None, "max_steps": 4},
)
def several_loaders(lab: Lab, mode: Any, number: int | None, **settings: Any) -> None:
    source = Source()
    several = {"once": source.batches(number), "other": loader(6)}
    lab.trainer(num_sanity_val_steps=0, limit_val_batches=0, **settings).fit(
        Reading(lab, source), CombinedLoader(several, mode)
    )
    lab.see(read=source.read)


@scenario(
    alone=True,
    in_turn={"mode": "sequential"},
    in_turn_limited={"mode": "sequential", "limit_val_batches": 2},
    shortest={"mode": "min_size"},
    longest={"mode": "max_size"},
    limited={"mode": "max_size_cycle", "limit_val_batches": 2},
)
def validation_of_several(lab: Lab, mode: Any, **settings: Any) -> None:
    source = Source()
    several = {"once": source.batches(4), "other": loader(6)}
    trainer, module = lab.trainer(**settings), Reading(lab, source, counts=False)
    combined = CombinedLoader(list(several.values()) if mode == "sequential" else several, mode)
    lab.see(results=trainer.validate(module, combined, verbose=False), read=source.read)


@scenario(
    alone=True,
    rest={"number": 20, "max_steps": 5},
    nothing_left={"number": 4},
    epochs={"number": 20, "limit_train_batches": 3},
    same_trainer={"number": 20, "max_steps": 5, "same": True},
)
def second_fit(lab: Lab, number: int, same: bool = False, **settings: Any) -> None:
    source = Source()
    data, module = source.batches(number), Reading(lab, source)
    first = lab.trainer(limit_val_batches=0, **settings)
    first.fit(module, data)
    if same:
        first.fit_loop.epoch_loop.max_steps = 9
    (first if same else lab.trainer(limit_val_batches=0, **settings)).fit(module, data)
    lab.see(read=source.read)


@scenario(alone=True, each={"every": 1}, second={"every": 2})
def reloaded_generators(lab: Lab, every: int) -> None:
    class Making(Reading):
        def train_dataloader(self) -> Any:
            return source.batches(5)

        def val_dataloader(self) -> Any:
            return source.batches(3)

    source = Source()
    lab.trainer(reload_dataloaders_every_n_epochs=every, max_epochs=3).fit(Making(lab, source))
    lab.see(read=source.read)


@scenario(
    alone=True,
    stopped={"stop": 2},
    skipped={"skip": 2},
    broken={"error": 2},
)
def cut_short(lab: Lab, stop: int = -1, skip: int = -1, error: int = -1) -> None:
    class Cutting(Reading):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == skip else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop |= batch_idx == stop
            if batch_idx == error:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    source = Source()
    trainer, data = lab.trainer(limit_val_batches=0, max_epochs=3), source.batches(20)
    try:
        trainer.fit(Cutting(lab, source), data)
    finally:
        lab.see(read=source.read, rest=len(list(data)))


@scenario(alone=True)
def broken_data(lab: Lab) -> None:
    def breaking() -> Iterator[Any]:
        yield from source.batches(3)
        raise RuntimeError("no more data")

    source = Source()
    lab.trainer(limit_val_batches=0).fit(Reading(lab, source), breaking())


@scenario(alone=True)
def kept_batches(lab: Lab) -> None:
    """A callback reads batches of earlier steps."""

    class Keeping(Callback):
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.kept.append(batch)

    source, keeping = Source(), Keeping()
    lab.trainer(keeping, limit_val_batches=0).fit(Reading(lab, source), source.batches(5))
    lab.see(kept=[batch[0][:, 0] for batch in keeping.kept], read=source.read)


@scenario(alone=True)
def early_stopping(lab: Lab) -> None:
    source = Source()
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    settings: Any = {"max_epochs": -1, "limit_train_batches": 3, "limit_val_batches": 1}
    lab.trainer(stopping, **settings).fit(Reading(lab, source), source.batches(), loader(4))
    lab.see(read=source.read)


@scenario(alone=True)
def manual_optimization(lab: Lab) -> None:
    class Manual(Reading):
        def __init__(self) -> None:
            super().__init__(lab, source)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("train", batch, batch_idx)
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    source = Source()
    lab.trainer(limit_val_batches=0).fit(Manual(), source.batches(5))
    lab.see(read=source.read)


@scenario(alone=True)
def loader_of_trainer(lab: Lab) -> None:
    class Looking(Reading):
        def on_train_start(self) -> None:
            lab.see(same=self.trainer.train_dataloader is data, number=self.trainer.num_training_batches)

    source = Source()
    data = source.batches(4)
    lab.trainer(limit_val_batches=0).fit(Looking(lab, source), data)
