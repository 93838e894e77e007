"""Measure the strategy's failure-free cost: steps per second against Lightning's ``ddp``, in one run.

    python benchmarks/overhead.py [--sizes 1M 10M] [--buckets 1 5 25] [--pairs 8] [--launches 5]
    python benchmarks/overhead.py --workers 8 --accumulate 4 --buckets 25 --pairs 5
    python benchmarks/overhead.py --jobs watched unwatched --sizes 1M --buckets 25 --launches 8
    python benchmarks/overhead.py --jobs memory unicron --sizes 10M --buckets 25 --steps 20
    python benchmarks/overhead.py --jobs beside saved --sizes 10M --buckets 25 --steps 20 --pairs 4
    python benchmarks/overhead.py --jobs loop plain --sizes 10M --buckets 25 --launches 3
    python benchmarks/overhead.py --accelerator gpu --sizes 100M --buckets 25 --launches 3

The second command has more workers and micro-batches. The third one measures the cost of all monitoring: ``watched``
adds the callbacks, ``unwatched`` has neither the callbacks nor the statistics of steps. The fourth one measures states
in the agents' memory, staged every ten steps: its ratio is that of mean step times, and ``stall`` is the share of the
time for which the training thread stages. The fifth one saves every ten steps by UnicronCheckpoint and ModelCheckpoint:
``stall_ratio`` is the time of the saves on the training thread, of the former to the latter. The sixth one compares a
loop of `unicron_lightning.Run` to one written by hand with DDP, both without Lightning. The last one runs both ranks on
one GPU with bf16 and a fused AdamW.

Both jobs exist at the same time with as many workers each, but only one computes. They alternate in short segments
(unicron, ddp, ddp, unicron, ...), so that other load on the machine affects both alike. A launch's ratio is that of the
two median step times, with the 95 % interval of a bootstrap over pairs of segments. Pairs of processes differ by
several per cent whichever job they run (heap layout, placement of threads), and keep the difference for their lifetime.
The figure is therefore the median over several launches, with the lowest and the highest.

glibc returns freed memory to the kernel or not depending on the layout of the heap. For tens of MB of gradients this
costs or saves milliseconds of page faults per step in either job; ``--malloc keep`` makes both keep freed memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from measure import Figures

from unicron_lightning.local_cluster.processes import Processes, free_port

HERE = Path(__file__).resolve().parent
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000"}
WARM_UP = 2
"""Steps at the start of a segment that are not counted."""
NAMES = ("unicron", "ddp", "watched", "unwatched", "memory", "beside", "saved", "loop", "plain")
JOBS = ("unicron", "ddp")
"""Jobs that are compared; the ratio is that of the first to the second."""


class Job:
    """One of the two jobs; computes only during `segment`."""

    def __init__(
        self, name: str, folder: Path, arguments: Sequence[str], malloc: dict[str, str], workers: int = 2
    ) -> None:
        self.name = name
        self._segments = 0
        environment = {
            "OMP_NUM_THREADS": "1",
            "BENCH_LOG": str(folder.resolve()),
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": "lo",
            "UNICRON_STATE_DIR": str(folder.resolve() / "coordinator"),
            "UNICRON_PREPARE": "0",  # imports beside the first steps would be measured, too
            **malloc,
        }
        self.processes = Processes(folder, environment, inside=True)
        back_end = "c10d" if name in ("ddp", "plain") else "unicron"
        script = "job_loop_overhead.py" if name in ("loop", "plain") else "job_overhead.py"
        on_gpu = malloc.get("BENCH_ACCELERATOR") == "gpu"
        # NCCL takes the ranks of one GPU for those of several hosts only if each has an agent with a host id.
        agents = workers if on_gpu else 1
        torchrun: list[str | Path] = [Path(sys.executable).parent / "torchrun"]
        torchrun += [f"--nproc-per-node={workers // agents}", f"--nnodes={agents}:{agents}"]
        torchrun += [f"--rdzv-backend={back_end}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=bench"]
        for number in range(agents):
            words = [*torchrun, HERE / script, name, *arguments]
            self.processes.start("agent" if number == 0 else f"agent{number}", words, NCCL_HOSTID=f"{name}{number}")

    def segment(self, seconds: float = 120.0) -> tuple[list[float], float, float]:
        """Let the job compute one segment.

        Returns:
            The times of its steps, rank 0's mean CPU time per step, and its time for states in memory, in seconds.

        Raises:
            TimeoutError: the segment has not ended in time; the message names the folder of the logs.
        """
        folder, number = self.processes.folder, self._segments
        (folder / f"go_{number}").touch()
        result = folder / f"segment_{number}.json"
        deadline = time.monotonic() + seconds
        while not result.exists():
            if time.monotonic() > deadline or self.processes.started["agent"].poll() is not None:
                raise TimeoutError(f"{self.name}: no segment {number} within {seconds:g} s; logs in {folder}")
            time.sleep(0.01)
        self._segments += 1
        ends = json.loads(result.read_text())[WARM_UP - 1 :]
        times = [b[0] - a[0] for a, b in itertools.pairwise(ends)]
        return times, (ends[-1][1] - ends[0][1]) / len(times), ends[-1][2] - ends[0][2]


def compare(
    size: str,
    bucket_mib: float,
    accumulate: int,
    pairs: int,
    steps: int,
    folder: Path,
    malloc: dict[str, str] | None = None,
    names: tuple[str, str] = JOBS,
    workers: int = 2,
) -> Figures:
    """Run both jobs in turns with one setting; ``malloc`` is added to both jobs' environment."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [size, str(bucket_mib), str(accumulate), str(steps + WARM_UP)]
    jobs: dict[str, Job] = {}
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    stall = dict.fromkeys(names, 0.0)
    load = os.getloadavg()[0]
    try:
        for name in names:
            jobs[name] = Job(name, folder / name, words, malloc or {}, workers)
        for job in jobs.values():
            job.segment()
        for pair in range(pairs):
            for name in names if pair % 2 == 0 else names[::-1]:
                wall, used, stalled = jobs[name].segment()
                stall[name] += stalled
                times[name].append(wall)
                cpu[name].append(used)
    finally:
        for job in jobs.values():
            (job.processes.folder / "stop").touch()
        for job in jobs.values():
            job.processes.stop()
    average = statistics.fmean if {"memory", "beside", "saved"} & set(names) else statistics.median
    ratio, low, high = ratio_of_speeds(*(times[name] for name in names), average)
    return {
        "size": size,
        "workers": workers,
        "bucket_mib": bucket_mib,
        "accumulate": accumulate,
        "pairs": pairs,
        "steps_per_segment": steps,
        "load": round(load, 2),
        "jobs": names,
        "steps_per_s": [round(1 / statistics.median(itertools.chain(*times[name])), 3) for name in names],
        "cpu_ms": [round(1e3 * statistics.median(cpu[name]), 2) for name in names],
        "stall": [round(stall[name] / sum(itertools.chain(*times[name])), 4) for name in names],
        "stall_ratio": round(stall[names[0]] / stall[names[1]], 4) if stall[names[1]] else None,
        "ratio": round(ratio, 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }


def ratio_of_speeds(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    average: Callable[[Iterable[float]], float] = statistics.median,
    draws: int = 2000,
) -> tuple[float, float, float]:
    """Ratio of the second job's average step time to the first's, with its 95 % interval over resampled pairs of
    segments.
    """
    generator, pairs = random.Random(0), list(zip(ours, theirs, strict=True))

    def ratio(chosen: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        mine = average(itertools.chain.from_iterable(pair[0] for pair in chosen))
        return average(itertools.chain.from_iterable(pair[1] for pair in chosen)) / mine

    drawn = sorted(ratio(generator.choices(pairs, k=len(pairs))) for _ in range(draws))
    return ratio(pairs), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)]


def series(
    sizes: Sequence[str],
    buckets: Sequence[float],
    accumulate: int,
    pairs: int,
    steps: int,
    output: Path,
    malloc: dict[str, str] | None = None,
    names: tuple[str, str] = JOBS,
    launches: int = 1,
    workers: int = 2,
) -> list[Figures]:
    """Compare the jobs for every size and bucket size, over ``launches`` launches each."""
    results: list[Figures] = []
    for size, bucket in itertools.product(sizes, buckets):
        folder = output / f"{size}-{bucket:g}"
        runs = []
        for _ in range(launches):
            runs.append(compare(size, bucket, accumulate, pairs, steps, folder, malloc, names, workers))
            print(json.dumps(runs[-1]), flush=True)
        results.append(summed_up(runs))
    return results


def summed_up(runs: Sequence[Figures]) -> Figures:
    """Medians over launches.

    ``low`` and ``high`` are the extremes of the launches' ratios, or the interval of a single launch.
    """
    if len(runs) == 1:
        return {**runs[0], "launches": 1}
    ratios = [run["ratio"] for run in runs]

    def medians(key: str) -> list[float]:
        return [statistics.median(run[key][job] for run in runs) for job in range(2)]

    return {
        **runs[0],
        "launches": len(runs),
        "steps_per_s": medians("steps_per_s"),
        "cpu_ms": medians("cpu_ms"),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def table(results: Sequence[Figures]) -> str:
    """The results as a Markdown table."""
    ours, theirs = results[0]["jobs"]
    titles = ["model", "workers", "bucket MiB", "micro-batches per worker", f"{ours} steps/s", f"{theirs} steps/s"]
    launches = results[0]["launches"]
    titles.append("ratio [95 %]" if launches == 1 else f"ratio [lowest-highest of {launches}]")
    titles += [f"{ours} CPU ms per step", f"{theirs} CPU ms per step"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += [
        f"| {r['size']} | {r['workers']} | {r['bucket_mib']:g} | {r['accumulate']} | {r['steps_per_s'][0]:.2f} | "
        f"{r['steps_per_s'][1]:.2f} | {r['ratio']:.3f} [{r['low']:.3f}-{r['high']:.3f}] | "
        f"{r['cpu_ms'][0]:.1f} | {r['cpu_ms'][1]:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the series and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1M", "10M"])
    parser.add_argument("--buckets", nargs="+", type=float, default=[1.0, 5.0, 25.0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of segments per launch")
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="counted steps per segment")
    parser.add_argument("--jobs", nargs=2, default=JOBS, choices=NAMES)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--malloc", choices=("default", "keep"), default="default")
    parser.add_argument("--output", type=Path, default=Path("bench-output/overhead"))
    arguments = parser.parse_args()
    extra = KEEP_FREED if arguments.malloc == "keep" else {}
    if arguments.accelerator == "gpu":
        one_gpu = json.loads((HERE / "one_gpu.json").read_text(encoding="utf-8"))
        extra = {**extra, **one_gpu, "BENCH_ACCELERATOR": "gpu"}
    print(
        table(
            series(
                arguments.sizes,
                arguments.buckets,
                arguments.accumulate,
                arguments.pairs,
                arguments.steps,
                arguments.output,
                extra,
                tuple(arguments.jobs),
                arguments.launches,
                arguments.workers,
            )
        )
    )


if __name__ == "__main__":
    main()
