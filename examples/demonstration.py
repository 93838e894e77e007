"""Shared by examples: a command line with --demo, which trains with and without a kill and compares the results."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAST = "last.ckpt"
"""File in a training's folder that it writes at its end."""


class Uses(nn.Module):
    """Counts how often each sample has been used, as a model learns: the evidence that a demonstration prints.

    A use adds one to the gradient of the sample's count. With ``SGD(uses.parameters(), lr=M, maximize=True)``, where M
    is the number of micro-batches over which the loss is a mean, a step adds its uses to the counts.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(samples))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return zero, for the loss."""
        used = self.counts[numbers].sum()
        return used - used.detach()


def main(description: str | None, train: Callable[[int, Path], None], *, workers: int = 0) -> None:
    """Train as the command line asks for, or compare two trainings of this script.

    Args:
        description: for ``--help``.
        train: trains for a number of steps, with checkpoints in a folder.
        workers: of the comparison; 0: the script has none.
    """
    parser = command_line(description)
    options = parser.parse_args()
    if not options.demo:
        options.folder.mkdir(parents=True, exist_ok=True)
        train(options.steps, options.folder)
    elif workers:
        compare([Path(sys.argv[0])], options.steps, workers=workers)
    else:
        parser.error("--demo: a failure would end this script; use the one with recovery")


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all demonstrations."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="folder of the checkpoints")
    parser.add_argument("--demo", action="store_true", help="run a cluster on this machine, and kill a worker")
    return parser


def last_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the models in a training's folder."""
    return dict(_tensors("", torch.load(folder / LAST, weights_only=True)))


def compare(
    command: Sequence[str | Path],
    steps: int,
    *,
    workers: int,
    least: int = 1,
    spare: int = 0,
    results: Callable[[Path], dict[str, Tensor]] = last_checkpoint,
) -> None:
    """Train twice, the first time with a kill, and print the differences.

    Args:
        command: of the script, which gets ``--steps`` and ``--folder`` and writes a checkpoint `LAST`.
        steps: optimizer steps.
        workers: of the task, each on a node of its own.
        least: workers with which the task continues.
        spare: nodes that wait for a failure.
        results: of a training, from its folder: the parameters and, if it keeps them, ``losses`` of all steps.
    """
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        print(f"{workers} workers, {steps} steps; a worker is killed")
        words = [*command, "--steps", str(steps)]
        folders = Path(name) / "struck", Path(name) / "calm"
        _train(words, folders[0], f"{least}:{workers}", workers + spare, kill_after=steps // 4)
        print("the same training without a failure")
        _train(words, folders[1], f"{least}:{workers}", workers, kill_after=None)
        struck, calm = map(results, folders)
    if "losses" in calm:
        apart = float((struck.pop("losses") - calm.pop("losses")).abs().max())
        print(f"largest difference of a step's loss: {apart:.1e}")
    worst = max(float((struck[key] - calm[key]).abs().max()) for key in calm)
    print(f"largest difference of a parameter: {worst:.1e}")
    for key in [key for key in struck if key.endswith("uses.counts")]:
        counts = struck[key].round().int().bincount().tolist()
        uses = ", ".join(f"{number} samples {times} times" for times, number in enumerate(counts) if number)
        print(f"uses with the failure: {uses}")


def _train(command: Sequence[str | Path], folder: Path, nnodes: str, nodes: int, *, kill_after: int | None) -> None:
    """Train on a cluster of this machine."""
    from unicron_lightning import LocalCluster  # not at the top: workers do not need it

    folder.mkdir()
    workers = int(nnodes.partition(":")[2])
    with LocalCluster([*command, "--folder", folder], nodes=nodes, nnodes=nnodes, folder=folder) as cluster:
        if kill_after is not None:
            step = cluster.wait_step(kill_after, seconds=300)
            cluster.kill_worker(cluster.wait_workers(workers)[1])
            print(f"killed a worker after step {step}", flush=True)
        exits = cluster.wait_exit(seconds=600)
        assert set(exits.values()) == {0}, exits
        for event in cluster.events("incident_closed"):
            bill = event["fields"]
            if bill["stepped_at"] is None:
                continue  # the training ended first
            resumed, whole = bill["stepped_at"] - bill["fault_at"], event["at"] - bill["fault_at"]
            print(f"next step after {1e3 * resumed:.0f} ms, all workers are back after {whole:.1f} s")
        print(*sorted({*re.findall(r"finished \d+ steps.*", "".join(map(cluster.log, exits)))}))


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of models in a checkpoint of Lightning or of a loop."""
    if isinstance(value, dict):
        parts = value if name or "state_dict" not in value else {"state_dict": value["state_dict"]}
        return [each for key, part in parts.items() for each in _tensors(f"{name}.{key}".lstrip("."), part)]
    return [(name, value)] if isinstance(value, Tensor) and value.is_floating_point() else []
