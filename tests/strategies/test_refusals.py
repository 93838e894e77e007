"""Training that cannot be exact is refused: one error that quotes the value."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unicron_lightning import Run, environ
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.export import checkpoint_digests
from unicron_lightning.strategies.checks import check_trainer
from unicron_lightning.strategies.collectives.operations import CollectiveInStep
from unicron_lightning.strategies.environment import own_device
from unicron_lightning.strategies.micro_batch import NoLoss
from unicron_lightning.strategies.unicron import UnicronStrategy


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_several_workers_of_a_gpu_are_refused() -> None:
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert own_device(gpus, 1, 2) == gpus[1]
    assert own_device([], 3, 4) == torch.device("cpu")
    assert own_device([torch.device("cpu")], 3, 4) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"started 4 workers on this node .* Trainer\(devices=2\)"):
        own_device(gpus, 0, 4)


def data(number: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(number, 2)), batch_size=2)


def fit(module: Any, loader: Any = None, strategy: Any = "unicron", **settings: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, **{"devices": 1} | quiet | settings)
    trainer.fit(module, loader if loader is not None else data())
    return trainer


def test_what_is_not_refused() -> None:
    assert fit(Small()).global_step == 4


class TwoOptimizers(Small):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]


class Objects(torch.optim.SGD):
    """Keeps state of a class of its own."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["conditioner"] = object()
        return loss


class Conditioned(Small):
    def configure_optimizers(self) -> Any:
        return Objects(self.parameters(), lr=0.1)


class Wordy(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return "a loss"


class Fetching(Small):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


class FetchingPredictions(Small):
    def predict_step(self, dataloader_iter: Any) -> Any:
        return next(dataloader_iter)


class TalkingInValidation(Small):
    def val_dataloader(self) -> Any:
        return data()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.distributed.all_reduce(batch[0])


class TalkingInHooks(TalkingInValidation):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("x", batch[0].mean(), sync_dist=True)

    def on_validation_batch_end(self, *about: Any) -> None:
        self.trainer.strategy.barrier()


class Talking(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.strategy.barrier("here")
        return super().training_step(batch, batch_idx)


class Gathering(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[0])
        return super().training_step(batch, batch_idx)


class Product(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0, reduce_fx=torch.prod)
        return super().training_step(batch, batch_idx)


def test_a_missing_loss_is_also_an_error_of_lightnings() -> None:
    assert issubclass(NoLoss, MisconfigurationException)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (TwoOptimizers, RuntimeError, "multiple optimizers is only supported with manual optimization"),  # Lightning's
        (
            Conditioned,
            ConfigError,
            r"state of the optimizer Objects cannot be sent to joiners.*conditioner.*is a builtin",
        ),
        (Wordy, NoLoss, "training_step returned 'a loss'; expected a loss tensor"),
        (Talking, CollectiveInStep, r"barrier\(\) was called inside training_step"),
        (
            Gathering,
            CollectiveInStep,
            r"all_gather\(\) was called inside training_step.* contrastive loss: a larger batch",
        ),
        (Fetching, ConfigError, r"Fetching\.training_step\(dataloader_iter\) fetches .*: define training_step\(batch"),
        (FetchingPredictions, ConfigError, r"FetchingPredictions\.predict_step\(dataloader_iter\) fetches"),
        (
            TalkingInValidation,
            CollectiveInStep,
            r"torch\.distributed\.all_reduce\(\) was called inside a batch of sanity_check",
        ),
        (TalkingInHooks, CollectiveInStep, r"barrier\(\) was called inside a batch of sanity_check"),
        (
            Product,
            MisconfigurationException,
            r"reduce_fx=\{min,max,mean,sum\}\)` are supported.* Found: <\S+ method prod",
        ),
    ],
)
def test_modules(module: type[Small], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(module())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: ([torch.ones(1, 2)] for _ in range(3)), "the data is a generator, an iterator that can be read once"),
        (
            lambda: {"a": data(), "b": (torch.ones(1, 2) for _ in range(3))},
            "the data is a generator, an iterator that can be read once",
        ),
    ],
)
def test_data_for_several_devices(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(Small(), loader(), num_nodes=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_batchnorm": True}, r"sync_batchnorm=True.* Write instead: GroupNorm or LayerNorm"),
        ({"accumulate_grad_batches": 0}, r"accumulate_grad_batches=0\): expected an integer of at least 1"),
        ({"accumulate_grad_batches": 1.5}, r"accumulate_grad_batches=1\.5\): expected an integer"),
        (
            {"strategy": UnicronStrategy(num_micro_batches=5), "devices": 2},
            "num_micro_batches=5 does not divide.* 2 x 1 = 2",
        ),
        ({"strategy": UnicronStrategy(num_micro_batches=0), "devices": 2}, "num_micro_batches=0"),
    ],
)
def test_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(Small(), **settings)


@pytest.mark.parametrize("value", [0, -1.5])
def test_bucket_size(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"bucket_mib={value}"):
        UnicronStrategy(bucket_mib=value)


def test_reproducible_workers_are_compared() -> None:
    with pytest.raises(ConfigError, match=r"reproducible=True with compare=False"):
        UnicronStrategy(reproducible=True, compare=False)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(2)] * 4)


def test_streams_that_have_no_witness() -> None:
    """Those of manual optimization, and of models in shards."""
    message = r"witness_every=2 with iterable data \(Counted\)"
    with pytest.raises(ConfigError, match=message):
        fit(Manual(), DataLoader(Counted(), batch_size=1), strategy=UnicronStrategy(witness_every=2))
    with pytest.raises(ConfigError, match=message):
        Run(DataLoader(Counted(), batch_size=1), global_batch_size=1, streams=1, shard_size=1, witness_every=2)


def test_options_of_a_witness() -> None:
    with pytest.raises(ConfigError, match=r"witness_every=3 with compare=False"):
        UnicronStrategy(witness_every=3, compare=False)
    with pytest.raises(ConfigError, match=r"witness_every=-1: expected a number of steps"):
        UnicronStrategy(witness_every=-1)
    assert copy.deepcopy(UnicronStrategy(witness_every=2)).witness.every == 2


def test_the_digest_of_a_run_is_that_of_its_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch.unicron")
    trainer = fit(Small(), strategy=UnicronStrategy(reproducible=True))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    parameters, optimizers = checkpoint_digests(tmp_path / "end.ckpt")
    lines = [line for line in caplog.messages if line.startswith("reproducible: ")]
    assert len(lines) == 2 and " threads; another of these gives other bits" in lines[0]
    assert lines[1] == f"reproducible: digest {parameters} of the parameters, step {trainer.global_step}"
    assert optimizers != parameters


def test_num_micro_batches() -> None:
    assert fit(Small(), strategy=UnicronStrategy(num_micro_batches=4), devices=2).global_step == 1


def test_a_search_for_the_batch_size_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pl.Trainer(callbacks=[BatchSizeFinder()], logger=False)
    monkeypatch.setenv(environ.AGENT_SOCKET, "socket")
    with pytest.raises(ConfigError, match=r"BatchSizeFinder changes the batch size .*constant .*without torchrun"):
        check_trainer(trainer, scheduled=True)


def test_the_world_that_torchrun_was_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_MAX_NODES", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    trainer = fit(Small())
    assert (trainer.global_step, trainer.num_nodes, trainer.num_devices) == (1, 4, 1)
    assert fit(Small(), devices=4).num_nodes == 1
    assert fit(Small(), num_nodes=8).num_nodes == 8
    assert fit(Small(), num_nodes=2, accumulate_grad_batches=2).num_nodes == 2
    assert fit(Small(), strategy=UnicronStrategy(num_micro_batches=1)).global_step == 4
    for settings in ({"num_nodes": 3}, {"devices": 3}):
        with pytest.raises(ConfigError, match=r"has work for 3 workers, but torchrun may start 4 .*: set num_nodes so"):
            fit(Small(), **settings)


def test_another_rendezvous_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one of WORLD_SIZE=2 but has no Unicron agent; .*--rdzv-backend unicron"):
        fit(Small(), devices=2)


def test_gradients_that_sum_over_ranks() -> None:
    trainer = fit(Small())
    with pytest.raises(ConfigError, match="sync_grads=True"):
        trainer.strategy.all_gather(torch.ones(1), sync_grads=True)


def test_an_unknown_reduction() -> None:
    trainer = fit(Small())
    with pytest.raises(ValueError, match="reduce_op='product' is not supported"):
        trainer.strategy.reduce(torch.ones(1), reduce_op="product")


def test_collectives_in_a_prediction() -> None:
    class Predicting(Small):
        def predict_step(self, batch: Any) -> Any:
            return self.all_gather(batch[0])

    module = Predicting()
    trainer = fit(module)
    with pytest.raises(CollectiveInStep, match=r"all_gather\(\) was called inside a batch of predict;"):
        trainer.predict(module, data())


def test_data_that_is_read_once_without_an_agent(caplog: pytest.LogCaptureFixture) -> None:
    left = iter([[torch.ones(1, 2)]] * 5)
    assert fit(Small(), left, max_steps=2).global_step == 2
    assert len(list(left)) == 2, "one batch was read ahead"
    assert "read_once loader=train_dataloader data=list_iterator reason=refused under torchrun" in caplog.text


def test_only_a_process_without_an_agent_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = fit(Small()).strategy
    assert strategy.loaders._once
    monkeypatch.setenv(environ.AGENT_SOCKET, "/none")
    assert not strategy.loaders._once
