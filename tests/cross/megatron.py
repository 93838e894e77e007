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
from cross.training import witness_of
from torch import nn
from torch.nn.functional import cross_entropy

from unicron_lightning.megatron import shim

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed
if not torch.cuda.is_available():
    shim.install()
torch.compiler.set_stance("force_eager")  # each process would compile the routers with a C++ compiler

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402

from unicron_lightning.megatron import toy  # noqa: E402
from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy  # noqa: E402

LENGTH: Final = 8
"""Tokens of a sample."""
DIGITS: Final = 3
"""Tokens that are made of each of a sample's three numbers; one more than the model sees is the last label."""
TOKENS: Final = 32
EXPERTS: Final = 4
"""Of each layer."""
SIZES: Final = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
ROUTERS: Final[dict[str, dict[str, Any]]] = {
    "expert": {"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3},
    "biased": {
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
    },
}
"""How experts are chosen, by layout."""


def strategy_of(script: Script, *, alone: bool) -> UnicronMegatronStrategy:
    """Return the strategy; alone, one process has the whole model."""
    return UnicronMegatronStrategy(
        **({} if alone else _sizes(script)),
        witness_every=witness_of(script, alone=alone),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=script.zero,
            overlap_grad_reduce=script.buckets,
            bucket_size=200 if script.buckets else None,  # parameters
        ),
        sequence_length=LENGTH,
        digest_every=1,
    )


def _sizes(script: Script) -> dict[str, int]:
    """Return the strategy's sizes."""
    width, virtual = script.shard_size, script.layout == "virtual"
    if script.experts:
        return {"expert_model_parallel_size": width}
    if script.layout in ("tensor", "context"):
        return {f"{script.layout.replace('tensor', 'tensor_model')}_parallel_size": width}
    rest = {"virtual_pipeline_model_parallel_size": 2} if virtual else {}
    return {"pipeline_model_parallel_size": width, **rest}


def _options(script: Script, *, sequence: bool) -> toy.Toy:
    return toy.Toy(
        layers=4 if script.layout == "virtual" else 2,
        hidden=8,
        heads=2,
        length=LENGTH,
        dropout=0.2 if script.dropout else 0.0,
        tied=script.tied,
        sequence_parallel=sequence,
        experts=EXPERTS if script.experts else 0,
        router=ROUTERS.get(script.layout, {}),
    )


class Stage(pl.LightningModule):
    """A worker's part of the model; a sample's numbers are taken as tokens, and each is to be predicted."""

    def __init__(self, script: Script, strikes: Strikes | None) -> None:
        super().__init__()
        self.script = script
        vars(self)["strikes"] = strikes

    def configure_model(self) -> None:
        if hasattr(self, "model"):  # in a further fit
            return
        strategy: Any = self.trainer.strategy
        options = _options(self.script, sequence=strategy.tensor_model_parallel_size > 1 and self.script.buckets)
        config = toy.config(options, **{name: getattr(strategy, name) for name in SIZES})
        dtype = torch.float64 if self.script.double else torch.float32
        config.params_dtype = config.pipeline_dtype = dtype
        self.model = toy.model(options, config).to(dtype)
        for name, parameter in named(self.model):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            dim, part, parts = _slice(parameter)
            whole = [size * parts if place == dim else size for place, size in enumerate(parameter.shape)]
            values = torch.randn(whole, generator=generator, dtype=torch.float64).chunk(parts, dim)[part]
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
        strategy: Any = self.trainer.strategy
        model: Any = self.model[strategy.virtual_stage] if isinstance(self.model, nn.ModuleList) else self.model
        tokens, labels = _tokens(batch)[:, :-1].contiguous(), _tokens(batch)[:, 1:].contiguous()
        if self.script.layout in ("tensor", "context"):  # Megatron's loss, in float32
            return toy.forward(model, {"tokens": tokens, "labels": labels})
        found: torch.Tensor = model(tokens, torch.arange(LENGTH).expand_as(tokens), None)
        return found

    def _loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        if self.script.layout in ("tensor", "context"):
            return output.mean()
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
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS
    first //= parallel_state.get_expert_model_parallel_world_size()
    for stage in model if isinstance(model, nn.ModuleList) else [model]:
        layers = {place: layer.layer_number - 1 for place, layer in enumerate(stage.decoder.layers)}
        for name, parameter in stage.named_parameters():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(layers[int(words[2])])
            if "local_experts" in words:
                place = words.index("local_experts") + 1
                words[place] = str(first + int(words[place]))
            if name == "output_layer.weight" and stage.share_embeddings_and_output_weights:
                words = ["embedding", "word_embeddings", "weight"]  # the last stage's copy
            yield ".".join(words), parameter


def _slice(parameter: nn.Parameter) -> tuple[int, int, int]:
    """Return the dimension in which tensor parallelism divides a parameter, the number of this slice, and of slices."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, 0, 1
    size = parallel_state.get_tensor_model_parallel_world_size()
    return parameter.partition_dim, parallel_state.get_tensor_model_parallel_rank(), size  # type: ignore[attr-defined]


def state(trainer: pl.Trainer, module: Stage) -> dict[str, Any]:
    """Return this worker's part of the model and of the optimizer, as plain data."""
    strategy: Any = trainer.strategy
    inner = strategy.parallelism.member.model.optimizer
    rates = sorted({group["lr"] for group in inner.param_groups})
    if trainer.world_size > 1 and strategy.fabric.place.replica is None:
        return {"spare": True, "parts": [], "rates": rates}  # it has no place in the layout
    optimizers = [] if module.script.zero else [each.optimizer for each in inner.chained_optimizers]
    states = {parameter: state for each in optimizers for parameter, state in each.state.items()}
    parameters = dict(named(module.model))
    values = {name: _plain(parameter, parameter) for name, parameter in parameters.items()}
    kept = {
        name: {key: _plain(value, parameter) for key, value in states.get(parameter, {}).items()}
        for name, parameter in (parameters.items() if optimizers else ())
    }
    return {"spare": False, "parts": [values, kept], "rates": rates}


def _plain(value: Any, parameter: nn.Parameter) -> Any:
    """Return a value of a parameter as plain data, with the place of a slice."""
    if not isinstance(value, torch.Tensor):
        return value
    dim, part, parts = _slice(parameter)
    if parts == 1 or value.shape != parameter.shape:
        return value.tolist()
    at = [part * size if place == dim else 0 for place, size in enumerate(value.shape)]
    return {"at": at, "of": list(value.shape), "local": value.tolist()}
