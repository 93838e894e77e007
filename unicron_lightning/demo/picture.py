"""The loss curves of two runs in one picture, with the faults and the world."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(
    path: Path,
    curves: tuple[dict[int, float], dict[int, float]],
    worlds: dict[int, int],
    faults: list[tuple[int, str]],
) -> None:
    """Save the picture.

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
        for axes in (top, bottom):
            axes.axvline(step, color="#cb181d", linestyle=":", linewidth=1.2)
        top.annotate(name, (step, height), rotation=90, va="top", ha="right", fontsize=8, color="#cb181d")
    steps = sorted(worlds)
    bottom.step(steps, [worlds[step] for step in steps], where="mid", color="#238b45")
    bottom.set_ylim(0, max(worlds.values()) + 0.5)
    bottom.set_ylabel("workers")
    bottom.set_xlabel("optimizer step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
