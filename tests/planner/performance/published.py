"""Published runs, and the analytic model's errors for them.

The model's three constants (`recipe.FITTED`) were fitted to `LAYER_TIMES` and to nothing else; every run in `RUNS` is a
prediction. `predict` uses the published configuration and, where the micro-batch or the interleaving was not published,
the fastest values that divide and fit.

`OTHER_SOFTWARE` shows runs to which the constants do not carry over: a program that is not Megatron. For these the
model predicts one and a half times the measured throughput; `calibrated` with a few measured steps, or an `Efficiency`
of one's own, corrects this.

NVIDIA's runs on H100 hide most of their tensor-parallel communication, and the model hides none. Their times are
predicted well because two errors cancel: their products reach less of the peak than the A100's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from unicron_lightning.planner.performance.description import (
    A100,
    H100,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_CORE,
    SCALING_LOSS,
    Hardware,
    ModelShape,
    Recipe,
    Recompute,
)
from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.performance.transformer import (
    RECOMPUTE,
    Layouts,
    TransformerModel,
    layer_seconds,
    step_seconds,
    worker_bytes,
)


def layouts_of(*configurations: ParallelConfiguration) -> Layouts:
    """Arrays from configurations, in their order."""
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size", "num_micro_batches")
    rows = [
        (
            *(getattr(c, name) for name in names),
            c.interleave,
            RECOMPUTE.index(c.recompute),
            c.context_parallel,
            c.expert_parallel,
        )
        for c in configurations
    ]
    columns = np.array(rows, dtype=np.int64).T
    return Layouts(**{field.name: column for field, column in zip(fields(Layouts), columns, strict=True)})


def layout(**given: Any) -> Layouts:
    """One configuration, of one worker unless given."""
    base = {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1, "micro_batch_size": 1}
    return layouts_of(ParallelConfiguration(**{**base, **given}))


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A measured and published run.

    Attributes:
        source: the publication, with the table.
        name: the model and its special settings.
        shape, cluster, recipe, global_batch_size: the model, the machines and the training method.
        tensor_parallel, pipeline_parallel, data_parallel: as published.
        micro_batch_size, interleave: as published, 0 if unpublished.
        recompute: as published.
        seconds: duration of an optimizer step, as published or derived from the published FLOP/s.
        fits: whether the run fits by the memory formulas; False for published runs that exceed them.
        context_parallel, expert_parallel: as published.
    """

    source: str
    name: str
    shape: ModelShape
    cluster: Hardware
    recipe: Recipe
    global_batch_size: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch_size: int
    interleave: int
    recompute: Recompute
    seconds: float
    fits: bool = True
    context_parallel: int = 1
    expert_parallel: int = 1

    @property
    def num_workers(self) -> int:
        """Accelerators."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization: the model's FLOPs per second as a share of the peak."""
        flops = self.shape.step_flops(self.global_batch_size)
        return flops / self.seconds / self.num_workers / self.cluster.peak(self.recipe.precision)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The model's prediction for a run.

    Attributes:
        seconds: duration of a step.
        configuration: with the chosen micro-batch and interleaving.
    """

    seconds: float
    configuration: ParallelConfiguration


def predict(run: PublishedRun) -> Prediction:
    """Predict a published run."""
    layouts = layouts_of(*_configurations(run))
    memory = worker_bytes(run.shape, run.recipe, layouts)
    seconds = step_seconds(run.shape, run.cluster, run.recipe, layouts).total
    if run.fits:
        seconds = np.where(memory <= run.cluster.usable_bytes, seconds, math.inf)
    best = int(np.argmin(seconds))
    return Prediction(seconds=float(seconds[best]), configuration=layouts.configuration(best, int(memory[best])))


def _configurations(run: PublishedRun) -> Iterator[ParallelConfiguration]:
    """The published configuration, with all values that divide in place of unpublished ones."""
    p, layers = run.pipeline_parallel, -(-run.shape.num_layers // run.pipeline_parallel)
    for b in [run.micro_batch_size] if run.micro_batch_size else [1, 2, 4, 8, 16]:
        m, rest = divmod(run.global_batch_size, run.data_parallel * b)
        for v in [run.interleave] if run.interleave else range(1, layers + 1):
            if rest or layers % v or (v > 1 and (p == 1 or m % p)):
                continue
            yield ParallelConfiguration(
                tensor_parallel=run.tensor_parallel,
                pipeline_parallel=p,
                data_parallel=run.data_parallel,
                micro_batch_size=b,
                num_micro_batches=m,
                interleave=v,
                recompute=run.recompute,
                context_parallel=run.context_parallel,
                expert_parallel=run.expert_parallel,
            )


def gpt(layers: int, hidden: int, heads: int) -> ModelShape:
    """A GPT of the two Megatron papers: s = 2048, V = 51,200."""
    return ModelShape(
        num_layers=layers, hidden_size=hidden, num_heads=heads, sequence_length=2048, vocabulary_size=51200
    )


def llama(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int = 8) -> ModelShape:
    """A model of "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, at 8,192 tokens."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        gated=True,
        biases=False,
        learned_positions=False,
        tied_embeddings=False,
        sequence_length=8192,
        vocabulary_size=128256,
    )


GPT_22B, GPT_175B, GPT_530B, GPT_1T = gpt(48, 6144, 64), gpt(96, 12288, 96), gpt(105, 20480, 128), gpt(128, 25600, 160)
LLAMA_8B, LLAMA_70B = llama(32, 4096, 32, 14336), llama(80, 8192, 64, 28672)
LLAMA_405B = llama(126, 16384, 128, 53248)
NEMOTRON_340B = ModelShape(
    num_layers=96,
    hidden_size=18432,
    num_heads=96,
    num_kv_heads=8,
    biases=False,
    learned_positions=False,
    tied_embeddings=False,
    sequence_length=4096,
    vocabulary_size=256000,
)


def _weak_scaling() -> Iterator[PublishedRun]:
    """Narayanan et al. 2021, table 1: 16-bit TFLOP/s per GPU of the hardware, with full recomputation."""
    for billions, heads, hidden, layers, t, p, workers, batch, teraflops in (
        (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
        (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
        (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
        (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
        (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
        (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
        (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
        (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
        (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
        (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
    ):
        shape = gpt(layers, hidden, heads)
        yield PublishedRun(
            source="arXiv 2104.04473, table 1",
            name=f"GPT {billions:g}B",
            shape=shape,
            cluster=A100,
            recipe=MEGATRON_2021,
            global_batch_size=batch,
            tensor_parallel=t,
            pipeline_parallel=p,
            data_parallel=workers // (t * p),
            micro_batch_size=0,
            interleave=0,
            recompute="full",
            seconds=shape.step_flops(batch, "full") / (teraflops * 1e12 * workers),
        )


def _recomputation() -> Iterator[PublishedRun]:
    """Korthikanti et al. 2022, tables 3 and 5: seconds per iteration, one copy of the model."""
    for name, shape, p, batch, b, v, full, selective in (
        ("22B", GPT_22B, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", GPT_175B, 8, 64, 1, 3, 18.13, 13.75),
        ("530B", GPT_530B, 35, 280, 1, 3, 49.05, 37.83),
        ("1T", GPT_1T, 64, 512, 1, 1, 94.42, 71.49),
    ):
        base = PublishedRun(
            source="arXiv 2205.05198, table 5",
            name=f"GPT {name}, full recomputation",
            shape=shape,
            cluster=A100,
            recipe=MEGATRON_2021,
            global_batch_size=batch,
            tensor_parallel=8,
            pipeline_parallel=p,
            data_parallel=1,
            micro_batch_size=b,
            interleave=v,
            recompute="full",
            seconds=full,
        )
        yield base
        selectively = f"GPT {name}, selective recomputation"
        yield replace(base, name=selectively, recipe=MEGATRON_2022, recompute="selective", seconds=selective)


def _nemo() -> Iterator[PublishedRun]:
    """NVIDIA/dgxc-benchmarking: README_175b.md and README_340b.md of version 24.11; seconds per step."""
    gpt3 = {"bf16": (8.309, 8.408, 8.42, 8.453, 8.49), "fp8": (5.626, 5.725, 5.774, 5.82, 5.96)}
    nemotron = {"bf16": (4.61, 4.67, 4.7, 4.73, 4.84), "fp8": (3.16, 3.21, 3.26, 3.34, 3.49)}
    for name, shape, t, m, fits, times in (
        ("GPT-3 175B", GPT_175B, 4, 64, True, gpt3),
        # Ran with 16-bit gradients and less optimizer state than the recipe assumes.
        ("Nemotron-4 340B", NEMOTRON_340B, 8, 16, False, nemotron),
    ):
        for precision, measured in times.items():
            for workers, seconds in zip((128, 256, 512, 1024, 2048), measured, strict=True):
                d = workers // (t * 8)
                yield PublishedRun(
                    source="NVIDIA/dgxc-benchmarking",
                    name=f"{name}, {precision}",
                    shape=shape,
                    cluster=H100,
                    recipe=replace(MEGATRON_CORE, precision=precision),
                    global_batch_size=d * m,
                    tensor_parallel=t,
                    pipeline_parallel=8,
                    data_parallel=d,
                    micro_batch_size=1,
                    interleave=12,
                    recompute="none",
                    seconds=seconds,
                    fits=fits,
                )


def _llama() -> Iterator[PublishedRun]:
    """The Llama 3 Herd of Models, table 4, rows without context parallelism: TFLOP/s per GPU."""
    for d, teraflops in ((64, 430), (128, 400)):
        workers = 8 * 16 * d
        yield PublishedRun(
            source="arXiv 2407.21783, table 4",
            name="Llama 3 405B",
            shape=LLAMA_405B,
            cluster=H100,
            recipe=MEGATRON_CORE,
            global_batch_size=2048,
            tensor_parallel=8,
            pipeline_parallel=16,
            data_parallel=d,
            micro_batch_size=1,
            interleave=0,
            recompute="none",
            seconds=LLAMA_405B.step_flops(2048) / (teraflops * 1e12 * workers),
            fits=False,  # it ran without recomputation, by freeing tensors early
        )


def _contexts() -> Iterator[PublishedRun]:
    """NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, 25.11 and 26.02: tokens/s per GPU, CP 2."""
    for samples, rate in ((512, 292.0), (1536, 311.0)):
        yield PublishedRun(
            source="NVIDIA-NeMo/Megatron-Bridge",
            name="Llama 3.1 405B, fp8",
            shape=LLAMA_405B,
            cluster=H100,
            recipe=replace(MEGATRON_CORE, precision="fp8"),
            global_batch_size=samples,
            tensor_parallel=8,
            pipeline_parallel=8,
            data_parallel=8,
            context_parallel=2,
            micro_batch_size=1,
            interleave=8,
            recompute="none",
            seconds=samples * 8192 / rate / 1024,
            fits=False,
        )


RUNS: tuple[PublishedRun, ...] = (*_weak_scaling(), *_recomputation(), *_nemo(), *_llama())
CONTEXTS: tuple[PublishedRun, ...] = tuple(_contexts())
"""Runs with context parallelism."""


def experts(layers: int, hidden: int, heads: int, ffn: int, number: int, each: int, **given: int) -> ModelShape:
    """A mixture of experts without biases, its output layer apart from the embedding, at 4,096 tokens."""
    return ModelShape(
        **{
            "num_layers": layers,
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": 8,
            "ffn_size": ffn,
            "num_experts": number,
            "experts_per_token": each,
            "sequence_length": 4096,
            **given,
        },
        gated=True,
        biases=False,
        learned_positions=False,
        tied_embeddings=False,
    )


GROK_1 = experts(64, 6144, 48, 32768, 8, 2, vocabulary_size=131072, sequence_length=8192)
"""Its 4.27e15 FLOPs a sample, which the README states, are those of two gated experts and half a square."""
QWEN3_30B = experts(48, 2048, 32, 768, 128, 8, num_kv_heads=4, head_size=128, vocabulary_size=151936)
GPT_OSS_120B = experts(36, 2880, 64, 2880, 128, 4, head_size=64, vocabulary_size=201088)
# Its compressed keys and values are taken as those of one head, and the three layers without experts as with them.
DEEPSEEK_V3 = experts(
    61, 7168, 128, 2048, 256, 8, shared_expert_size=2048, num_kv_heads=1, head_size=128, vocabulary_size=129280
)


def _grok() -> Iterator[PublishedRun]:
    """NVIDIA/dgxc-benchmarking, grok1/README_314b.md: seconds per step; smaller sizes have fewer layers."""
    sizes = [
        # layers, tokens, PP, CP, EP, DP (EP included), v, samples
        (2, 4096, 1, 1, 2, 2, 1, 1024),
        (4, 4096, 1, 1, 4, 4, 1, 1024),
        (4, 4096, 1, 1, 8, 8, 1, 1024),
        (8, 8192, 1, 2, 8, 8, 1, 1024),
        (16, 8192, 2, 2, 8, 8, 8, 1024),
        (32, 8192, 4, 2, 8, 8, 8, 1024),
        (64, 8192, 8, 2, 8, 8, 8, 1024),
        (64, 8192, 8, 2, 8, 16, 8, 2048),
        (64, 8192, 8, 2, 8, 32, 8, 4096),
    ]
    times = {
        "bf16": (24.03, 21.52, 10.64, 20.64, 20.64, 20.7, 20.83, 21.0, 21.09),
        "fp8": (19.89, 17.08, 8.3, 16.21, 16.48, 16.55, 16.69, 16.89, 17.04),
    }
    for precision, measured in times.items():
        for (layers, tokens, p, c, e, d, v, samples), seconds in zip(sizes, measured, strict=True):
            yield PublishedRun(
                source="NVIDIA/dgxc-benchmarking",
                name=f"Grok-1, {precision}",
                shape=replace(GROK_1, num_layers=layers, sequence_length=tokens),
                cluster=H100,
                recipe=replace(MEGATRON_CORE, precision=precision),
                global_batch_size=samples,
                tensor_parallel=4,
                pipeline_parallel=p,
                data_parallel=d,
                context_parallel=c,
                expert_parallel=e,
                micro_batch_size=1,
                interleave=v,
                recompute="none",
                seconds=seconds,
            )


def _small_experts() -> Iterator[PublishedRun]:
    """Models with many small experts.

    * NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, H100, 25.11 and 26.02: tokens/s per GPU.
    * DeepSeek-V3: arXiv 2412.19437, section 1: 180,000 hours of an H800 for 10^12 tokens; section 3.1: its layout.
    """
    bridge, own = "NVIDIA-NeMo/Megatron-Bridge", "arXiv 2412.19437"
    h800 = replace(H100, name="H800-SXM", intra_bandwidth=200e9)
    for source, name, shape, cluster, precision, p, d, e, v, b, samples, rate in (
        (bridge, "Qwen3 30B-A3B", QWEN3_30B, H100, "fp8", 2, 8, 8, 24, 2, 512, 5275.0),
        (bridge, "Qwen3 30B-A3B", QWEN3_30B, H100, "fp8", 2, 8, 8, 12, 1, 1024, 5113.0),
        (bridge, "GPT-OSS 120B", GPT_OSS_120B, H100, "bf16", 4, 16, 8, 1, 4, 512, 5630.0),
        (bridge, "GPT-OSS 120B", GPT_OSS_120B, H100, "bf16", 4, 16, 8, 1, 1, 1280, 5993.0),
        (own, "DeepSeek-V3", DEEPSEEK_V3, h800, "fp8", 16, 128, 64, 1, 1, 15360, 1e12 / 180e3 / 3600),
    ):
        yield PublishedRun(
            source=source,
            name=name,
            shape=shape,
            cluster=cluster,
            recipe=replace(MEGATRON_CORE, precision=precision),
            global_batch_size=samples,
            tensor_parallel=1,
            pipeline_parallel=p,
            data_parallel=d,
            expert_parallel=e,
            micro_batch_size=b,
            interleave=v,
            recompute="none",
            seconds=samples * shape.sequence_length / rate / (p * d),
            fits=False,
        )


EXPERTS: tuple[PublishedRun, ...] = (*_grok(), *_small_experts())
"""Mixtures of experts. No constant was fitted to them."""


def _fully_sharded() -> Iterator[PublishedRun]:
    """MosaicML's MPT with PyTorch FSDP in eager mode, s = 2048, V = 50,368, without recomputation: tokens/s.

    Layers and hidden sizes are those that yield exactly the published numbers of parameters.
    """
    for name, layers, hidden, heads, workers, b, batch, tokens_per_second in (
        ("MPT 1B", 24, 2048, 16, 8, 14, 112, 363_645),
        ("MPT 3B", 32, 2560, 20, 16, 10, 480, 386_285),
        ("MPT 7B", 32, 4096, 32, 8, 6, 48, 85_144),
        ("MPT 13B", 40, 5120, 40, 8, 2, 16, 38_336),
        ("MPT 13B", 40, 5120, 40, 64, 2, 128, 307_209),
    ):
        yield PublishedRun(
            source="mosaicml/llm-foundry",
            name=name,
            shape=replace(gpt(layers, hidden, heads), vocabulary_size=50368),
            cluster=H100,
            recipe=MEGATRON_CORE,
            global_batch_size=batch,
            tensor_parallel=1,
            pipeline_parallel=1,
            data_parallel=workers,
            micro_batch_size=b,
            interleave=1,
            recompute="none",
            seconds=batch * 2048 / tokens_per_second,
            fits=False,  # FSDP divides more state than the recipe assumes
        )


# scripts/train/benchmarking/README.md there, "H100 80GB BF16".
OTHER_SOFTWARE: tuple[PublishedRun, ...] = tuple(_fully_sharded())


@dataclass(frozen=True, kw_only=True)
class ScalingRun:
    """A published run whose configuration is left to the search.

    Attributes:
        name: the model.
        shape, cluster, global_batch_size, num_workers: the model, the machines, and the size.
        seconds: duration of an optimizer step.
    """

    name: str
    shape: ModelShape
    cluster: Hardware
    global_batch_size: int
    num_workers: int
    seconds: float


def _megascale() -> Iterator[ScalingRun]:
    """Megatron-LM as MegaScale's authors ran it: arXiv 2402.15627, tables 1 and 2 (175B) and figure 9 (530B, MFU)."""
    gpt_175b = replace(gpt(96, 12288, 128), vocabulary_size=64000)
    gpt_530b = replace(gpt(105, 20480, 160), vocabulary_size=64000)
    strong = {256: 40.0, 512: 21.2, 768: 15.2, 1024: 11.9, 3072: 29.02, 6144: 14.78, 8192: 12.24, 12288: 8.57}
    for workers, seconds in strong.items():
        batch = 768 if workers <= 1024 else 6144
        yield ScalingRun(
            name="GPT 175B",
            shape=gpt_175b,
            cluster=A100,
            global_batch_size=batch,
            num_workers=workers,
            seconds=seconds,
        )
    for workers, utilization in {2240: 0.492, 4480: 0.488, 11200: 0.482}.items():
        flops = gpt_530b.step_flops(workers)
        yield ScalingRun(
            name="GPT 530B",
            shape=gpt_530b,
            cluster=A100,
            global_batch_size=workers,
            num_workers=workers,
            seconds=flops / workers / A100.peak("bf16") / utilization,
        )


MEGASCALE: tuple[ScalingRun, ...] = tuple(_megascale())
"""Used for nothing but the losses that grow with size, and the error of the search."""


def _held_out() -> Iterator[ScalingRun]:
    """Runs of other authors, from what they or their repositories state; no constant was fitted to them.

    * MT-NLG: arXiv 2201.11990, section 2.4, as quoted in cli99/llm-analysis, examples/megatron-turing-nlg/README.md.
    * BLOOM: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md: 48 nodes, TP 4, PP 12, DP 8, 112
      heads.
    * Megatron-LLaMA: alibaba/Megatron-LLaMA, README.md: tokens/s per GPU, at 32 GPUs from 40.3 h for 10 billion tokens;
      batches of 2,048 samples, there as in LLaMA's training (4 million tokens).
    """
    mt_nlg = gpt(105, 20480, 128)
    for workers, seconds in {2240: 60.1, 2800: 50.2, 3360: 44.4}.items():
        yield ScalingRun(
            name="MT-NLG 530B",
            shape=mt_nlg,
            cluster=A100,
            global_batch_size=1920,
            num_workers=workers,
            seconds=seconds,
        )
    yield ScalingRun(
        name="BLOOM 176B",
        shape=replace(gpt(70, 14336, 112), vocabulary_size=250680, learned_positions=False),
        cluster=A100,
        global_batch_size=2048,
        num_workers=384,
        seconds=104.5,
    )
    llama_13b = replace(llama(40, 5120, 40, 13824, kv_heads=0), sequence_length=2048, vocabulary_size=32000)
    rates = {
        "overlapped": {32: 1e10 / (40.3 * 3600 * 32), 256: 1890.0, 512: 1845.0},
        "not overlapped": {256: 1630.0, 512: 1430.0},
    }
    for name, by_workers in rates.items():
        for workers, rate in by_workers.items():
            yield ScalingRun(
                name=f"Megatron-LLaMA 13B, {name}",
                shape=llama_13b,
                cluster=A100,
                global_batch_size=2048,
                num_workers=workers,
                seconds=2048 * 2048 / rate / workers,
            )


HELD_OUT: tuple[ScalingRun, ...] = tuple(_held_out())


def searched(run: ScalingRun | PublishedRun, scaling_loss: float = SCALING_LOSS) -> float:
    """Return the seconds of a step with the configuration that the search finds best, by the default recipe."""
    model = TransformerModel(
        shape=run.shape, cluster=run.cluster, global_batch_size=run.global_batch_size, scaling_loss=scaling_loss
    )
    return model.step_flops / model.throughput(run.num_workers)


# Korthikanti et al. 2022, table 4: milliseconds of one layer of the 22B model, b = 4, t = 8: (recipe, recomputation,
# pass, milliseconds). Sequence parallelism is MEGATRON_2022.
LAYER_TIMES: tuple[tuple[Recipe, Recompute, str, float], ...] = (
    (MEGATRON_2021, "none", "forward", 7.7),
    (MEGATRON_2021, "none", "backward", 11.9),
    (MEGATRON_2022, "none", "forward", 7.2),
    (MEGATRON_2022, "none", "backward", 11.8),
    (MEGATRON_2021, "full", "backward", 19.5),
    (MEGATRON_2021, "selective", "backward", 13.2),
    (MEGATRON_2022, "selective", "backward", 13.1),
)


def predict_layer(recipe: Recipe, recompute: Recompute) -> dict[str, float]:
    """The model's milliseconds for `LAYER_TIMES`, by pass."""
    layouts = layouts_of(
        ParallelConfiguration(
            tensor_parallel=8, pipeline_parallel=1, data_parallel=1, micro_batch_size=4, recompute=recompute
        )
    )
    forward, backward = layer_seconds(gpt(48, 6144, 64), A100, recipe, layouts)
    return {"forward": 1e3 * float(forward[0]), "backward": 1e3 * float(backward[0])}
