from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.performance.published import GPT_22B, GPT_175B, LLAMA_70B, LLAMA_405B, layout

from unicron_lightning.planner.performance.description import (
    A100,
    A800,
    H100,
    H200,
    MEGATRON_2022,
    MEGATRON_CORE,
    Efficiency,
)
from unicron_lightning.planner.performance.transformer import StepSeconds, layer_seconds, step_seconds

SHAPES = st.sampled_from([GPT_22B, GPT_175B, LLAMA_70B])
# Only products take time: memory and links are free.
IDEAL = replace(
    A100,
    memory_bandwidth=1e30,
    intra_bandwidth=1e30,
    inter_bandwidth=1e30,
    intra_latency_seconds=0,
    inter_latency_seconds=0,
)
PERFECT = replace(MEGATRON_2022, efficiency=Efficiency(matmul=1, memory=1, network=1))


def seconds(shape, cluster, recipe, **fields) -> StepSeconds:
    return step_seconds(shape, cluster, recipe, layout(**fields))


@settings(deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 8]), st.integers(1, 8), st.integers(1, 64), st.sampled_from(["none", "full"]))
def test_without_overheads_a_step_is_its_flops(shape, t: int, d: int, m: int, again) -> None:
    step = seconds(shape, IDEAL, PERFECT, tensor_parallel=t, data_parallel=d, num_micro_batches=m, recompute=again)
    flops = shape.step_flops(d * m, again)
    assert step.total[0] == pytest.approx(flops / (t * d * 312e12), rel=1e-9)


def test_fused_attention_halves_the_square_and_computes_one_product_again() -> None:
    step = seconds(GPT_175B, IDEAL, replace(PERFECT, fused_attention=True))
    # Two products forward and five backward instead of four, of the unmasked half.
    square = 96 * GPT_175B.layer_attention_flops(1) * (1 + 5 / 2) / 2
    rest = 96 * 3 * GPT_175B.layer_matrix_flops(1) + 3 * GPT_175B.head_flops(1)
    assert step.total[0] == pytest.approx((square + rest) / 312e12, rel=1e-9)


@settings(deadline=None)
@given(st.sampled_from([(1, 1), (2, 1), (8, 1), (8, 3), (32, 3), (96, 1)]), st.integers(1, 8).map(lambda n: 96 * n))
def test_the_bubble_is_the_papers(pv, m: int) -> None:
    # Narayanan et al. 2021, section 2.2: (p-1)/m of the ideal time, (p-1)/(v m) with interleaving. The output layer is
    # cheap here: it makes the last stage slower than the others, which the paper neglects.
    p, v = pv
    shape = replace(GPT_175B, vocabulary_size=1)
    step = seconds(shape, IDEAL, PERFECT, pipeline_parallel=p, interleave=v, num_micro_batches=m)
    assert step.bubble[0] / step.stages[0] == pytest.approx((p - 1) / (v * m), rel=1e-5)


def test_the_last_stage_with_the_output_layer_is_the_slowest() -> None:
    few, many = (
        seconds(replace(GPT_175B, vocabulary_size=v), A100, MEGATRON_2022, pipeline_parallel=8, num_micro_batches=64)
        for v in (1, 512_000)
    )
    assert many.stages[0] > few.stages[0]
    assert many.bubble[0] == few.bubble[0]


def test_the_loss_writes_and_reads_its_results_twice() -> None:
    cluster = replace(IDEAL, peak_flops={"fp16": 1e30, "bf16": 1e30}, memory_bandwidth=1e12)
    with_loss, without = (
        seconds(replace(GPT_22B, vocabulary_size=v, tied_embeddings=False), cluster, PERFECT) for v in (50_001, 1)
    )
    # s V results of 4 bytes; the optimizer's traffic is counted separately.
    assert with_loss.stages[0] - without.stages[0] == pytest.approx(4 * 4 * 2048 * 50_000 / 1e12, rel=1e-6)


def test_neighbours_in_the_pipeline_talk_over_the_slower_link_unless_they_share_a_node() -> None:
    cluster = replace(IDEAL, inter_bandwidth=1e9, memory_bandwidth=1e30)

    def waiting(t: int, d: int) -> float:
        fields = {"tensor_parallel": t, "data_parallel": d, "num_micro_batches": 4}
        recipe = replace(PERFECT, overlap_gradients=True, distributed_optimizer=False)
        two, one = (seconds(GPT_22B, cluster, recipe, pipeline_parallel=p, **fields) for p in (2, 1))
        return float(two.stages[0] - one.stages[0] / 2) - 3 * 4 * GPT_22B.head_flops(1) / (2 * t * 312e12)

    # Both ways, 2 bytes of each of s h elements, divided by TP, for four micro-batches.
    assert waiting(8, 1) == pytest.approx(4 * 2 * 2 * 2048 * 6144 / 8 / 1e9, rel=1e-6)
    assert waiting(4, 2) == pytest.approx(4 * 2 * 2 * 2048 * 6144 / 4 / 1e9, rel=1e-6)
    assert waiting(4, 1) == pytest.approx(0, abs=1e-9)
    assert waiting(2, 2) == pytest.approx(0, abs=1e-9)


def test_an_uneven_division_makes_room_for_the_output_layer() -> None:
    # 126 layers over 16 stages: 8, and 7 in the last, as in Llama 3. The 8 layers decide, not 7 and the output layer.
    forward, backward = layer_seconds(LLAMA_405B, H100, MEGATRON_CORE, layout(tensor_parallel=8))
    step = seconds(LLAMA_405B, H100, MEGATRON_CORE, tensor_parallel=8, pipeline_parallel=16, num_micro_batches=16)
    assert step.stages[0] == pytest.approx(16 * 8 * (forward[0] + backward[0]), rel=0.01)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_data_parallel_communication_is_a_ring(overlap: bool, divided: bool) -> None:
    recipe = replace(MEGATRON_2022, overlap_gradients=overlap, distributed_optimizer=divided)
    cluster = replace(A100, inter_bandwidth=1e9, inter_latency_seconds=0)  # slow, so that communication is not hidden
    fields = {"tensor_parallel": 8, "num_micro_batches": 1}
    step = seconds(GPT_22B, cluster, recipe, data_parallel=16, **fields)
    per_byte = GPT_22B.num_parameters / 8 * 15 / 16 / (1e9 * 0.8)
    expected = per_byte * (4 + (2 if divided else 4))
    assert seconds(GPT_22B, cluster, recipe, data_parallel=1, **fields).data[0] == 0
    if overlap:
        forward, backward = layer_seconds(GPT_22B, cluster, recipe, layout(tensor_parallel=8))
        expected -= 48 * (backward[0] + (forward[0] if divided else 0))
    assert step.data[0] == pytest.approx(expected, rel=1e-9)


def test_rings_that_leave_a_node_share_its_adapters() -> None:
    recipe = replace(MEGATRON_CORE, overlap_gradients=False)
    cluster = replace(H100, inter_latency_seconds=0, intra_latency_seconds=0)

    def data(t: int, d: int) -> float:
        return float(seconds(GPT_22B, cluster, recipe, tensor_parallel=t, data_parallel=d).data[0]) * t

    # With TP 8 a ring has one adapter on each node; with TP 4 it has two members on a node, with two adapters.
    assert data(8, 64) == pytest.approx(2 * data(4, 64))
    # With all members on a node it goes over NVLink: 450 GB/s instead of 8 x 50.
    assert data(1, 8) * 450 / 400 == pytest.approx(data(1, 16) * (7 / 8) / (15 / 16))


@settings(deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.sampled_from([1, 4, 16]))
def test_faster_machines_are_faster(shape, t: int, b: int, d: int) -> None:
    fields = {"tensor_parallel": t, "micro_batch_size": b, "data_parallel": d, "num_micro_batches": 8}
    a800, a100, h100, h200 = (
        seconds(shape, cluster, MEGATRON_CORE, **fields).total[0] for cluster in (A800, A100, H100, H200)
    )
    assert a800 >= a100 > h100 > h200
    assert (a800 > a100) == (t > 1)  # the backward pass hides data-parallel communication on both


@settings(deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 8]), st.sampled_from([1, 2]), st.integers(1, 32))
def test_computing_again_takes_longer(shape, t: int, p: int, m: int) -> None:
    fields = {"tensor_parallel": t, "pipeline_parallel": p, "num_micro_batches": m}
    none, selective, full = (
        seconds(shape, A100, MEGATRON_2022, recompute=again, **fields).total[0]
        for again in ("none", "selective", "full")
    )
    assert none < selective < full


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Efficiency(matmul=0, memory=1, network=1), "matmul=0"),
        (lambda: replace(MEGATRON_CORE, precision="int4"), "precision='int4'"),
        (lambda: replace(MEGATRON_CORE, weight_bytes=-1), "weight_bytes=-1"),
        (lambda: replace(A100, peak_flops={}), "peak_flops={}"),
        (lambda: replace(A100, inter_bandwidth=0), "inter_bandwidth=0"),
        (lambda: replace(A100, reserved_bytes=10**12), "reserved_bytes"),
        (lambda: A100.peak("fp8"), "precision='fp8' on A100-80GB-SXM"),
    ],
)
def test_wrong_machines_and_recipes_are_refused(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()
