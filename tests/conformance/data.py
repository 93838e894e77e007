"""Scenarios of data: loaders, data modules, samplers, batches and their transfer."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from conformance.lab import Lab
from conformance.net import Net, dataset, loader, processes
from conformance.table import scenario
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, DemoModel, ManualOptimBoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Seeing(Net):
    """Records the samples of each step."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.checked: list[Any] = []
        lab.record["seen"], lab.record["checked"] = self.seen, self.checked

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [each for each in (batch.values() if isinstance(batch, dict) else batch) if isinstance(each, list)]
        self.seen.append([batch_idx, [each[0][:, 0].tolist() for each in parts or [batch]]])
        return super().training_step((parts or [batch])[0], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.checked.append([batch_idx, dataloader_idx, batch[0][:, 0].tolist()])
        self.log("val_loss", self.loss(batch))


class Stream(IterableDataset):
    def __init__(self, number: int = 12, sized: bool = False) -> None:
        self.data = dataset(number)
        if sized:
            self.__class__ = type("Sized", (Stream,), {"__len__": lambda self: len(self.data)})

    def __iter__(self) -> Any:
        return iter([self.data[number] for number in range(len(self.data))])


class Batches:
    """Yields batches, and is no `DataLoader`."""

    def __iter__(self) -> Any:
        return iter(loader(6))

    def __len__(self) -> int:
        return len(loader(6))


LOADERS: dict[str, Any] = {
    "uneven": lambda: loader(11),
    "drop_last": lambda: loader(11, drop_last=True),
    "one_sample": lambda: loader(1),
    "large_batch": lambda: loader(12, batch_size=50),
    "one_by_one": lambda: loader(5, batch_size=1),
    "sampler": lambda: loader(12, sampler=[3, 1, 2, 0, 7]),
    "sequential": lambda: loader(12, sampler=SequentialSampler(dataset())),
    "batch_sampler": lambda: DataLoader(dataset(), batch_sampler=BatchSampler(SequentialSampler(dataset()), 5, False)),
    "batch_list": lambda: DataLoader(dataset(), batch_sampler=[[0, 1], [5], [7, 8, 9]]),
    "generator": lambda: loader(12, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "random_sampler": lambda: loader(12, sampler=RandomSampler(dataset(), generator=torch.Generator().manual_seed(3))),
    "subset": lambda: DataLoader(Subset(dataset(), range(1, 8 * processes(), 2)), batch_size=2),
    "subset_sampler": lambda: loader(12, sampler=SubsetRandomSampler([1, 3, 5], torch.Generator().manual_seed(2))),
    "weighted": lambda: loader(
        12, sampler=WeightedRandomSampler([1.0] * 12, 6, generator=torch.Generator().manual_seed(2))
    ),
    "workers": lambda: loader(12, num_workers=1),
    "workers_kept": lambda: loader(12, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "stream_uneven": lambda: DataLoader(Stream(11), batch_size=2),
    "stream_drop_last": lambda: DataLoader(Stream(11), batch_size=2, drop_last=True),
    "stream_sized": lambda: DataLoader(Stream(11, sized=True), batch_size=2),
    "list": lambda: Batches(),
    "several": lambda: [loader(6), loader(4)],
    "several_dict": lambda: {"a": loader(6), "b": loader(4)},
    "combined_cycle": lambda: CombinedLoader([loader(6), loader(4)], "max_size_cycle"),
    "combined_sequential": lambda: CombinedLoader([loader(6), loader(4)], "sequential"),
    "collate": lambda: loader(
        12, collate_fn=lambda samples: [torch.stack(each) for each in zip(*samples, strict=True)]
    ),
    "empty": lambda: DataLoader([], batch_size=2),
    "none": lambda: None,
    "number": lambda: 3,
}


@scenario(**{name: {"made": made} for name, made in LOADERS.items()})
def training_loader(lab: Lab, made: Any) -> None:
    lab.trainer(num_sanity_val_steps=0).fit(Seeing(lab), made())


ALIKE = ("none", "random_sampler", "subset_sampler", "weighted", "combined_cycle")
EVALUATED = [name for name in LOADERS if name not in ALIKE]


@scenario(**{name: {"made": LOADERS[name]} for name in EVALUATED})
def validation_loader(lab: Lab, made: Any) -> None:
    lab.see(results=lab.trainer().validate(Seeing(lab), made(), verbose=False))


@scenario(**{name: {"made": LOADERS[name]} for name in EVALUATED})
def prediction_loader(lab: Lab, made: Any) -> None:
    lab.see(results=lab.trainer().predict(Net(), made()))


@scenario(reference="ddp", shuffled={"shuffle": True}, ordered={"shuffle": False})
def order_of_ddp(lab: Lab, shuffle: bool) -> None:
    """The order of Lightning's distributed sampler, which shuffles all training data."""
    lab.trainer(use_distributed_sampler=True, max_epochs=3).fit(Seeing(lab), loader(12, shuffle=shuffle))


BATCHES: dict[str, Any] = {
    "tensor": lambda x, y: x,
    "tuple": lambda x, y: (x, y),
    "dict": lambda x, y: {"x": x, "y": y},
    "nested": lambda x, y: {"x": [x, {"y": y}]},
    "with_text": lambda x, y: {"x": x, "name": "a"},
    "with_number": lambda x, y: {"x": x, "n": 3},
    "named": lambda x, y: Named(x, y),
    "data_class": lambda x, y: Kept(x, y),
    "object": lambda x, y: Moving(x),
}
Named = namedtuple("Named", "x y")


@dataclass
class Kept:
    x: Any
    y: Any


class Moving:
    """A batch with a method of its own for its transfer."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, *about: Any, **options: Any) -> Moving:
        return self


class Samples(Dataset):
    def __init__(self, of: Any) -> None:
        self.data, self.of = dataset(8), of

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> Any:
        return self.of(*self.data[number])


@scenario(**{name: {"of": of} for name, of in BATCHES.items()})
def kind_of_batch(lab: Lab, of: Any) -> None:
    class Taking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            lab.see(**{f"batch{self.current_epoch}_{batch_idx}": type(batch).__name__})
            x = batch
            while not isinstance(x, torch.Tensor):
                x = x["x"] if isinstance(x, dict) else x.x if hasattr(x, "x") else x[0]
            self.log("mean", x.mean(), on_epoch=True)
            return self(x).square().mean()

    collate = (lambda samples: samples[0]) if of in (BATCHES["data_class"], BATCHES["object"]) else None
    lab.trainer(limit_val_batches=0).fit(Taking(), DataLoader(Samples(of), batch_size=2, collate_fn=collate))


class Data(pl.LightningDataModule):
    """Records its hooks."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.calls: list[Any] = []
        lab.record["data_calls"] = self.calls

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return loader(12)

    def val_dataloader(self) -> Any:
        self.calls.append("val_dataloader")
        return loader(6)

    def test_dataloader(self) -> Any:
        self.calls.append("test_dataloader")
        return loader(6)

    def predict_dataloader(self) -> Any:
        self.calls.append("predict_dataloader")
        return loader(6)


for _name in ("prepare_data", "setup", "teardown", "on_exception", "state_dict", "load_state_dict"):

    def _hook(self: Any, *args: Any, _name: str = _name, **kwargs: Any) -> Any:
        self.calls.append([_name, *map(str, [*args, *kwargs.values()])] if _name in ("setup", "teardown") else [_name])
        return {} if _name == "state_dict" else None

    setattr(Data, _name, _hook)


@scenario(
    fit={"run": "fit"},
    validate={"run": "validate"},
    test={"run": "test"},
    predict={"run": "predict"},
)
def data_module(lab: Lab, run: str) -> None:
    data, trainer = Data(lab), lab.trainer()
    getattr(trainer, run)(Net(), datamodule=data)
    lab.see(same=trainer.datamodule is data, linked=data.trainer is trainer)


@scenario()
def data_module_in_turn(lab: Lab) -> None:
    data, trainer, module = Data(lab), lab.trainer(), Net()
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)


@scenario()
def data_module_on_exception(lab: Lab) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    lab.trainer().fit(Failing(), datamodule=Data(lab))


@scenario()
def data_module_and_loader(lab: Lab) -> None:
    lab.trainer().fit(Net(), loader(), datamodule=Data(lab))


@scenario()
def data_module_of_sets(lab: Lab) -> None:
    data = pl.LightningDataModule.from_datasets(dataset(), dataset(6), dataset(6), batch_size=3, num_workers=0)
    lab.trainer(use_distributed_sampler=False).fit(
        Net(),
        datamodule=pl.LightningDataModule.from_datasets(None, dataset(6), dataset(6), batch_size=3, num_workers=0),
    )
    lab.see(made=data is not None)


@scenario()
def data_module_wrong(lab: Lab) -> None:
    lab.trainer().fit(Net(), datamodule=3)


@scenario()
def data_module_as_loader(lab: Lab) -> None:
    lab.trainer().fit(Net(), Data(lab))


@scenario()
def prepare_once(lab: Lab) -> None:
    class Preparing(Net):
        prepared = 0

        def prepare_data(self) -> None:
            self.prepared += 1

    module = Preparing()
    lab.trainer().fit(module)
    lab.see(prepared=module.prepared)


TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@scenario(fit={"run": "fit"}, validate={"run": "validate"}, test={"run": "test"}, predict={"run": "predict"})
def transfer_hooks(lab: Lab, run: str) -> None:
    calls: list[Any] = []

    class Moved(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(["before", dataloader_idx])
            return [batch[0] * 2, batch[1]]

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            calls.append(["transfer", str(device), dataloader_idx])
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(["after", dataloader_idx])
            return [batch[0] + 1, batch[1]]

    lab.see(
        result=getattr(lab.trainer(num_sanity_val_steps=0, limit_val_batches=0 if run == "fit" else 1.0), run)(Moved())
    )
    lab.see(calls=calls)


@scenario(fit={"run": "fit"}, test={"run": "test"})
def transfer_hooks_of_data_module(lab: Lab, run: str) -> None:
    class Moving(Data):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 1, batch[1]]

    getattr(lab.trainer(), run)(Net(), datamodule=Moving(lab))


@scenario(each={"every": 1}, second={"every": 2}, third={"every": 3})
def reloading(lab: Lab, every: int) -> None:
    calls: list[Any] = []

    class Reloading(Net):
        def train_dataloader(self) -> Any:
            calls.append(["train", self.trainer.current_epoch])
            return loader(12)

        def val_dataloader(self) -> Any:
            calls.append(["val", self.trainer.current_epoch])
            return loader(6)

    lab.trainer(reload_dataloaders_every_n_epochs=every, max_epochs=4).fit(Reloading())
    lab.see(calls=calls)


@scenario()
def loaders_of_trainer(lab: Lab) -> None:
    class Looking(Net):
        def on_train_start(self) -> None:
            lab.see(train=len(self.trainer.train_dataloader), val=len(self.trainer.val_dataloaders))
            lab.see(kinds=[type(self.trainer.train_dataloader).__name__, type(self.trainer.val_dataloaders).__name__])
            lab.see(size=self.trainer.train_dataloader.batch_size, number=self.trainer.num_training_batches)

        def on_test_start(self) -> None:
            lab.see(test=len(self.trainer.test_dataloaders))

    trainer = lab.trainer()
    trainer.fit(Looking())
    trainer.test(Looking(), verbose=False)


@scenario()
def no_training_step(lab: Lab) -> None:
    class Without(pl.LightningModule):
        def configure_optimizers(self) -> Any:
            return None

    lab.trainer().fit(Without(), loader())


@scenario(
    step={"without": "validation_step"},
    loader={"without": "val_dataloader"},
    train={"without": "train_dataloader"},
    optimizers={"without": "configure_optimizers"},
    training={"without": "training_step"},
)
def missing_hook(lab: Lab, without: str) -> None:
    module = type("Without", (Net,), {without: getattr(pl.LightningModule, without)})()
    lab.trainer().fit(module)


@scenario(
    test={"run": "test", "without": "test_step"},
    validate={"run": "validate", "without": "validation_step"},
    predict={"run": "predict", "without": "predict_step"},
    test_loader={"run": "test", "without": "test_dataloader"},
    validation_loader={"run": "validate", "without": "val_dataloader"},
    prediction_loader={"run": "predict", "without": "predict_dataloader"},
)
def missing_hook_of_evaluation(lab: Lab, run: str, without: str) -> None:
    module = type("Without", (Net,), {without: getattr(pl.LightningModule, without)})()
    lab.see(result=getattr(lab.trainer(), run)(module))


@scenario(
    no_index={"run": "fit", "name": "training_step", "of": lambda self, batch: self.loss(batch)},
    no_index_validation={"run": "validate", "name": "validation_step", "of": lambda self, batch: None},
    keyword={"run": "validate", "name": "validation_step", "of": lambda self, batch, batch_idx, dataloader_idx=0: None},
    no_index_test={"run": "test", "name": "test_step", "of": lambda self, batch: None},
    no_index_predict={"run": "predict", "name": "predict_step", "of": lambda self, batch: self(batch[0])},
    predict_loader={
        "run": "predict",
        "name": "predict_step",
        "of": lambda self, batch, batch_idx, dataloader_idx: batch_idx,
    },
    predict_none={"run": "predict", "name": "predict_step", "of": lambda self, batch, batch_idx: None},
    variadic={"run": "fit", "name": "training_step", "of": lambda self, *args, **kwargs: self.loss(args[0])},
)
def signatures(lab: Lab, run: str, name: str, of: Any) -> None:
    module = type("Signed", (Net,), {name: of})()
    lab.see(result=getattr(lab.trainer(), run)(module))


@scenario(
    several={"loaders": lambda: [loader(4), loader(6)]},
    dict={"loaders": lambda: {"a": loader(4), "b": loader(6)}},
    zipped={"loaders": lambda: CombinedLoader([loader(4), loader(6)], "min_size")},
)
def predictions_of_several(lab: Lab, loaders: Any) -> None:
    class Predicting(Net):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return [batch_idx, dataloader_idx]

    lab.see(result=lab.trainer().predict(Predicting(), loaders()))


@scenario(kept={"keep": True}, dropped={"keep": False}, default={"keep": None})
def return_predictions(lab: Lab, keep: bool | None) -> None:
    lab.see(result=lab.trainer().predict(Net(), return_predictions=keep))


@scenario(
    boring={"made": BoringModel},
    manual={"made": ManualOptimBoringModel},
)
def demo_modules(lab: Lab, made: Any) -> None:
    torch.manual_seed(1)
    trainer = lab.trainer(limit_train_batches=4, limit_val_batches=2, limit_test_batches=2)
    module = made()
    trainer.fit(module)
    lab.see(tested=trainer.test(module, verbose=False), validated=trainer.validate(module, verbose=False))


@scenario()
def demo_data_module(lab: Lab) -> None:
    torch.manual_seed(1)
    lab.trainer(limit_train_batches=4).fit(BoringModel(), datamodule=BoringDataModule())
    assert DemoModel is not None


@scenario()
def changed_between_fits(lab: Lab) -> None:
    trainer, module = lab.trainer(max_epochs=1), Seeing(lab)
    trainer.fit(module, loader(6))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(8))
