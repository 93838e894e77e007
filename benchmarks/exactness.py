"""Kill five workers in 50 steps and compare the result with that of a failure-free run.

    python benchmarks/exactness.py [--size tiny] [--steps 50] [--eps 1e-8]

Both runs train the same small GPT in float32 with AdamW: three workers, six micro-batches per step. The workers are
killed by SIGKILL at five points of the step: after a micro-batch, during the reduction of gradients, after the
reduction, before the commit and after it. The loss curves are written as one picture.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import Figures

from unicron_lightning.local_cluster.cluster import LocalCluster

HERE = Path(__file__).resolve().parent
NODES = 3
POINTS = ("micro_batch", "launched", "reduced", "commit", "committed")
SLOTS = ("2", "0", "1", "2", "0")
"""Slot of the worker that is killed at each point; slot 0 is rank 0 at first."""
RUN_SECONDS = 240.0


def faults(steps: int) -> list[str]:
    """Faults spread over the first three quarters of the run, in the syntax of job_exactness.py."""
    distance = steps * 3 // 4 // len(POINTS)
    pairs = enumerate(zip(SLOTS, POINTS, strict=True), 1)
    return [f"{slot}:{number * distance}:{point}" for number, (slot, point) in pairs]


def train(folder: Path, size: str, steps: int, eps: float, kills: Sequence[str]) -> float:
    """Run one training; return its duration in seconds.

    Raises:
        TimeoutError: the training has not ended in time; the message names the folder of the logs.
    """
    environment = {
        "OMP_NUM_THREADS": "1",
        "BENCH_LOG": str(folder.resolve()),
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    # Without faults the world is complete from the first step to the last; with faults two workers may continue alone.
    with LocalCluster(
        [HERE / "job_exactness.py", size, str(eps), str(steps), *kills],
        nodes=0,
        nnodes=f"{1 if kills else NODES}:{NODES}",
        max_restarts=100,
        environment=environment,
        folder=folder,
    ) as cluster:
        for slot in range(NODES):
            cluster.start_node(f"n{slot}", BENCH_SLOT=str(slot))
        cluster.wait_exit(RUN_SECONDS)
        return time.monotonic() - started


def losses(folder: Path) -> dict[int, float]:
    """Losses by step.

    Raises:
        ValueError: two workers report different losses for a step.
    """
    found: dict[int, float] = {}
    for path in folder.glob("losses_*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if found.setdefault(line["step"], line["loss"]) != line["loss"]:
                raise ValueError(f"step {line['step']} has the losses {found[line['step']]} and {line['loss']}")
    return dict(sorted(found.items()))


def largest_difference(folder: Path, reference: Path) -> float:
    """Largest difference between any worker's parameters and those of the reference."""
    expected = torch.load(reference / "parameters_0.pt", weights_only=True)
    return max(
        float((mine.double() - other.double()).abs().max())
        for path in folder.glob("parameters_*.pt")
        for mine, other in zip(torch.load(path, weights_only=True), expected, strict=True)
    )


def compare(output: Path, size: str, steps: int, eps: float) -> Figures:
    """Run both trainings and compare them."""
    calm, hit = output / "without", output / "with"
    kills = faults(steps)
    train(calm, size, steps, eps, [])
    seconds = train(hit, size, steps, eps, kills)
    ours, reference = losses(hit), losses(calm)
    struck = [int((hit / f"fault_{k}").read_text()) for k in range(len(kills)) if (hit / f"fault_{k}").exists()]
    plot(reference, ours, struck, output / "losses.png")
    return {
        "size": size,
        "steps": steps,
        "eps": eps,
        "faults": len(struck),
        "fault_steps": struck,
        "seconds_with_faults": round(seconds, 1),
        "every_step": list(ours) == list(reference) == list(range(1, steps + 1)),
        "largest_parameter_difference": largest_difference(hit, calm),
        "largest_loss_difference": max(abs(ours[step] - reference[step]) for step in reference if step in ours),
        "between_workers": largest_difference(hit, hit),
        "last_loss": reference[max(reference)],
        "load": round(os.getloadavg()[0], 2),
    }


def plot(reference: dict[int, float], ours: dict[int, float], struck: Sequence[int], path: Path) -> None:
    """Draw both loss curves in one picture, with the faults marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(list(reference), list(reference.values()), color="0.75", linewidth=5, label="without failures")
    axes.plot(list(ours), list(ours.values()), color="C0", linewidth=1.2, label=f"with {len(struck)} workers killed")
    for number, step in enumerate(struck):
        axes.axvline(step + 1, color="C3", linewidth=0.8, linestyle=":", label=None if number else "a worker is killed")
    axes.set(xlabel="optimizer step", ylabel="loss of the global batch")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(results: Sequence[Figures]) -> str:
    """The results as a Markdown table."""
    titles = ["model", "AdamW eps", "steps", "workers killed", "largest parameter difference"]
    titles += ["largest loss difference", "all workers alike"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += [
        f"| {r['size']} | {r['eps']:g} | {r['steps']}{'' if r['every_step'] else ' (some missing)'} | {r['faults']} | "
        f"{r['largest_parameter_difference']:.1e} | {r['largest_loss_difference']:.1e} | "
        f"{'yes' if r['between_workers'] == 0 else r['between_workers']} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Run both trainings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--output", type=Path, default=Path("bench-output/exactness"))
    arguments = parser.parse_args()
    result = compare(arguments.output, arguments.size, arguments.steps, arguments.eps)
    print(json.dumps(result), table([result]), sep="\n\n")


if __name__ == "__main__":
    main()
