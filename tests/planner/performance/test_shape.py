"""Counts against the formulas and figures of the papers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.performance.published import GPT_175B, GPT_530B, LLAMA_8B, LLAMA_70B, LLAMA_405B, gpt, llama

from unicron_lightning.planner.performance.description import ModelShape

# arXiv 2104.04473, table 1: parameters (billions), heads, hidden size, layers.
TABLE_1 = [
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (145.6, 96, 12288, 80),
    (310.1, 128, 16384, 96),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]
GPTS = st.builds(
    lambda heads, width, layers: gpt(layers, heads * width, heads),
    st.integers(1, 64),
    st.integers(1, 64).map(lambda n: 4 * n),
    st.integers(1, 100),
)


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), TABLE_1)
def test_parameters_are_those_of_the_published_table(billions, heads, hidden, layers) -> None:
    # 76.05 is printed as 76.1, 18.45 as 18.4: the table truncates or rounds, so one unit of its last place is allowed.
    assert gpt(layers, hidden, heads).num_parameters / 1e9 == pytest.approx(billions, abs=0.06)


@settings(deadline=None)
@given(GPTS)
def test_parameters_are_the_papers_formula(shape) -> None:
    l, h, s, v = shape.num_layers, shape.hidden_size, shape.sequence_length, shape.vocabulary_size  # noqa: E741
    assert shape.num_parameters == 12 * l * h**2 + 13 * l * h + (v + s) * h


@settings(deadline=None)
@given(GPTS, st.integers(1, 4096))
def test_flops_are_the_papers_formula(shape, batch) -> None:
    l, h, s, v = shape.num_layers, shape.hidden_size, shape.sequence_length, shape.vocabulary_size  # noqa: E741
    full = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    none = 72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    assert shape.step_flops(batch, "full") == pytest.approx(full, rel=1e-12)
    assert shape.step_flops(batch) == pytest.approx(none, rel=1e-12)


@settings(deadline=None)
@given(GPTS)
def test_recomputation_costs_what_it_repeats(shape) -> None:
    none, selective, full = (shape.step_flops(8, choice) for choice in ("none", "selective", "full"))
    assert none < selective < full
    assert selective - none == shape.num_layers * shape.layer_attention_flops(8)
    assert 3 * (full - none) == none - 3 * shape.head_flops(8)


@pytest.mark.parametrize(("shape", "percent"), [(GPT_175B, 2.7), (GPT_530B, 1.6)])
def test_selective_recomputation_costs_a_third_of_what_is_published(shape, percent) -> None:
    # arXiv 2205.05198, section 5: 2.7 % more FLOPs for GPT-3, 1.6 % for MT-NLG; its appendix replaces s/(6h) by s/(3h).
    # This counts forward and backward of the s x s part, 12 B s^2 h, whereas only its forward, 4 B s^2 h, is
    # recomputed.
    share = shape.step_flops(1, "selective") / shape.step_flops(1) - 1
    assert 100 * 3 * share == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(
    ("shape", "per_token"),
    [
        # NVIDIA/dgxc-benchmarking, llama3.1/README_*.md, "Notes": FLOPs per token, their sums written out. The recipe
        # for 405B counts 16 heads of keys and values.
        (llama(126, 16384, 128, 53248, kv_heads=16), 659_545_915_392 + 1_978_637_746_176 + 12_608_077_824),
        (LLAMA_70B, 136_902_082_560 + 338_228_674_560 + 6_304_038_912),
        (LLAMA_8B, 20_937_965_568 + 33_822_867_456 + 3_152_019_456),
        # The same, nemo_megatron/README_175b.md.
        (GPT_175B, 376_883_380_224 + 695_784_701_952 + 3_774_873_600),
    ],
)
def test_flops_are_those_that_nvidia_counts(shape, per_token) -> None:
    assert shape.step_flops(1) == shape.sequence_length * per_token


@pytest.mark.parametrize(("shape", "billions"), [(LLAMA_8B, 8), (LLAMA_70B, 70), (LLAMA_405B, 405)])
def test_grouped_and_gated_models_have_the_size_in_their_name(shape, billions) -> None:
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    "wrong", [{"num_layers": 0}, {"num_heads": 7}, {"num_kv_heads": 5}, {"ffn_size": -1}, {"vocabulary_size": 0}]
)
def test_wrong_shapes_are_refused(wrong) -> None:
    fields = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 8,
        "sequence_length": 16,
        "vocabulary_size": 100,
        **wrong,
    }
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ModelShape(**fields)
