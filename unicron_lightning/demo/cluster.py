"""The common parts of the two acts: local clusters whose workers' diaries are read, proofs from them, and pictures.

Proofs are pure functions over the lines of the diaries and results.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

from unicron_lightning import environ
from unicron_lightning.errors import CoordinatorUnavailable
from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

ProofLine = dict[str, Any]
"""A line of a worker's diary: an event, its time, its process, and what it is about."""


def micro_batches(lines: Iterable[ProofLine]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """The processes that computed each micro-batch, in order of time, by its step and samples."""
    workers: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    # Files are read one after the other, so a dead worker's last line may come behind later ones of survivors.
    for line in sorted((each for each in lines if each["event"] == "micro_batch"), key=lambda each: each["at"]):
        workers[line["step"], tuple(line["samples"])].append(line["pid"])
    return workers


def wasted(lines: Iterable[ProofLine], dead: set[int]) -> int:
    """Number of micro-batches that were recomputed although a worker that had finished them survived."""
    return sum(any(pid not in dead for pid in pids[:-1]) for pids in micro_batches(lines).values())


@dataclass(frozen=True, kw_only=True)
class WorkProof:
    """Micro-batches of a run.

    Attributes:
        needed: in all steps.
        computed: forward passes run.
        recomputed: computed by more than one worker, because the first died.
        wasted: recomputed although the worker that had computed it survived; must be 0.
        lost_samples, repeated_samples: per epoch, of the data set; must be 0.
    """

    needed: int
    computed: int
    recomputed: int
    wasted: int
    lost_samples: int
    repeated_samples: int


def prove_work(diary: Sequence[ProofLine], dead: set[int], steps_per_epoch: int) -> WorkProof:
    """Account for every micro-batch and sample.

    Args:
        diary: all lines of all workers.
        dead: processes that were killed.
        steps_per_epoch: optimizer steps in an epoch.
    """
    workers = micro_batches(diary)
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for step, samples in workers:
        used[step // steps_per_epoch].update(samples)
    every = set().union(*(set(counts) for counts in used.values()))
    return WorkProof(
        needed=len(workers),
        computed=sum(map(len, workers.values())),
        recomputed=sum(len(pids) > 1 for pids in workers.values()),
        wasted=wasted(diary, dead),
        lost_samples=sum(len(every - set(counts)) for counts in used.values()),
        repeated_samples=sum(count - 1 for counts in used.values() for count in counts.values() if count > 1),
    )


def loss_curve(diary: Iterable[ProofLine]) -> dict[int, float]:
    """Loss by step, which is the same on all workers."""
    return {line["step"]: line["loss"] for line in diary if line["event"] == "step"}


def worlds(diary: Iterable[ProofLine]) -> dict[int, int]:
    """Workers by step."""
    return {line["step"]: line["world"] for line in diary if line["event"] == "step"}


def step_times(diary: Iterable[ProofLine]) -> list[float]:
    """Time at which each step was first recorded as finished, in order."""
    first: dict[int, float] = {}
    for line in diary:
        if line["event"] == "step":
            first[line["step"]] = min(line["at"], first.get(line["step"], line["at"]))
    return sorted(first.values())


def longest_gap(times: Sequence[float], start: float, stop: float) -> float:
    """Longest time without a finished step that overlaps [start, stop], in seconds."""
    gaps = [b - a for a, b in pairwise(times) if b >= start and a <= stop]
    return max(gaps, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """Comparison of a run's final parameters with those of a reference.

    Attributes:
        largest_difference: over all parameters.
        identical: whether the run's own workers ended with bitwise equal parameters.
        losses: largest difference of the loss curves.
        val_losses: of the two runs.
    """

    largest_difference: float
    identical: bool
    losses: float
    val_losses: tuple[float, float]


def prove_exactness(run: Path, reference: Path, curves: tuple[dict[int, float], dict[int, float]]) -> Exactness:
    """Compare the results that the workers of two runs have saved."""
    mine = [torch.load(path) for path in sorted(run.glob("final-*.pt"))]
    other = torch.load(min(reference.glob("final-*.pt")))
    first = mine[0]["parameters"]
    differences = [
        float((first[name].double() - value.double()).abs().max()) for name, value in other["parameters"].items()
    ]
    identical = all(torch.equal(first[name], result["parameters"][name]) for result in mine for name in first)
    assert curves[0].keys() == curves[1].keys(), "the runs have different steps"
    return Exactness(
        largest_difference=max(differences),
        identical=identical,
        losses=max(abs(curves[0][step] - curves[1][step]) for step in curves[0]),
        val_losses=(mine[0]["val_loss"], other["val_loss"]),
    )


def report(console: Console, checks: Sequence[tuple[str, bool]]) -> bool:
    """Print each claim with its outcome; return whether all hold."""
    for text, passed in checks:
        console.print(f"[{'green' if passed else 'bold red'}]{'ok  ' if passed else 'FAIL'}[/] {text}")
    return all(passed for _, passed in checks)


matplotlib.use("Agg")

_COLORS = ("#08519c", "#e6550d")
_RED = "#cb181d"


def draw_losses(
    path: Path,
    curves: tuple[dict[int, float], dict[int, float]],
    worlds: dict[int, int],
    faults: list[tuple[int, str]],
) -> None:
    """Save the loss curves of two runs, with the faults and the world.

    Args:
        path: of the PNG file.
        curves: loss by step, with faults and without.
        worlds: workers by step.
        faults: (step in which it struck, name).
    """
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 6), sharex=True, height_ratios=[3, 1])
    broken, clean = curves
    top.plot(list(clean), list(clean.values()), color="#9ecae1", linewidth=5, label="no failure")
    top.plot(list(broken), list(broken.values()), color="#08519c", linewidth=1.2, label="three failures")
    top.set_ylabel("training loss (nats per byte)")
    top.legend(loc="upper right")
    top.set_title("One GPT trained twice: straight through failures, and without any")
    height = top.get_ylim()[1]
    for step, name in faults:
        _mark(step, top, bottom)
        top.annotate(name, (step, height), rotation=90, va="top", ha="right", fontsize=8, color=_RED)
    steps = sorted(worlds)
    bottom.step(steps, [worlds[step] for step in steps], where="mid", color="#238b45")
    bottom.set_ylim(0, max(worlds.values()) + 0.5)
    bottom.set_ylabel("workers")
    bottom.set_xlabel("optimizer step")
    _save(figure, path)


def draw_sharing(
    path: Path,
    worlds: Mapping[str, Sequence[tuple[float, int]]],
    waf: tuple[NDArray[np.float64], NDArray[np.float64]],
    moments: Sequence[tuple[float, str]],
) -> None:
    """Save each task's nodes and the resulting WAF.

    Args:
        path: of the PNG file.
        worlds: by task, (moment [s], workers that finished a step then).
        waf: moments [s] and weighted FLOP/s.
        moments: (moment [s], name of the event).
    """
    start = float(waf[0][0])
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 6), sharex=True)
    for (task, line), color in zip(worlds.items(), _COLORS, strict=True):
        times = [at - start for at, _ in line]
        top.step(times, [world for _, world in line], where="post", color=color, label=f"task {task}")
    top.set_ylabel("workers that train")
    top.set_ylim(0, None)
    top.legend(loc="center right")
    top.set_title("Two tasks share six nodes: the plan follows what happens")
    bottom.plot(waf[0] - start, waf[1] / 1e9, color="#238b45")
    bottom.set_ylabel("WAF (weighted GFLOP/s)")
    bottom.set_ylim(0, None)
    bottom.set_xlabel("seconds")
    for at, what in moments:
        _mark(at - start, top, bottom)
        bottom.annotate(what, (at - start, 0), rotation=90, va="bottom", ha="right", fontsize=8, color=_RED)
    _save(figure, path)


def _mark(at: float, *plots: Axes) -> None:
    """Mark a moment in each plot."""
    for axes in plots:
        axes.axvline(at, color=_RED, linestyle=":", linewidth=1.2)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class _Diary:
    """The lines of all workers of a task, in ``lines``.

    Args:
        folder: of the workers' files.
    """

    def __init__(self, folder: Path) -> None:
        self.lines: list[ProofLine] = []
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> None:
        """Add the new complete lines."""
        for path in sorted(self._folder.glob("worker-*.jsonl")):
            with path.open() as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole.encode())
            self.lines.extend(json.loads(line) for line in whole.splitlines())


class OneTask(LocalCluster):
    """Agents of one task with an embedded coordinator.

    Args:
        out: folder for logs, diaries and results.
        nodes: number of agents.
        arguments: of the training script.
    """

    def __init__(self, out: Path, nodes: int, arguments: Sequence[str] = ()) -> None:
        command = ["-m", "unicron_lightning.demo.train", *arguments, "--out", str(out), "--nodes", str(nodes)]
        super().__init__(command, nodes=nodes, task="demo", environment=ENVIRONMENT, folder=out)
        self._diary = _Diary(self.folder)

    @property
    def diary(self) -> list[ProofLine]:
        """Lines of all workers so far."""
        return self._diary.lines

    def wait(self, timeout: float) -> None:
        """Wait until all agents have exited.

        Raises:
            RuntimeError: an agent has failed; the message names its log.
            TimeoutError: the agents have not exited in ``timeout`` seconds.
        """
        failed = {node: code for node, code in self.wait_exit(timeout).items() if code}
        if failed:
            raise RuntimeError(f"agents ended with {failed}; logs are in {self.folder}")
        self._diary.read()

    def wait_line(self, condition: Callable[[], ProofLine | None], timeout: float = 120.0) -> None:
        """Read the diaries until ``condition`` returns a line."""

        def read() -> ProofLine | None:
            self._diary.read()
            return condition()

        until(f"a line of the diaries; logs are in {self.folder}", read, timeout, poll_seconds=0.001)

    def step(self) -> int:
        """Last finished step."""
        return max((line["step"] for line in self.diary if line["event"] == "step"), default=0)

    def worker(self, node: int) -> int:
        """Process of the node's present worker."""
        return int([x for x in self.diary if x["event"] == "start" and x["node"] == f"node{node}"][-1]["pid"])

    def strike(self, fault: str) -> float:
        """Inject a fault; return the time at which it was noted, just before it struck."""
        with contextlib.suppress(CoordinatorUnavailable):  # a killed coordinator does not answer
            self.inject(fault)
        return float(self.events("fault_injected")[-1]["at"])


class SharedNodes(LocalCluster):
    """A coordinator, daemons and submitted jobs, each with a diary in a folder of its name.

    Args:
        out: folder for logs, the coordinator's state and the tasks' own folders.
        nodes: number of nodes, each with one slot.
    """

    def __init__(self, out: Path, nodes: int) -> None:
        # The nodes share this machine's processors: imports of their prepared processes would slow the tasks whose
        # throughput the planner measures.
        super().__init__(nodes=nodes, environment={**ENVIRONMENT, environ.PREPARE: "0"}, folder=out)
        self._diaries: dict[str, _Diary] = {}

    # ---- actions

    def start_job(self, name: str, command: Sequence[str], **limits: float) -> None:
        """Submit a job, whose output goes to its folder."""
        folder = self.folder / name
        folder.mkdir()
        self._diaries[name] = _Diary(folder)
        self.submit(name, [*command, "--out", str(folder)], **limits)

    def stop(self, task: str) -> float:
        """End a task's training successfully; return the time."""
        (self.folder / task / "stop").touch()
        return time.time()

    # ---- observations

    def world(self, task: str, after: float = 0.0) -> int:
        """Number of workers that finished the task's last step, if it was later than ``after``."""
        steps = self.steps(task)
        return int(steps[-1]["world"]) if steps and steps[-1]["at"] > after else 0

    def wait_worlds(self, worlds: Mapping[str, int], timeout: float = 150.0) -> float:
        """Wait until each named task has finished a new step with the given number of workers; return the start of the
        wait.

        Raises:
            TimeoutError: a task has not within ``timeout`` seconds; the message names it and the folder of the logs.
        """
        since = time.time()
        for task, size in worlds.items():
            self.until(f"{task} with {size} workers", partial(self._trains, task, size, since), timeout)
        return since

    def diary(self, task: str) -> list[ProofLine]:
        """Lines of all workers of a task so far."""
        self._diaries[task].read()
        return self._diaries[task].lines

    def steps(self, task: str) -> list[ProofLine]:
        """The finished steps, each once, in order."""
        first: dict[int, ProofLine] = {}
        for line in self.diary(task):
            if line["event"] == "step":
                first.setdefault(line["step"], line)
        return [first[step] for step in sorted(first)]

    def nodes_of(self, task: str) -> list[str]:
        """Nodes whose slot is assigned to the task by the present plan."""
        assigned: dict[str, Any] = self.status()["assigned"]
        return sorted(place.split("/")[0] for place, name in assigned.items() if name == task)

    def _trains(self, task: str, size: int, since: float) -> bool:
        return self.world(task, since) == size
