"""Compare the analytic performance model with published runs, and time its search.

    python benchmarks/planner_model.py [--runs 5]

Prints Markdown tables. The model's constants were fitted to the times marked as fitted and to nothing else. The sources
are listed in tests/planner/performance/published.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "planner"))

from performance.published import (
    CONTEXTS,
    EXPERTS,
    HELD_OUT,
    LAYER_TIMES,
    LLAMA_405B,
    MEGASCALE,
    OTHER_SOFTWARE,
    RUNS,
    PublishedRun,
    gpt,
    predict,
    predict_layer,
    searched,
)

from unicron_lightning.planner.performance.description import A800, H100, MEGATRON_2022
from unicron_lightning.planner.performance.transformer import SearchSpace, TransformerModel

GROUPS = {
    "arXiv 2104.04473, table 1 (A100, GPT 1.7B to 1T)": ("2104.04473",),
    "arXiv 2205.05198, table 5 (A100, GPT 22B to 1T)": ("2205.05198",),
    "NVIDIA/dgxc-benchmarking, bf16 (H100, 175B and 340B)": ("dgxc", "bf16"),
    "NVIDIA/dgxc-benchmarking, fp8 (H100, 175B and 340B)": ("dgxc", "fp8"),
    "arXiv 2407.21783, table 4 (H100, Llama 3 405B)": ("2407.21783",),
    "all": (),
}
EXPERT_GROUPS: dict[str, Callable[[PublishedRun], bool]] = {
    "NVIDIA/dgxc-benchmarking, bf16 (H100, Grok-1)": lambda run: run.name == "Grok-1, bf16" and run.num_workers >= 512,
    "NVIDIA/dgxc-benchmarking, fp8 (H100, Grok-1)": lambda run: run.name == "Grok-1, fp8" and run.num_workers >= 512,
    "the same, fewer layers on 8 to 256 GPUs": lambda run: "Grok-1" in run.name and run.num_workers < 512,
    "Megatron-Bridge (H100, Qwen3 30B-A3B, GPT-OSS 120B)": lambda run: "Bridge" in run.source,
    "arXiv 2412.19437 (H800, DeepSeek-V3)": lambda run: run.name == "DeepSeek-V3",
}
ELSEWHERE = "mosaicml/llm-foundry (H100, PyTorch FSDP, not Megatron, thus outside the model)"


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="searches per figure")
    arguments = parser.parse_args()
    for part in (fitted(), predicted(), summary(), free_search(), searches(arguments.runs)):
        print("\n".join(part), end="\n\n")


def fitted() -> Iterator[str]:
    """Yield the table of times that the constants were fitted to."""
    yield "| one layer of GPT 22B on 8 A100 (arXiv 2205.05198, table 4): fitted | published | model | error |"
    yield "|---|---:|---:|---:|"
    for recipe, again, which, published in LAYER_TIMES:
        milliseconds = predict_layer(recipe, again)[which]
        sequence = "with" if recipe is MEGATRON_2022 else "without"
        name = f"{which}, {again} recomputed, {sequence} sequence parallelism"
        yield f"| {name} | {published:.1f} ms | {milliseconds:.1f} ms | {percent(milliseconds / published - 1)} |"


def predicted() -> Iterator[str]:
    """Yield the table of predicted runs."""
    yield "| source | run | workers | TP x PP x DP x CP | EP | b | v | published | predicted | error |"
    yield "|---|---|---:|---|---:|---:|---:|---:|---:|---:|"
    for run in (*RUNS, *CONTEXTS, *EXPERTS, *OTHER_SOFTWARE):
        prediction = predict(run)
        used = prediction.configuration
        cells = (
            run.source,
            run.name,
            f"{run.num_workers:,}",
            f"{used.tensor_parallel} x {used.pipeline_parallel} x {used.data_parallel} x {used.context_parallel}",
            f"{used.expert_parallel}",
            f"{used.micro_batch_size}{'' if run.micro_batch_size else '*'}",
            f"{used.interleave}{'' if run.interleave else '*'}",
            f"{run.seconds:.2f} s",
            f"{prediction.seconds:.2f} s",
            percent(error(run)),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "`*`: not published; the fastest value that divides (and fits) is used."


def summary() -> Iterator[str]:
    """Yield the table of errors by source."""
    yield "| published runs | number | root mean square error | mean | worst |"
    yield "|---|---:|---:|---:|---:|"
    for name, words in GROUPS.items():
        yield _summary(name, [run for run in RUNS if all(word in f"{run.source} {run.name}" for word in words)])
    yield _summary("Megatron-Bridge, context parallelism (H100, Llama 3.1 405B, fp8)", CONTEXTS)
    for name, chosen in EXPERT_GROUPS.items():
        yield _summary(name, [run for run in EXPERTS if chosen(run)])
    yield _summary(ELSEWHERE, OTHER_SOFTWARE)


def _summary(name: str, runs: Sequence[PublishedRun]) -> str:
    errors = [error(run) for run in runs]
    rms = math.sqrt(statistics.fmean(value**2 for value in errors))
    cells = (
        name,
        f"{len(errors)}",
        f"{100 * rms:.1f} %",
        percent(statistics.fmean(errors)),
        percent(max(errors, key=abs)),
    )
    return f"| {' | '.join(cells)} |"


def free_search() -> Iterator[str]:
    """Yield the table of errors where the search chooses the configuration, by the default recipe."""
    yield "| free search (A100) | workers | published | predicted | error | without losses by size |"
    yield "|---|---:|---:|---:|---:|---:|"
    for run in (*MEGASCALE, *HELD_OUT):
        seconds, lossless = searched(run), searched(run, scaling_loss=0.0)
        cells = (run.name, f"{run.num_workers:,}", f"{run.seconds:.2f} s", f"{seconds:.2f} s")
        errors = percent(seconds / run.seconds - 1), percent(lossless / run.seconds - 1)
        yield f"| {' | '.join((*cells, *errors))} |"
    yield ""
    by_nvidia = [run for run in RUNS if run.name == "GPT-3 175B, bf16"]
    for name, runs in {"MegaScale": MEGASCALE, "NVIDIA's 175B": by_nvidia, "held-out runs": HELD_OUT}.items():
        errors = [searched(run) / run.seconds - 1 for run in runs]
        rms = math.sqrt(statistics.fmean(value**2 for value in errors))
        yield f"Free search on {name}: root mean square {100 * rms:.1f} %, mean {percent(statistics.fmean(errors))}."


def searches(runs: int) -> Iterator[str]:
    """Yield the median times of a search for all numbers of workers, and of reading a curve of 12,500 nodes from it."""
    even, uneven = SearchSpace(), SearchSpace(uneven_shares=True)
    yield "| search, all numbers of workers at once | configurations kept | search | curve of 12,500 nodes |"
    yield "|---|---:|---:|---:|"
    for name, model in {
        "GPT 7.5B, 512 samples, A800": model_of(gpt(36, 4096, 32), A800, 512, even),
        "GPT 175B, 1,536 samples, H100": model_of(gpt(96, 12288, 96), H100, 1536, even),
        "GPT 175B, 1,536 samples, H100, uneven shares": model_of(gpt(96, 12288, 96), H100, 1536, uneven),
        "Llama 3 405B, 2,048 samples, H100": model_of(LLAMA_405B, H100, 2048, even),
    }.items():
        search_seconds, curve_seconds = [], []
        for _ in range(runs):
            fresh = model_of(model.shape, model.cluster, model.global_batch_size, model.space)
            start = time.perf_counter()
            kept = len(fresh.counts)
            middle = time.perf_counter()
            for nodes in range(12_501):
                fresh.throughput(8 * nodes)
            search_seconds.append(middle - start)
            curve_seconds.append(time.perf_counter() - middle)
        times = (1e3 * statistics.median(seconds) for seconds in (search_seconds, curve_seconds))
        yield f"| {name} | {kept} | {' | '.join(f'{milliseconds:.0f} ms' for milliseconds in times)} |"


def model_of(shape, cluster, global_batch_size: int, space: SearchSpace) -> TransformerModel:
    return TransformerModel(shape=shape, cluster=cluster, global_batch_size=global_batch_size, space=space)


def error(run: PublishedRun) -> float:
    """Relative error of the predicted duration of a step."""
    return predict(run).seconds / run.seconds - 1


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


if __name__ == "__main__":
    main()
