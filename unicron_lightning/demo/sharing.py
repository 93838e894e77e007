"""The second act: two tasks share six nodes; a node dies and returns, a task ends, and the plan moves nodes.

Two cores cannot show the work of six accelerators, so a micro-batch sleeps in place of most of its computation.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from unicron_lightning.coordinator.incidents.facts import (
    AgentLoss,
    EpochPublished,
    LifeBegun,
    SlotGrant,
    TaskEnd,
    read_fact,
)
from unicron_lightning.demo.cluster import ProofLine, SharedNodes, draw_sharing, report, wasted


@dataclass(frozen=True, kw_only=True)
class Work:
    """A task's finished steps.

    Attributes:
        ends: time.time() at the end of each step, rising.
        worth: weight x FLOPs of one step.
    """

    ends: Sequence[float]
    worth: float


@dataclass(frozen=True, kw_only=True)
class DemoPhase:
    """A phase of the act: from ``start`` to ``end``, time.time()."""

    name: str
    start: float
    end: float


def mean_waf(works: Mapping[str, Work], phase: DemoPhase) -> float:
    """Weighted FLOP/s over a phase."""
    done = sum(work.worth * sum(1 for end in work.ends if phase.start < end <= phase.end) for work in works.values())
    return done / (phase.end - phase.start)


def waf_over_time(
    works: Mapping[str, Work], start: float, end: float, window: float = 2.0, every: float = 0.1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Moments [s], and the weighted FLOP/s of the ``window`` seconds before each."""
    moments = np.arange(start, end, every)
    total = np.zeros_like(moments)
    for work in works.values():
        ends = np.asarray(work.ends, dtype=np.float64)
        counts = np.searchsorted(ends, moments, side="right") - np.searchsorted(ends, moments - window, side="right")
        total += work.worth * counts / window
    return moments, total


def longest_stand(work: Work, start: float, end: float) -> float:
    """Longest time without a finished step between two moments, in seconds."""
    inside = [start, *(at for at in work.ends if start < at <= end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(inside))


NODES: Final = 6
WEIGHTS: Final = {"heavy": 4.0, "light": 1.0}
"""The plan follows measured speeds: the ratio leaves room for other load on the machine."""
MINIMUMS: Final = {"heavy": 2, "light": 1}
MOST: Final = 4
TOLERANCE: Final = 1e-5
"""Largest accepted parameter difference: rounding by another order of additions, amplified by AdamW over all steps."""
STAND_SECONDS: Final = 2.0
"""Longest accepted time without a step around a change, beyond the time of a step."""
RECOVERED: Final = 0.75
"""Least accepted ratio of the WAF after to the WAF before; the rest is noise by other load on the machine."""
_STEADY_SECONDS: Final = 5.0
_TRAIN: Final = ["-m", "unicron_lightning.demo.train", "--nodes", str(MOST), "--accumulate", "3"]
_ENDLESS: Final = ["--steps-per-epoch", "2000", "--epochs", "50"]


@dataclass(kw_only=True)
class Story:
    """The course of the act; times are time.time()."""

    phases: list[DemoPhase] = field(default_factory=list)
    moments: list[tuple[float, str]] = field(default_factory=list)
    allocations: list[dict[str, int]] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)


def show(console: Console, out: Path) -> bool:
    """Play the act; return whether every claim was shown.

    Args:
        console: for the output.
        out: new folder for logs and the picture.
    """
    with SharedNodes(out.absolute(), NODES) as nodes:
        story = _play(nodes, console)
        events = nodes.events()
        steps = {task: nodes.steps(task) for task in WEIGHTS}
    works = {task: Work(ends=[line["at"] for line in lines], worth=_worth(task, out)) for task, lines in steps.items()}
    _tell(console, story, events, works)
    worlds = {task: [(line["at"], line["world"]) for line in lines] for task, lines in steps.items()}
    picture = out / "sharing.png"
    draw_sharing(picture, worlds, waf_over_time(works, story.phases[0].start, story.phases[-1].end), story.moments)
    console.print("the same steps by one process without failures, to compare with ...")
    differences = {task: _difference(out, task, lines[-1]["step"]) for task, lines in steps.items()}
    again = sum(wasted(nodes.diary(task), story.killed) for task in WEIGHTS)
    passed = report(console, _checks(story, events, works, differences, again))
    console.print(f"allocation and WAF over time: {picture}")
    return passed


def _play(nodes: SharedNodes, console: Console) -> Story:
    story = Story()

    def struck(at: float, what: str) -> None:
        story.moments.append((at, what))
        console.print(f"{what}")

    def steady(name: str, **worlds: int) -> None:
        """Wait for the given worlds, then for a while, which is recorded as a phase."""
        since = nodes.wait_worlds(worlds)
        start = time.time()
        if story.moments:
            story.phases.append(
                DemoPhase(name=f"{story.moments[-1][1]}: until all is in place", start=since, end=start)
            )
        time.sleep(_STEADY_SECONDS)
        story.phases.append(DemoPhase(name=name, start=start, end=time.time()))
        story.allocations.append({task: len(nodes.nodes_of(task)) for task in WEIGHTS})
        console.print(f"{name}: nodes {story.allocations[-1]}")

    for task, weight in WEIGHTS.items():
        command = [*_TRAIN, *_ENDLESS, "--pace", "0.07", "--until-told"]
        nodes.start_job(task, command, weight=weight, min_nodes=MINIMUMS[task], max_nodes=MOST)
    steady("two tasks, six nodes", heavy=4, light=2)
    victim = nodes.nodes_of("heavy")[-1]
    story.killed = {x["pid"] for x in nodes.diary("heavy") if x["event"] == "start" and x["node"] == victim}
    struck(nodes.kill_node(victim), "a node of the heavy task dies")
    steady("five nodes left", heavy=4, light=1)
    struck(nodes.start_node(victim), "the node returns")
    steady("six nodes again", heavy=4, light=2)
    struck(nodes.stop("heavy"), "the heavy task ends")
    nodes.wait_state("succeeded", task="heavy")
    steady("the light task has the room", light=4)
    nodes.stop("light")
    nodes.wait_state("succeeded", task="light")
    return story


def _tell(console: Console, story: Story, events: list[ProofLine], works: dict[str, Work]) -> None:
    table = Table(title="WAF as measured, by phase")
    for name in ("phase", "seconds", "WAF (weighted GFLOP/s)"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in story.phases:
        table.add_row(phase.name, f"{phase.end - phase.start:.1f}", f"{mean_waf(works, phase) / 1e9:.2f}")
    console.print(table)
    timeline = Table(title="milliseconds after each event")
    for name in ("event", "ms", "task", "what"):
        timeline.add_column(name, justify="right" if name == "ms" else "left", overflow="fold")
    ends = [at for at, _ in story.moments[1:]] + [float("inf")]
    for (at, what), end in zip(story.moments, ends, strict=True):
        timeline.add_row(what, "0.0", "", "", style="red")
        for event in events:
            if at <= event["at"] < end and (text := _words(event)) is not None:
                timeline.add_row("", f"{1e3 * (event['at'] - at):.1f}", event["task"] or "", text)
        timeline.add_section()
    console.print(timeline)


def _words(event: ProofLine) -> str | None:
    """Text for an event of the log; None for events that are not shown."""
    name, fields = event["name"], event["fields"]
    match read_fact(name, fields, event["at"]):
        case AgentLoss(node=node) | SlotGrant(node=node):
            return f"{name.replace('_', ' ')}: {node}"
        case EpochPublished() as epoch:
            return f"epoch {epoch.number}: {epoch.kind}, {len(epoch.members)} workers"
        case TaskEnd():
            return "over: all its workers have finished"
        case _ if name == "slot_revoked":
            return f"slot revoked: {fields['node']}"
        case _ if name == "plan_made":
            return f"plan: {fields['before']} -> {fields['allocation']}, found in {fields.get('milliseconds', 0):g} ms"
    return None


def _worth(task: str, out: Path) -> float:
    (path, *_) = sorted((out / task).glob("final-*.pt"))
    return WEIGHTS[task] * float(torch.load(path, weights_only=True)["flops_per_step"])


def _difference(out: Path, task: str, steps: int) -> float:
    """Largest difference of any worker's parameter from a world of one worker with the same steps."""
    folder = out / f"reference-{task}"
    folder.mkdir()
    command = [sys.executable, *_TRAIN, *_ENDLESS, "--max-steps", str(steps), "--until-told", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    (path,) = folder.glob("final-*.pt")
    wanted = torch.load(path, weights_only=True)["parameters"]
    worst = 0.0
    for path in (out / task).glob("final-*.pt"):
        found = torch.load(path, weights_only=True)
        assert found["steps"] == steps, f"{path} is of step {found['steps']}, expected {steps}"
        worst = max([worst, *(float((found["parameters"][n] - wanted[n]).abs().max()) for n in wanted)])
    return worst


def _checks(
    story: Story, events: list[ProofLine], works: dict[str, Work], differences: dict[str, float], wasted: int
) -> list[tuple[str, bool]]:
    full, fewer, again, alone = story.allocations
    before, during, after = (mean_waf(works, story.phases[number]) for number in (0, 2, 4))
    died = story.moments[0][0]
    stands = {task: longest_stand(work, died, died + 5.0) for task, work in works.items()}
    usual = {task: longest_stand(work, story.phases[0].start, story.phases[0].end) for task, work in works.items()}
    names = {event["name"] for event in events}
    told = ", ".join(f"{task} {1e3 * stands[task]:.0f} ms (usual: {1e3 * usual[task]:.0f} ms)" for task in works)
    waf = f"WAF {before / 1e9:.2f} before, {during / 1e9:.2f} without the node, {after / 1e9:.2f} after"
    moved = f"the plan moved a node from the light task to the heavy one: {full} -> {fewer}"
    return [
        (moved, fewer == {**full, "light": 1}),
        (f"and gave it back: {again}", again == full),
        (f"the light task took the room of the one that ended: {alone}", alone == {"heavy": 0, "light": MOST}),
        (
            f"longest time without a step after the node's death: {told}",
            all(stand < STAND_SECONDS + usual[task] for task, stand in stands.items()),
        ),
        (waf, after > RECOVERED * before),
        ("no task was restarted", LifeBegun.event not in names),
        (f"micro-batches computed again though their worker lived: {wasted}", wasted == 0),
        *(
            (f"{task}: largest parameter difference to a run without failures: {worst:.2e}", worst <= TOLERANCE)
            for task, worst in differences.items()
        ),
    ]
