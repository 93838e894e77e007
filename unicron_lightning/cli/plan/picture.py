"""The curves F(t,x) of all tasks, with the chosen points."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.plan import Plan


def draw(path: Path, title: str, plan: Plan) -> None:
    """Write the picture in the format of the file's name.

    Args:
        path: of the file.
        title: of the picture.
        plan: with curves and points.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--picture {path}: matplotlib is not installed; install it by: pip install 'unicron-lightning[picture]'"
        ) from error
    # Figure without pyplot: no display, no global state.
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    chosen = plan.allocation
    for curve in plan.state.tasks:
        name, num_workers = curve.task.name, chosen[curve.task.name]
        terms = curve.task.terms
        step = terms.granularity if terms.granularity > 1 else curve.unit
        shown = curve.workers <= plan.state.num_workers
        # A gap in the line marks sizes that the task cannot have.
        sizes, waf = _with_gaps(curve.workers[shown], curve.waf[shown] / 1e15, max(step, curve.unit))
        (line,) = axes.plot(
            sizes, waf, ".-", linewidth=1.2, markersize=3, label=f"{name} (w {terms.weight:g}): {num_workers}"
        )
        axes.plot(
            [num_workers], [curve.waf_at(num_workers) / 1e15], "o", color=line.get_color(), markersize=8, clip_on=False
        )
        before = plan.state.allocation.get(name, 0)
        if before and before != num_workers:
            axes.plot(
                [before], [curve.waf_at(before) / 1e15], "o", color=line.get_color(), markersize=8, fillstyle="none"
            )
    axes.set_xlabel("workers x")
    axes.set_ylabel("F(t,x), weighted PFLOP/s")
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.set_title(f"{title}: WAF {plan.waf / 1e15:.2f} PFLOP/s on {plan.state.num_workers} workers", loc="left")
    axes.legend(title="task (weight): workers\n● planned   ○ now", loc="upper left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from error


def _with_gaps(
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]], waf: np.ndarray[tuple[int], np.dtype[np.float64]], step: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """The points with a NaN, which breaks the line, between sizes further apart than a step."""
    breaks = np.flatnonzero(np.diff(sizes) > step) + 1
    return np.insert(sizes.astype(np.float64), breaks, np.nan), np.insert(waf, breaks, np.nan)
