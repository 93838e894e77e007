"""Scenarios of callbacks other than those of checkpoints and early ends."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from conformance.lab import Lab
from conformance.logged import Memory
from conformance.net import Net, loader
from conformance.table import scenario
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    TQDMProgressBar,
    WeightAveraging,
)
from torch import nn


class Deep(Net):
    """A module with a backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.backbone(x))

    def configure_optimizers(self) -> Any:
        used = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(used, lr=0.05)


class Normed(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@scenario(
    epoch={"swa_lrs": 0.01, "swa_epoch_start": 1},
    share={"swa_lrs": 0.01, "swa_epoch_start": 0.5},
    annealed={"swa_lrs": 0.01, "swa_epoch_start": 1, "annealing_epochs": 2},
    linear={"swa_lrs": 0.01, "swa_epoch_start": 1, "annealing_strategy": "linear"},
    list={"swa_lrs": [0.01], "swa_epoch_start": 1},
    wrong_rate={"swa_lrs": "high"},
    wrong_start={"swa_lrs": 0.1, "swa_epoch_start": 1.5},
    wrong_strategy={"swa_lrs": 0.1, "annealing_strategy": "steps"},
    norms={"swa_lrs": 0.01, "swa_epoch_start": 1, "module": Normed},
)
def stochastic_weight_averaging(lab: Lab, module: Any = Deep, **options: Any) -> None:
    lab.trainer(StochasticWeightAveraging(**options), max_epochs=4).fit(module())


@scenario(
    steps={"made": lambda: EMAWeightAveraging(decay=0.8)},
    every_second={"made": lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2)},
    from_step={"made": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=3)},
    from_epoch={"made": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_epoch=1)},
    plain={"made": lambda: WeightAveraging()},
)
def weight_averaging(lab: Lab, made: Any) -> None:
    callback = ModelCheckpoint(lab.folder / "c", save_top_k=-1)
    trainer = lab.trainer(made(), callback, enable_checkpointing=True)
    trainer.fit(Deep())
    lab.meet()
    files = sorted(Path(lab.folder / "c").glob("*.ckpt"))
    lab.see(states=[torch.load(path, weights_only=False)["state_dict"] for path in files])


@scenario()
def weight_averaging_resumed(lab: Lab) -> None:
    first = lab.trainer(EMAWeightAveraging(decay=0.8), max_epochs=1)
    first.fit(Deep())
    first.save_checkpoint("a.ckpt")
    lab.trainer(EMAWeightAveraging(decay=0.8), max_epochs=3).fit(Deep(), ckpt_path="a.ckpt")


class Unfreezing(BaseFinetuning):
    def __init__(self, at: int = 1) -> None:
        super().__init__()
        self.at = at

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.at:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


@scenario(first={"at": 0}, second={"at": 1}, never={"at": 9}, norms={"at": 1, "module": Normed})
def finetuning(lab: Lab, at: int, module: Any = Deep) -> None:
    trainer = lab.trainer(Unfreezing(at), max_epochs=3)
    trainer.fit(module())
    lab.see(groups=[[len(group["params"]), group["lr"]] for group in trainer.optimizers[0].param_groups])


@scenario(
    plain={},
    ratio={"backbone_initial_ratio_lr": 0.1},
    rate={"backbone_initial_lr": 0.02},
    unaligned={"should_align": False},
    verbose={"verbose": True},
    norms={"train_bn": False, "module": Normed},
)
def backbone_finetuning(lab: Lab, module: Any = Deep, **options: Any) -> None:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, **options)
    trainer = lab.trainer(callback, max_epochs=4)
    trainer.fit(module())
    lab.see(groups=[[len(group["params"]), group["lr"]] for group in trainer.optimizers[0].param_groups])


@scenario()
def backbone_finetuning_without_backbone(lab: Lab) -> None:
    lab.trainer(BackboneFinetuning()).fit(Net())


@scenario()
def finetuning_resumed(lab: Lab) -> None:
    first = lab.trainer(Unfreezing(), max_epochs=2)
    first.fit(Deep())
    first.save_checkpoint("a.ckpt")
    lab.trainer(Unfreezing(), max_epochs=3).fit(Deep(), ckpt_path="a.ckpt")


@scenario(
    random={"pruning_fn": "random_unstructured", "amount": 0.5},
    smallest={"pruning_fn": "l1_unstructured", "amount": 0.5},
    everywhere={"pruning_fn": "l1_unstructured", "amount": 2, "use_global_unstructured": True},
    kept={"pruning_fn": "l1_unstructured", "amount": 0.5, "make_pruning_permanent": False},
    lottery={"pruning_fn": "l1_unstructured", "amount": 0.5, "use_lottery_ticket_hypothesis": True},
    verbose={"pruning_fn": "l1_unstructured", "amount": 0.5, "verbose": 2},
    unknown={"pruning_fn": "none"},
)
def pruning(lab: Lab, **options: Any) -> None:
    module = Deep()
    parameters = [(module.backbone[0], "weight"), (module.backbone[2], "weight")]
    lab.trainer(ModelPruning(parameters_to_prune=parameters, **options)).fit(module)
    zeros = [int((parameter == 0).sum()) for parameter in module.backbone.parameters()]
    lab.see(zeros=zeros if options["pruning_fn"] != "random_unstructured" else len(zeros))


@scenario()
def lambdas(lab: Lab) -> None:
    calls: list[Any] = []
    names = ("setup", "on_train_start", "on_train_batch_end", "on_train_epoch_end", "on_fit_end", "teardown")
    hooks = {name: lambda *about, _name=name, **more: calls.append([_name, len(about), sorted(more)]) for name in names}
    lab.trainer(LambdaCallback(**hooks)).fit(Net())
    lab.see(calls=calls)


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.calls: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.calls.append(["batch", prediction.tolist(), batch_indices, batch_idx, dataloader_idx])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.calls.append(["epoch", [each.tolist() for each in predictions], batch_indices])


@scenario(
    batch={"interval": "batch"},
    epoch={"interval": "epoch"},
    both={"interval": "batch_and_epoch"},
    wrong={"interval": "x"},
)
def prediction_writer(lab: Lab, interval: str) -> None:
    writer = Writer(interval)
    lab.trainer(writer).predict(Net(), return_predictions=False)
    lab.see(calls=writer.calls)


@scenario(limited={"limit_predict_batches": 2}, shuffled={"shuffle": True})
def prediction_writer_indices(lab: Lab, shuffle: bool = False, **settings: Any) -> None:
    writer = Writer("batch_and_epoch")
    lab.trainer(writer, **settings).predict(Net(), loader(6, sampler=[3, 1, 2, 0, 5]) if shuffle else None)
    lab.see(calls=writer.calls)


class Bar(ProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.on = True

    def disable(self) -> None:
        self.on = False

    def enable(self) -> None:
        self.on = True

    def on_train_batch_end(self, trainer: Any, module: Any, *about: Any) -> None:
        self.seen.append([self.total_train_batches, self.total_val_batches, sorted(self.get_metrics(trainer, module))])

    def on_validation_batch_end(self, trainer: Any, module: Any, *about: Any) -> None:
        self.seen.append([self.total_val_batches_current_dataloader, self.has_dataloader_changed(0)])


@scenario()
def own_bar(lab: Lab) -> None:
    bar = Bar()
    trainer = lab.trainer(bar, enable_progress_bar=True)
    trainer.fit(Net())
    lab.see(seen=bar.seen, on=bar.on, bar=trainer.progress_bar_callback is bar)


@scenario(one={"rate": 1}, three={"rate": 3}, never={"rate": 0}, large={"rate": 100}, leave={"leave": True})
def tqdm_bar(lab: Lab, rate: int = 1, **options: Any) -> None:
    totals: list[Any] = []

    class Counting(TQDMProgressBar):
        def on_train_batch_end(self, *about: Any) -> None:
            super().on_train_batch_end(*about)
            totals.append(["train", self.train_progress_bar.n, self.train_progress_bar.total])

        def on_validation_batch_end(self, *about: Any) -> None:
            super().on_validation_batch_end(*about)
            totals.append(["val", self.val_progress_bar.n, self.val_progress_bar.total])

        def on_test_batch_end(self, *about: Any) -> None:
            super().on_test_batch_end(*about)
            totals.append(["test", self.test_progress_bar.n, self.test_progress_bar.total])

        def on_predict_batch_end(self, *about: Any) -> None:
            super().on_predict_batch_end(*about)
            totals.append(["predict", self.predict_progress_bar.n, self.predict_progress_bar.total])

    trainer = lab.trainer(Counting(refresh_rate=rate, **options), enable_progress_bar=True)
    trainer.fit(Net())
    trainer.test(Net(), verbose=False)
    trainer.predict(Net())
    lab.see(totals=totals)


@scenario(one={"rate": 1}, leave={"rate": 1, "leave": True}, never={"rate": 0})
def rich_bar(lab: Lab, rate: int, **options: Any) -> None:
    totals: list[Any] = []

    class Counting(RichProgressBar):
        def on_train_batch_end(self, *about: Any) -> None:
            super().on_train_batch_end(*about)
            if self.progress is not None and self.train_progress_bar_id is not None:
                task = self.progress.tasks[-1]
                totals.append([task.completed, task.total])

    trainer = lab.trainer(Counting(refresh_rate=rate, **options), enable_progress_bar=True)
    trainer.fit(Net())
    trainer.validate(Net(), verbose=False)
    lab.see(totals=totals)


@scenario()
def two_bars(lab: Lab) -> None:
    lab.trainer(TQDMProgressBar(), RichProgressBar(), enable_progress_bar=True)


@scenario()
def bar_though_disabled(lab: Lab) -> None:
    lab.trainer(TQDMProgressBar())


@scenario(one={"depth": 1}, all={"depth": -1}, none={"depth": 0}, wrong={"depth": "all"})
def model_summary(lab: Lab, depth: Any) -> None:
    class Example(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.ones(2, 3)

    printed = io.StringIO()
    with redirect_stdout(printed):
        lab.trainer(ModelSummary(max_depth=depth), enable_model_summary=True).fit(Example())
    lab.see(printed=printed.getvalue())


@scenario()
def rich_summary(lab: Lab) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        lab.trainer(RichModelSummary(max_depth=2), enable_model_summary=True).fit(Deep())
    lab.see(printed=printed.getvalue())


@scenario(default={}, lengths={"length_fn": lambda batch: 3}, window={"window_size": 3})
def throughput(lab: Lab, **options: Any) -> None:
    memory = Memory()
    used = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), **options)
    lab.trainer(used, logger=memory, log_every_n_steps=2).fit(Net())
    steady = ("batches", "samples", "lengths")
    found = [
        [row[1], row[2]] for row in memory.rows if row[0] == "metrics" and any("device" in name for name in row[2])
    ]
    lab.see(names=[[step, sorted(row)] for step, row in found])
    lab.see(values=[{name: value for name, value in row.items() if name.endswith(steady)} for _, row in found])


@scenario(default={"cpu": None}, on={"cpu": True}, off={"cpu": False})
def device_stats(lab: Lab, cpu: bool | None) -> None:
    memory = Memory()
    lab.trainer(DeviceStatsMonitor(cpu_stats=cpu), logger=memory, log_every_n_steps=2).fit(Net())
    lab.see(rows=[[row[1], sorted(row[2])] for row in memory.rows if row[0] == "metrics"])


@scenario()
def device_stats_without_logger(lab: Lab) -> None:
    lab.trainer(DeviceStatsMonitor()).fit(Net())


@scenario(
    found={"warmup": 3, "window": 3},
    absolute={"warmup": 3, "rtol": None, "atol": 100.0},
    late={"warmup": 50},
    maximum={"warmup": 3, "mode": "max"},
    infinite={"warmup": 3, "finite_only": False},
)
def spikes(lab: Lab, **options: Any) -> None:
    from lightning.pytorch.callbacks.spike import SpikeDetection

    class Spiking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * (1e6 if self.global_step == 8 else 1.0)

    path = str(lab.folder / "excluded.json")
    used = SpikeDetection(exclude_batches_path=path, **options)
    lab.trainer(used).fit(Spiking())


@scenario(
    exponential={"mode": "exponential"},
    linear={"mode": "linear"},
    kept={"update_attr": False},
    early={"early_stop_threshold": 1.5},
    few={"num_training_steps": 5},
    none={"num_training_steps": 0},
    wrong={"mode": "steps"},
)
def rate_finder(lab: Lab, **options: Any) -> None:
    class Tuned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.05

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Tuned()
    finder = LearningRateFinder(**{"num_training_steps": 12, "max_lr": 0.1} | options)
    lab.trainer(finder).fit(module)
    lab.see(rate=module.lr, results=None if finder.optimal_lr is None else finder.optimal_lr.results)


class Order(Callback):
    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls = name, calls

    def on_train_start(self, *about: Any) -> None:
        self.calls.append(self.name)


@scenario()
def order_of_callbacks(lab: Lab) -> None:
    calls: list[Any] = []

    class Configured(Net):
        def configure_callbacks(self) -> Any:
            return [Order("module", calls), EarlyStopping("val_loss", patience=7)]

    used = [Order("first", calls), ModelCheckpoint(lab.folder), EarlyStopping("loss"), Order("second", calls)]
    trainer = lab.trainer(*used, enable_checkpointing=True)
    trainer.fit(Configured())
    lab.see(calls=calls, order=[type(each).__name__ for each in trainer.callbacks])
    lab.see(patience=[each.patience for each in trainer.early_stopping_callbacks])


@scenario()
def one_callback_instead_of_a_list(lab: Lab) -> None:
    class Configured(Net):
        def configure_callbacks(self) -> Any:
            return EarlyStopping("val_loss")

    lab.trainer().fit(Configured())


@scenario()
def not_a_callback(lab: Lab) -> None:
    lab.trainer(3)  # type: ignore[arg-type]


@scenario()
def state_of_a_callback_that_is_not_plain(lab: Lab) -> None:
    class Keeping(Callback):
        def state_dict(self) -> Any:
            return {"of": Net}

        def load_state_dict(self, state: Any) -> None:
            lab.see(loaded=state["of"].__name__)

    lab.trainer(Keeping()).fit(Net())
