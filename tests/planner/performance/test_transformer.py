"""The search and the model based on it: always a configuration that divides and fits, always the best one."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.performance.published import GPT_22B, GPT_175B, GPT_OSS_120B, GROK_1, LLAMA_8B, LLAMA_70B, layouts_of

from unicron_lightning.planner.performance import transformer
from unicron_lightning.planner.performance.description import (
    A100,
    H100,
    H200,
    MEGATRON_2022,
    MEGATRON_CORE,
    PRESETS,
    RECIPES,
    ModelShape,
)
from unicron_lightning.planner.performance.model import PerformanceModel
from unicron_lightning.planner.performance.transformer import (
    RELATIVE_ERROR,
    Layouts,
    SearchSpace,
    TransformerModel,
    step_seconds,
    worker_bytes,
)

TINY = ModelShape(num_layers=6, hidden_size=1024, num_heads=4, sequence_length=512, vocabulary_size=1000)
MODELS = st.builds(
    TransformerModel,
    shape=st.sampled_from([TINY, GPT_22B, LLAMA_8B, LLAMA_70B, GPT_175B, GROK_1, GPT_OSS_120B]),
    cluster=st.sampled_from(list(PRESETS.values())),
    recipe=st.sampled_from(list(RECIPES.values())),
    global_batch_size=st.sampled_from([1, 6, 48, 64, 100, 192]),
    space=st.builds(
        SearchSpace, uneven_shares=st.booleans(), micro_batch_sizes=st.sampled_from([(1,), (1, 2, 4), (3, 5)])
    ),
    may_idle=st.booleans(),
)


@settings(deadline=None)
@given(MODELS, st.integers(0, 5000))
def test_an_answer_is_possible_and_consistent(model: TransformerModel, num_workers: int) -> None:
    assert isinstance(model, PerformanceModel)
    best, value = model.configuration(num_workers), model.throughput(num_workers)
    if best is None:
        assert value == 0
        return
    shape, layouts = model.shape, layouts_of(best)
    assert best.num_workers <= num_workers if model.may_idle else best.num_workers == num_workers
    assert shape.num_layers % (best.pipeline_parallel * best.interleave) == 0
    assert shape.num_heads % best.tensor_parallel == 0
    assert best.tensor_parallel <= model.cluster.accelerators_per_node
    assert shape.sequence_length % best.context_parallel == 0
    assert max(1, shape.num_experts) % best.expert_parallel == 0
    assert best.num_workers % best.replica_size == 0
    assert best.interleave == 1 or best.num_micro_batches % best.pipeline_parallel == 0
    samples = best.data_parallel * best.num_micro_batches * best.micro_batch_size
    assert samples >= model.global_batch_size
    assert samples == model.global_batch_size or model.space.uneven_shares
    memory = worker_bytes(shape, model.recipe, layouts)[0]
    assert best.memory_bytes == int(memory) <= model.cluster.memory_bytes - model.cluster.reserved_bytes
    nodes = max(1.0, best.num_workers / model.cluster.accelerators_per_node)
    losses = 1 + model.scaling_loss * math.log2(nodes)
    took = step_seconds(shape, model.cluster, model.recipe, layouts).total[0] * losses
    assert value == pytest.approx(shape.step_flops(model.global_batch_size) / took)
    assert 0 < value < num_workers * model.cluster.peak(model.recipe.precision)


@settings(deadline=None, max_examples=50)
@given(MODELS)
def test_more_workers_are_never_worse_if_some_may_idle(model: TransformerModel) -> None:
    model = replace(model, may_idle=True)
    counts = sorted({0, 1, 7, 8, 64, 333, 4096, *model.counts, *(count - 1 for count in model.counts)})
    curve = [model.throughput(count) for count in counts]
    assert curve == sorted(curve)


@settings(deadline=None, max_examples=50)
@given(MODELS)
def test_idling_is_the_running_maximum(model: TransformerModel) -> None:
    strict, idle = replace(model, may_idle=False), replace(model, may_idle=True)
    best = 0.0
    for count in strict.counts:
        best = max(best, strict.throughput(count))
        assert idle.throughput(count) == best
    kept = [idle.throughput(count) for count in idle.counts]
    assert kept == sorted(set(kept))  # no count is kept that is no faster than a smaller one


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        (MEGATRON_2022, {}),
        (MEGATRON_CORE, {}),
        (MEGATRON_CORE, {"sequence_length": 8192, "num_experts": 4, "experts_per_token": 2, "ffn_size": 8192}),
    ],
)
def test_it_is_the_best_of_all_tried_one_by_one(recipe, given: dict[str, int], uneven: bool) -> None:
    shape, batch, cluster = replace(GPT_22B, num_layers=12, **given), 24, replace(A100, memory_bytes=40 * 10**9)
    space = SearchSpace(micro_batch_sizes=(1, 2), uneven_shares=uneven)
    model = TransformerModel(
        shape=shape, cluster=cluster, recipe=recipe, global_batch_size=batch, space=space, may_idle=uneven
    )
    extended = ((1, 2), (1, 2, 4)) if given else ((1,), (1,))
    ranges = ((1, 2, 4, 8), (1, 2, 3, 4, 6, 12), range(1, 25), (1, 2), range(1, 13), range(3), *extended)
    rows = []
    for t, p, d, b, v, again, c, e in itertools.product(*ranges):
        m = -(-batch // (d * b))
        divides = c * d % e == 0 and (d * b <= batch if uneven else batch % (d * b) == 0)
        if divides and 12 % (p * v) == 0 and (v == 1 or (p > 1 and m % p == 0)):
            rows.append((t, p, d, b, m, v, again, c, e))
    layouts = Layouts(**dict(zip((field.name for field in fields(Layouts)), np.array(rows).T, strict=True)))
    fit = worker_bytes(shape, recipe, layouts) <= cluster.usable_bytes
    times = step_seconds(shape, cluster, recipe, layouts).total
    best: dict[int, float] = {}
    for count, took in zip(layouts.num_workers[fit].tolist(), times[fit].tolist(), strict=True):
        best[count] = min(best.get(count, math.inf), took)
    expected = math.inf
    for count in range(1, 2400):
        losses = 1 + model.scaling_loss * math.log2(max(1.0, count / cluster.accelerators_per_node))
        took = best.get(count, math.inf) * losses
        expected = min(expected, took) if uneven else took
        assert model.throughput(count) == pytest.approx(model.step_flops / expected, rel=1e-6), count


def test_nothing_fits_on_too_few() -> None:
    model = TransformerModel(shape=GPT_175B, cluster=H100, global_batch_size=1536)
    smallest = model.counts[0]
    assert model.throughput(smallest - 1) == 0
    assert model.configuration(smallest - 1) is None
    assert model.throughput(smallest) > 0
    # 18 bytes for each of 175 billion parameters do not fit into fewer.
    assert smallest * H100.usable_bytes > GPT_175B.num_parameters * 18 / 1.5
    assert TransformerModel(shape=GPT_175B, cluster=H200, global_batch_size=1536).counts[0] < smallest


def test_a_model_that_never_fits() -> None:
    small = replace(A100, memory_bytes=5 * 2**30)
    model = TransformerModel(shape=GPT_175B, cluster=small, global_batch_size=1)
    assert model.counts == ()
    assert model.throughput(10**6) == 0
    assert model.uncertainty(10**6) == RELATIVE_ERROR


@pytest.mark.parametrize(
    ("fields", "degrees"),
    [
        ({}, {1, 2, 4, 8}),
        ({"num_heads": 12, "hidden_size": 768}, {1, 2, 4}),
        ({"num_heads": 24, "num_kv_heads": 6, "hidden_size": 768}, {1, 2}),
        ({"num_heads": 8, "num_kv_heads": 2}, {1, 2, 4, 8}),
        ({"ffn_size": 4100}, {1, 2, 4}),
    ],
)
def test_tensor_parallelism_divides_heads_groups_and_width(fields, degrees) -> None:
    shape = replace(TINY, **{"num_heads": 8, **fields})
    assert set(transformer._tensor_degrees(shape, A100)) == degrees


def test_uneven_shares_use_counts_that_even_ones_cannot() -> None:
    even = TransformerModel(shape=LLAMA_8B, cluster=H100, global_batch_size=64)
    uneven = replace(even, space=SearchSpace(uneven_shares=True))
    assert len(uneven.counts) > len(even.counts)
    for count in range(0, 300, 7):
        assert uneven.throughput(count) >= even.throughput(count)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SearchSpace(micro_batch_sizes=()), "micro_batch_sizes"),
        (lambda: SearchSpace(micro_batch_sizes=(0,)), "micro_batch_sizes"),
        (lambda: SearchSpace(recompute=("some",)), "recompute"),
        (lambda: TransformerModel(shape=TINY, cluster=A100, global_batch_size=0), "global_batch_size=0"),
        (lambda: TransformerModel(shape=TINY, cluster=A100, global_batch_size=1, scaling_loss=-1), "scaling_loss"),
        (
            lambda: TransformerModel(
                shape=TINY, cluster=A100, global_batch_size=1, recipe=replace(MEGATRON_CORE, precision="fp8")
            ),
            "precision='fp8' on A100",
        ),
        (lambda: TransformerModel(shape=TINY, cluster=A100, global_batch_size=1).throughput(-1), "num_workers=-1"),
    ],
)
def test_wrong_questions_are_refused(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()
