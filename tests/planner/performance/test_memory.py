"""Activations against the formulas of arXiv 2205.05198, table 2, and the proportions it reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.performance.published import GPT_1T, GPT_22B, GPT_175B, GPT_530B, LLAMA_70B, layout, layouts_of

from unicron_lightning.planner.performance.description import MEGATRON_2021, MEGATRON_2022, MEGATRON_CORE, ModelShape
from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.performance.transformer import (
    first_stage_activation_bytes,
    layer_activation_bytes,
    linear_bytes,
    stage_parameters,
    state_bytes,
    worker_bytes,
)

SHAPES = [GPT_22B, GPT_175B, GPT_530B, GPT_1T]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("b", [1, 4])
def test_a_layer_keeps_what_table_2_says(shape: ModelShape, t: int, b: int) -> None:
    s, h, a = shape.sequence_length, shape.hidden_size, shape.num_heads
    for recipe, recompute, factor in [
        (MEGATRON_2021, "none", 10 + 24 / t + 5 * a * s / (h * t)),
        (MEGATRON_2022, "none", 34 / t + 5 * a * s / (h * t)),
        (MEGATRON_2021, "selective", 10 + 24 / t),
        (MEGATRON_2022, "selective", 34 / t),
        (MEGATRON_2022, "full", 2),
    ]:
        kept = layer_activation_bytes(shape, recipe, layout(tensor_parallel=t, micro_batch_size=b, recompute=recompute))
        assert kept[0] == pytest.approx(s * b * h * factor, rel=1e-12)


def test_fused_attention_keeps_no_square() -> None:
    none = layer_activation_bytes(GPT_175B, replace(MEGATRON_2022, fused_attention=True), layout(tensor_parallel=8))
    selective = layer_activation_bytes(GPT_175B, MEGATRON_2022, layout(tensor_parallel=8, recompute="selective"))
    assert none[0] == selective[0]


@pytest.mark.parametrize(("shape", "percent"), [(GPT_175B, 70), (GPT_530B, 65)])
def test_selective_recomputation_saves_what_is_published(shape, percent) -> None:
    none, selective = (
        layer_activation_bytes(shape, MEGATRON_2022, layout(recompute=recompute))[0]
        for recompute in ("none", "selective")
    )
    assert 100 * (1 - selective / none) == pytest.approx(percent, abs=0.5)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_techniques_leave_about_a_fifth(shape) -> None:
    # Section 6.1: together they need "under 20 %" of the tensor-parallel baseline; by its own formulas 16 to 20.3 %.
    both = layer_activation_bytes(shape, MEGATRON_2022, layout(tensor_parallel=8, recompute="selective"))
    baseline = layer_activation_bytes(shape, MEGATRON_2021, layout(tensor_parallel=8))
    assert 0.15 < both[0] / baseline[0] < 0.205


@pytest.mark.parametrize(("p", "v"), [(1, 1), (8, 1), (8, 3), (32, 3)])
def test_the_first_stage_waits_for_all_layers_whatever_p_is(p: int, v: int) -> None:
    shape = GPT_175B
    many = layout(tensor_parallel=8, pipeline_parallel=p, interleave=v, num_micro_batches=64, recompute="selective")
    layers = 34 * 2048 * 12288 * 96 / 8 * (1 + (p - 1) / (p * v) if v > 1 else 1)  # equation 6 and section 4.2.3
    total = first_stage_activation_bytes(shape, MEGATRON_2022, many)[0]
    # Parts outside the layers are small, as is the s x s part of the layer in progress. p = 1 also has the logits.
    core = 5 * 96 * 2048**2 / 8
    assert layers + core <= total <= 1.02 * layers + core


def test_few_micro_batches_keep_less() -> None:
    fields = {"tensor_parallel": 8, "pipeline_parallel": 8, "recompute": "selective"}
    some, all_ = (
        first_stage_activation_bytes(GPT_175B, MEGATRON_CORE, layout(**fields, num_micro_batches=m))[0] for m in (2, 64)
    )
    assert some == pytest.approx(all_ / 4)


@pytest.mark.parametrize(("d", "per_parameter"), [(1, 18), (4, 9), (64, 6 + 12 / 64)])
def test_state_is_megatrons(d: int, per_parameter: float) -> None:
    # Megatron-Core developer guide, "Distributed Optimizer": bf16 parameters, fp32 gradients: 18, or 6 + 12/d.
    lay = layout(data_parallel=d)
    state = state_bytes(GPT_22B, MEGATRON_CORE, lay, last=False)[0]
    assert state == pytest.approx(GPT_22B.num_parameters * per_parameter)
    undivided = state_bytes(GPT_22B, MEGATRON_2022, lay, last=False)[0]
    assert undivided == pytest.approx(GPT_22B.num_parameters * 18)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 5, 8, 10, 16, 20, 40, 80]))
def test_stages_hold_the_whole_model(t: int, p: int) -> None:
    lay = layout(tensor_parallel=t, pipeline_parallel=p)
    first, last = (stage_parameters(LLAMA_70B, lay, last=last)[0] for last in (False, True))
    if p == 1:
        assert first * t == pytest.approx(LLAMA_70B.num_parameters)
    else:
        inner = 80 // p * LLAMA_70B.layer_parameters * (p - 2)
        assert (first + last) * t + inner == pytest.approx(LLAMA_70B.num_parameters)


@settings(deadline=None)
@given(
    st.sampled_from([*SHAPES, LLAMA_70B]),
    st.sampled_from([MEGATRON_2021, MEGATRON_2022, MEGATRON_CORE]),
    st.sampled_from(["none", "selective", "full"]),
    st.integers(1, 8),
    st.integers(1, 64),
)
def test_memory_falls_with_tensor_and_data_parallelism_and_rises_with_the_micro_batch(
    shape, recipe, again, b, d
) -> None:
    def needed(**fields) -> float:
        base = {"micro_batch_size": b, "data_parallel": d, "recompute": again, "num_micro_batches": 8}
        return float(worker_bytes(shape, recipe, layout(**{**base, **fields}))[0])

    by_tensor = [needed(tensor_parallel=t) for t in (1, 2, 4, 8)]
    assert by_tensor == sorted(by_tensor, reverse=True) and by_tensor[0] > by_tensor[-1]
    assert needed(data_parallel=d + 1) <= needed()
    assert needed(micro_batch_size=b + 1) > needed()


@settings(deadline=None)
@given(st.sampled_from([*SHAPES, LLAMA_70B]), st.sampled_from([MEGATRON_2021, MEGATRON_2022, MEGATRON_CORE]))
def test_recomputation_saves_memory(shape, recipe) -> None:
    none, selective, full = (
        worker_bytes(shape, recipe, layout(tensor_parallel=8, recompute=again))[0]
        for again in ("none", "selective", "full")
    )
    assert full < selective <= none


def test_full_recomputation_needs_room_for_the_layer_under_way() -> None:
    # 96 inputs of layers, one complete layer, the loss and the embedding's mask: formulas of the module's docstring.
    s, h, a, v = 2048, 12288, 96, 51200
    expected = 96 * 2 * s * h + s * h * (34 + 5 * a * s / h) + (4 * s * h + 4 * s * v) + s * h
    total = first_stage_activation_bytes(GPT_175B, MEGATRON_2022, layout(recompute="full"))[0]
    assert total == pytest.approx(expected, rel=1e-12)


def test_the_last_stage_can_be_the_fullest() -> None:
    # An output layer as large as the other layers of a stage, and its fp32 results, which no other stage has.
    shape = replace(LLAMA_70B, vocabulary_size=2_000_000)
    lay = layout(tensor_parallel=8, pipeline_parallel=2, recompute="full")
    state = state_bytes(shape, MEGATRON_CORE, lay, last=True)[0]
    needed = worker_bytes(shape, MEGATRON_CORE, lay)[0]
    assert needed > state + 4 * 8192 * 2_000_000 / 8
    first = state_bytes(shape, MEGATRON_CORE, lay, last=False)[0]
    assert needed > first + first_stage_activation_bytes(shape, MEGATRON_CORE, lay)[0]


def test_grouped_keys_keep_less_and_gates_keep_more() -> None:
    plain = replace(GPT_22B, num_kv_heads=0)
    grouped, gated = replace(plain, num_kv_heads=8), replace(plain, gated=True)
    s, h = 2048, 6144
    full, fewer, more = (linear_bytes(shape, MEGATRON_CORE, layout())[0] for shape in (plain, grouped, gated))
    assert full - fewer == 2 * 2 * s * (h - h // 8)
    assert more - full == 2 * s * 4 * h


def test_many_at_once_are_as_one_by_one() -> None:
    configurations = [
        ParallelConfiguration(
            tensor_parallel=t,
            pipeline_parallel=p,
            data_parallel=2,
            micro_batch_size=b,
            num_micro_batches=8,
            recompute=again,
        )
        for t in (1, 8)
        for p in (1, 4)
        for b in (1, 2)
        for again in ("none", "selective", "full")
    ]
    together = worker_bytes(GPT_175B, MEGATRON_2022, layouts_of(*configurations))
    alone = [worker_bytes(GPT_175B, MEGATRON_2022, layouts_of(c))[0] for c in configurations]
    np.testing.assert_array_equal(together, alone)
