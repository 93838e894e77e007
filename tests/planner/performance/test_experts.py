"""Mixtures of experts and context parallelism in the analytic model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from planner.performance.published import (
    CONTEXTS,
    DEEPSEEK_V3,
    EXPERTS,
    GPT_OSS_120B,
    GROK_1,
    LLAMA_8B,
    LLAMA_405B,
    QWEN3_30B,
    PublishedRun,
    experts,
    layout,
    predict,
    searched,
)

from unicron_lightning.planner.performance.description import (
    H100,
    MEGATRON_2021,
    MEGATRON_CORE,
    ModelShape,
    TransformerProfile,
)
from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.performance.transformer import (
    EXPERTS_ERROR,
    TransformerModel,
    layer_seconds,
    state_bytes,
    step_seconds,
    worker_bytes,
)

LARGE = [run for run in EXPERTS if run.name.startswith("Grok-1") and run.shape.num_layers == 64]
SMALL = [run for run in EXPERTS if not run.name.startswith("Grok-1")]
MIXTRAL = experts(32, 4096, 32, 14336, 8, 2, vocabulary_size=32000)


@pytest.mark.parametrize(
    ("shape", "billions", "tolerance"),
    [(MIXTRAL, 46.7, 0.01), (GROK_1, 316, 0.01), (QWEN3_30B, 30.5, 0.01), (GPT_OSS_120B, 116.8, 0.01)],
)
def test_parameters_are_the_published_ones(shape: ModelShape, billions: float, tolerance: float) -> None:
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=tolerance)


def test_the_flops_of_a_token_are_those_of_its_experts() -> None:
    # Its README counts half of the square.
    square = 3 * GROK_1.num_layers * GROK_1.layer_attention_flops(1)
    assert GROK_1.step_flops(1) - square / 2 == pytest.approx(4.27e15, rel=0.005)
    more = replace(GROK_1, num_experts=64)
    router = 2 * 8192 * GROK_1.hidden_size * (64 - 8)
    assert more.layer_matrix_flops(1) - GROK_1.layer_matrix_flops(1) == router


def test_one_expert_of_one_is_a_dense_layer_with_a_router() -> None:
    alone = replace(LLAMA_8B, num_experts=1, experts_per_token=1)
    router = LLAMA_8B.num_layers * LLAMA_8B.hidden_size
    assert alone.num_parameters == LLAMA_8B.num_parameters + router
    assert alone.step_flops(1) == LLAMA_8B.step_flops(1) + 3 * 2 * 8192 * router


@pytest.mark.parametrize("e", [1, 2, 8])
@pytest.mark.parametrize("t", [1, 4])
def test_the_state_of_an_expert_is_on_one_of_ep(e: int, t: int) -> None:
    spread = layout(tensor_parallel=t, data_parallel=8, expert_parallel=e)
    apart = MIXTRAL.num_layers * MIXTRAL.num_experts * MIXTRAL.expert_parameters
    rest = MIXTRAL.num_parameters - apart
    # Megatron-core: 6 + 12 / copies; an expert has 8 / e copies.
    expected = rest / t * (6 + 12 / 8) + apart / (t * e) * (6 + 12 / (8 // e))
    assert state_bytes(MIXTRAL, MEGATRON_CORE, spread, last=False)[0] == pytest.approx(expected, rel=1e-12)
    undivided = rest / t * 18 + apart / (t * e) * 18
    assert state_bytes(MIXTRAL, MEGATRON_2021, spread, last=False)[0] == pytest.approx(undivided, rel=1e-12)


def test_tokens_go_to_their_experts_and_back() -> None:
    """Forward, twice to another node: 2 s b h k / t bytes, of which 6 of 8 parts leave a node of two neighbours."""
    on_node, far = (
        layer_seconds(GROK_1, H100, MEGATRON_CORE, layout(tensor_parallel=4, data_parallel=8, expert_parallel=e))[0][0]
        for e in (2, 8)
    )
    size = 2 * 8192 * 6144 * 2 / 4
    near = size / 2 / (450e9 * 0.8) + 5e-6
    across = size * 6 / 8 / (50e9 * 0.8) + 3 * 10e-6
    assert far - on_node == pytest.approx(2 * (across - near), rel=1e-9)


def test_a_sequence_in_two_halves_the_work_and_the_activations() -> None:
    """With fast links nothing is lost."""
    fast = replace(H100, intra_bandwidth=1e30, intra_latency_seconds=0.0)
    whole, halves = layout(data_parallel=2), layout(data_parallel=2, context_parallel=2)
    one, two = (layer_seconds(LLAMA_405B, fast, MEGATRON_CORE, each) for each in (whole, halves))
    assert [2 * part[0] for part in two] == pytest.approx([part[0] for part in one], rel=1e-12)
    kept = [
        worker_bytes(LLAMA_405B, MEGATRON_CORE, each)[0] - state_bytes(LLAMA_405B, MEGATRON_CORE, each, last=False)[0]
        for each in (whole, halves)
    ]
    assert 2 * kept[1] == pytest.approx(kept[0], rel=1e-12)


def test_keys_and_values_that_outlast_the_products_are_waited_for() -> None:
    slow = replace(H100, intra_bandwidth=1e9, intra_latency_seconds=0.0)
    forward = layer_seconds(LLAMA_8B, slow, MEGATRON_CORE, layout(context_parallel=2))[0][0]
    hidden = layer_seconds(LLAMA_8B, H100, MEGATRON_CORE, layout(context_parallel=2))[0][0]
    products = LLAMA_8B.layer_attention_flops(1) / 2 / 2 / (0.69 * 989.4e12)
    sent = 2 * 4096 * 2 * LLAMA_8B.kv_size / (1e9 * 0.8)
    assert forward - hidden == pytest.approx(sent - products, rel=1e-9)


def test_an_expert_has_fewer_copies_to_reduce() -> None:
    """With EP over all copies, no gradient of an expert is reduced."""
    none = replace(MEGATRON_CORE, overlap_gradients=False)
    apart = replace(MIXTRAL, num_experts=8)
    seconds = [
        step_seconds(apart, H100, none, layout(data_parallel=8, expert_parallel=e)).data[0] for e in (1, 2, 4, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)
    dense = replace(MIXTRAL, num_experts=0, experts_per_token=0, ffn_size=1)
    alone = step_seconds(dense, H100, none, layout(data_parallel=8)).data[0]
    assert seconds[-1] == pytest.approx(alone, rel=0.01)


def errors(runs: list[PublishedRun]) -> list[float]:
    return [predict(run).seconds / run.seconds - 1 for run in runs]


def rms(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def test_predictions_are_as_far_off_as_the_documentation_says() -> None:
    for words, least, most in (("bf16", -0.106, -0.095), ("fp8", -0.245, -0.23)):
        assert all(least < error < most for error in errors([run for run in LARGE if words in run.name]))
    assert all(-0.101 < error < -0.085 for error in errors(list(CONTEXTS)))
    assert rms(errors(LARGE)) == pytest.approx(0.18, abs=0.005)
    assert rms(errors(SMALL)) == pytest.approx(0.57, abs=0.005)
    assert EXPERTS_ERROR - 0.01 < rms(errors([*LARGE, *SMALL])) < EXPERTS_ERROR


def test_the_search_finds_the_layout_that_was_run() -> None:
    """NVIDIA ran Grok-1 with TP 4, CP 2, EP 8, PP 8."""
    for run in LARGE:
        model = TransformerModel(
            shape=run.shape, cluster=run.cluster, global_batch_size=run.global_batch_size, recipe=run.recipe
        )
        best = model.configuration(run.num_workers)
        assert best is not None
        assert (best.tensor_parallel, best.context_parallel, best.expert_parallel) == (4, 2, 8)
        assert best.pipeline_parallel in (4, 8)
        assert model.uncertainty(run.num_workers) == EXPERTS_ERROR
    assert abs(searched(LARGE[0]) / LARGE[0].seconds - 1) < 0.05


def test_a_profile_states_the_scripts_own_degrees() -> None:
    sizes = {"hidden_size": 6144, "num_heads": 48, "sequence_length": 8192, "vocabulary_size": 131072}
    model = {"num_layers": 64, "num_kv_heads": 8, "num_experts": 8, "experts_per_token": 2, "ffn_size": 32768}
    profile = TransformerProfile(**sizes, **model, gated=True, global_batch_size=1024, expert_parallel=4)
    of = TransformerModel.of(profile, accelerator="H100", ordered=True)
    found = [of.configuration(count) for count in of.counts]
    assert {each.expert_parallel for each in found if each} == {4}
    assert {each.context_parallel for each in found if each} == {each.interleave for each in found if each} == {1}
    halves = TransformerModel.of(replace(profile, context_parallel=2), accelerator="H100", ordered=True)
    assert {halves.configuration(count).context_parallel for count in halves.counts} == {2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_experts": 4}, "experts_per_token=0: expected 1 to num_experts=4"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token=5: expected 1 to num_experts=4"),
        ({"experts_per_token": 2}, "experts_per_token=2: expected num_experts above 0"),
        ({"shared_expert_size": 2}, "shared_expert_size=2: expected num_experts above 0"),
        ({"num_experts": 4, "experts_per_token": 1, "expert_parallel": 3}, "expert_parallel=3: expected a divisor"),
        ({"expert_parallel": 2}, "expert_parallel=2: expected a divisor of num_experts=0"),
        ({"context_parallel": 5}, "context_parallel=5: expected a divisor of sequence_length=64"),
    ],
)
def test_impossible_shapes_are_refused(given: dict[str, int], message: str) -> None:
    base = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "sequence_length": 64, "vocabulary_size": 10}
    with pytest.raises(ValueError, match=message):
        TransformerProfile(**{**base, "global_batch_size": 2, **given})


def test_experts_are_divided_among_copies_that_exist() -> None:
    base = {"tensor_parallel": 1, "pipeline_parallel": 1, "micro_batch_size": 1}
    with pytest.raises(ValueError, match="expert_parallel=4: expected a divisor of CP x DP = 6"):
        ParallelConfiguration(**base, data_parallel=3, context_parallel=2, expert_parallel=4)
    assert ParallelConfiguration(**base, data_parallel=8, context_parallel=2, expert_parallel=4).replica_size == 4


def test_deepseek_lies_outside_the_model() -> None:
    """It keeps each token within four nodes and hides all communication; the model does neither."""
    run = next(run for run in SMALL if run.shape == DEEPSEEK_V3)
    assert 0.5 < errors([run])[0] < 0.7
    near = replace(run, cluster=replace(run.cluster, accelerators_per_node=64))
    assert errors([near])[0] < 0.0
