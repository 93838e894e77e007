"""The second act as a picture: each task's nodes, and the resulting WAF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

_COLORS = ("#08519c", "#e6550d")


def draw(
    path: Path,
    worlds: Mapping[str, Sequence[tuple[float, int]]],
    waf: tuple[NDArray[np.float64], NDArray[np.float64]],
    moments: Sequence[tuple[float, str]],
) -> None:
    """Save the picture.

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
        for axes in (top, bottom):
            axes.axvline(at - start, color="#cb181d", linestyle=":", linewidth=1.2)
        bottom.annotate(what, (at - start, 0), rotation=90, va="bottom", ha="right", fontsize=8, color="#cb181d")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
