"""The model of a script under ``unicron_megatron``: a GPT of two layers over tokens.

Without CUDA the module patches torch and megatron-core for the whole process (`unicron_lightning.megatron.shim`).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from typing import Any, Final

import lightning.pytorch as pl
import torch
from cross.cases import Script
from cross.model import Backward, checksum, parts
from cross.striking import Strikes
from torch import nn
from torch.nn.functional import cross_entropy

from unicron_lightning.megatron import shim

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed
if not torch.cuda.is_available():
    shim.install()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402

from unicron_lightning.megatron import toy  # noqa: E402
from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy  # noqa: E402

LENGTH: Final = 8
"""Tokens of a sample."""
DIGITS: Final = 3
"""Tokens that are made of each of a sample's three numbers; one more than the model sees is the last label."""
TOKENS: Final = 32


def strategy_of(script: Script, *, alone: bool) -> UnicronMegatronStrategy:
    """Return the strategy; alone, one process has the whole model."""
    return UnicronMegatronStrategy(
        pipeline_model_parallel_size=1 if alone else script.shard_size,
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=script.zero,
            overlap_grad_reduce=script.buckets,
            bucket_size=200 if script.buckets else None,  # parameters
        ),
        sequence_length=LENGTH,
        digest_every=1,
    )


class Stage(pl.LightningModule):
    """A worker's part of the model; a sample's numbers are taken as tokens, and each is to be predicted."""

    def __init__(self, script: Script, strikes: Strikes | None) -> None:
        super().__init__()
        self.script = script
        vars(self)["strikes"] = strikes

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        dropout = 0.2 if self.script.dropout else 0.0
        options = toy.Toy(layers=2, hidden=8, heads=2, length=LENGTH, dropout=dropout, tied=self.script.tied)
        config = toy.config(options, pipeline_model_parallel_size=strategy.pipeline_model_parallel_size)
        dtype = torch.float64 if self.script.double else torch.float32
        config.params_dtype = config.pipeline_dtype = dtype
        self.model = toy.model(options, config).to(dtype)
        for name, parameter in named(self.model):
            seed = zlib.crc32(name.encode())
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            parameter.data.copy_(0.3 * values + float("norm" in name and "weight" in name))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.strikes is not None:
            self.strikes.at("forward", self.trainer)
        return self._forward(batch)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        loss = self._loss(output, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("used", checksum(batch), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss if self.strikes is None else Backward.apply(loss, self, "backward")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._forward(batch)

    def validation_loss(self, output: torch.Tensor, batch: Any) -> None:
        self.log("val_loss", self._loss(output, batch))

    def _forward(self, batch: Any) -> torch.Tensor:
        tokens = _tokens(batch)[:, :-1]
        found: torch.Tensor = self.model(tokens, torch.arange(LENGTH).expand_as(tokens), None)
        return found

    def _loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return cross_entropy(output.flatten(0, 1), _tokens(batch)[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        script = self.script
        config = OptimizerConfig(
            optimizer="sgd" if script.optimizer == "sgd" else "adam",
            lr=0.05,
            adam_eps=1e-2,
            weight_decay=0.0 if script.optimizer != "adamw" else 0.01,
            clip_grad=script.clip,
            use_distributed_optimizer=script.zero,
        )
        if not script.schedule:
            return config
        return {
            "optimizer": config,
            "lr_scheduler": lambda optimizer: {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                "interval": script.schedule,
            },
        }


def _tokens(batch: Any) -> torch.Tensor:
    """Return the samples' tokens, of the shape [samples, LENGTH + 1]."""
    numbers = torch.stack([part[0] for part in parts(batch)]).sum(0)
    digits = torch.stack([(numbers * TOKENS**power).floor().remainder(TOKENS) for power in range(DIGITS)], 2)
    return digits.flatten(1).long()


def named(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters by their names in the whole model."""
    layers = {place: layer.layer_number - 1 for place, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(layers[int(words[2])])
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            words = ["embedding", "word_embeddings", "weight"]  # the last stage's copy
        yield ".".join(words), parameter


def state(trainer: pl.Trainer, module: Stage) -> dict[str, Any]:
    """Return this worker's part of the model and of the optimizer, as plain data."""
    strategy: Any = trainer.strategy
    spare = trainer.world_size > 1 and strategy.fabric.place.replica is None
    inner = strategy.parallelism.member.model.optimizer
    state = {} if module.script.zero or spare else _states(inner.chained_optimizers[0].optimizer, module.model)
    return {
        "spare": spare,
        "parts": [_plain(dict(named(module.model))), state],
        "rates": [group["lr"] for group in inner.param_groups],
    }


def _states(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    return {name: _plain(optimizer.state.get(parameter, {})) for name, parameter in named(model)}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
