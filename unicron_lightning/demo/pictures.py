"""Pictures of the two acts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

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
