"""The formulas of activations against the memory that PyTorch keeps for the backward pass of such a layer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from planner.performance.published import layouts_of
from torch import nn

from unicron_lightning.planner.performance.description import MEGATRON_2022, ModelShape
from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.performance.transformer import layer_activation_bytes

SHAPE = ModelShape(num_layers=1, hidden_size=256, num_heads=8, sequence_length=64, vocabulary_size=100)


class Layer(nn.Module):
    """A layer of `ModelShape` of plain operations, so that each keeps exactly the tensors for its derivative."""

    def __init__(self, shape: ModelShape, *, dropout: bool) -> None:
        super().__init__()
        h, kv, ffn, bias = shape.hidden_size, shape.kv_size, shape.ffn, shape.biases
        self.shape, self.dropout = shape, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.query, self.key, self.value = nn.Linear(h, h, bias), nn.Linear(h, kv, bias), nn.Linear(h, kv, bias)
        self.out, self.up, self.down = nn.Linear(h, h, bias), nn.Linear(h, ffn, bias), nn.Linear(ffn, h, bias)
        if shape.gated:
            self.gate = nn.Linear(h, ffn, bias)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0] if self.dropout else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.out(self.attend(self.norm_1(x))))
        inner = self.norm_2(x)
        inner = nn.functional.silu(self.gate(inner)) * self.up(inner) if self.shape.gated else self.gelu(inner)
        return x + self.drop(self.down(inner))

    def gelu(self, inner: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.up(inner))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        groups, per_group = self.shape.kv_heads, self.shape.num_heads // self.shape.kv_heads
        size = width // self.shape.num_heads
        # All query heads of a group are applied to its keys together, without repetition.
        query = self.query(x).view(batch, length, groups, per_group, size).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch * groups, per_group * length, size)
        key = self.key(x).view(batch, length, groups, size).permute(0, 2, 3, 1).reshape(batch * groups, size, length)
        value = self.value(x).view(batch, length, groups, size).transpose(1, 2).reshape(batch * groups, length, size)
        weights = self.drop(torch.softmax(torch.bmm(query, key) / math.sqrt(size), dim=-1))
        mixed = torch.bmm(weights, value).view(batch, groups, per_group, length, size)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, width)


def kept_bytes(layer: Layer, batch: int) -> int:
    """Bytes of all tensors that autograd keeps, each storage once, without parameters and the norms' statistics."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() > batch * layer.shape.sequence_length:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # keeps addresses unique
        return tensor

    shape = (batch, layer.shape.sequence_length, layer.shape.hidden_size)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storages.values())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, num_kv_heads=2),
        replace(SHAPE, ffn_size=300, biases=False),
        replace(SHAPE, gated=True, ffn_size=640, num_kv_heads=1, biases=False),
    ],
    ids=["gpt", "grouped", "narrow", "gated"],
)
def test_a_layer_keeps_what_the_formula_says(shape: ModelShape, dropout: bool, batch: int) -> None:
    recipe = replace(MEGATRON_2022, dropout=dropout)
    configuration = ParallelConfiguration(
        tensor_parallel=1, pipeline_parallel=1, data_parallel=1, micro_batch_size=batch
    )
    expected = layer_activation_bytes(shape, recipe, layouts_of(configuration))[0]
    layer = Layer(shape, dropout=dropout).to(torch.bfloat16)
    measured = kept_bytes(layer, batch)
    # silu keeps its input and its product keeps both factors: one tensor of the inner width more than a fused kernel.
    if shape.gated:
        expected += 2 * batch * shape.sequence_length * shape.ffn
    assert measured == expected
