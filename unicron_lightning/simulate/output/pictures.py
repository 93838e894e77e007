"""Pictures of a sweep: WAF over time by policy, accumulated WAF, and losses by cause. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unicron_lightning.simulate.output.summaries import SummaryRow
from unicron_lightning.simulate.result import LOSSES

DAY: Final = 86400.0
_COLOURS: Final = {
    "unicron": "#c1272d",
    "megatron": "#555555",
    "oobleck": "#1f77b4",
    "varuna": "#e69f00",
    "bamboo": "#2ca02c",
    "torchft": "#7b3fa0",
    "inprocess": "#17a2a2",
}
_LOSS_COLOURS: Final = {
    "detection": "#4477aa",
    "transition": "#ee7733",
    "sub_healthy": "#ccbb44",
    "overhead": "#aaaaaa",
}


@dataclass(frozen=True, kw_only=True)
class WafCurve:
    """WAF over time of one simulation.

    Attributes:
        row: its row.
        seconds: times at which WAF changes, from 0 on.
        waf: WAF from each of these times on, weighted FLOP/s.
    """

    row: SummaryRow
    seconds: NDArray[np.float64]
    waf: NDArray[np.float64]

    @property
    def end(self) -> float:
        """Duration in seconds."""
        return float(self.row["days"]) * DAY


def curves_picture(path: Path, curves: Sequence[WafCurve]) -> None:
    """Draw WAF over time as small pictures by policy and trace, and below them the accumulated WAF of all.

    Args:
        path: output file.
        curves: by policy and trace the first variant and workload. Of several seeds the median one is drawn, with a
            band from the least to the most accumulated WAF of all.
    """
    from matplotlib.figure import Figure

    seeds: dict[tuple[str, str], list[WafCurve]] = {}
    for curve in curves:
        group = seeds.setdefault((str(curve.row["trace"]), str(curve.row["policy"])), [])
        if not group or all(curve.row.get(key) == group[0].row.get(key) for key in ("variant", "workload")):
            group.append(curve)
    shown = {key: median_of(group) for key, group in seeds.items()}
    traces = list(dict.fromkeys(trace for trace, _ in shown))
    policies = list(dict.fromkeys(policy for _, policy in shown))
    height = 0.95 * len(policies) + 3.4
    figure = Figure(figsize=(6.2 * len(traces) + 1, height), layout="constrained")
    ratios = [1.0] * len(policies) + [3.2]
    grid = figure.subplots(
        len(policies) + 1, len(traces), squeeze=False, sharex="col", gridspec_kw={"height_ratios": ratios}
    )
    for column, trace in enumerate(traces):
        for line, policy in enumerate(policies):
            if (trace, policy) in shown:
                _waf(grid[line][column], shown[trace, policy], policy)
            if column == 0:
                grid[line][0].set_ylabel(policy, rotation=0, ha="right", va="center")
        below = grid[-1][column]
        for policy in policies:
            if (trace, policy) in shown:
                _accumulated(below, shown[trace, policy], seeds[trace, policy], policy)
        below.set_xlabel("days")
        below.set_ylabel("accumulated WAF, of the ideal" if column == 0 else "")
        below.set_ylim(0, 1.02)
        below.plot([0, below.get_xlim()[1]], [0, 1], color="black", linewidth=0.8, linestyle=":", label="ideal")
        below.grid(alpha=0.3)
        below.legend(fontsize=8, loc="upper left")
        grid[0][column].set_title(f"trace {trace}: WAF over time, of the ideal's mean", fontsize=10, loc="left")
    figure.savefig(path, dpi=110)


def colour_of(policy: str) -> str:
    """Return a policy's colour, the same in all pictures; a variant has its system's."""
    return _COLOURS.get(policy.partition("_")[0], "#888888")


def _waf(axes: Any, curve: WafCurve, policy: str) -> None:
    mean = float(curve.row["ideal"]) / curve.end
    times, values = np.append(curve.seconds, curve.end) / DAY, np.append(curve.waf, curve.waf[-1]) / mean
    axes.fill_between(times, values, step="post", color=colour_of(policy), alpha=0.85, linewidth=0)
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 1])
    axes.set_xlim(0, curve.end / DAY)
    axes.grid(alpha=0.3)


def median_of(curves: Sequence[WafCurve]) -> WafCurve:
    """Return the curve of the seed with the median accumulated WAF, the upper of two."""
    return sorted(curves, key=lambda curve: float(curve.row["of_ideal"]))[len(curves) // 2]


def _sum(curve: WafCurve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return times, in seconds, and accumulated WAF as a fraction of the ideal at the end."""
    times = np.append(curve.seconds, curve.end)
    return times, np.concatenate([[0.0], np.cumsum(np.diff(times) * curve.waf)]) / float(curve.row["ideal"])


def _accumulated(axes: Any, curve: WafCurve, seeds: Sequence[WafCurve], policy: str) -> None:
    times, done = _sum(curve)
    if len(seeds) > 1:
        grid = np.linspace(0.0, curve.end, 400)
        all_done = np.array([np.interp(grid, *_sum(each)) for each in seeds])
        axes.fill_between(
            grid / DAY, all_done.min(axis=0), all_done.max(axis=0), color=colour_of(policy), alpha=0.15, linewidth=0
        )
    axes.plot(times / DAY, done, color=colour_of(policy), label=f"{policy}: {done[-1]:.3f}", linewidth=1.5)


def losses_picture(path: Path, rows: Sequence[SummaryRow]) -> None:
    """Draw the losses of ideal WAF by cause as bars, by policy and trace, with the ratio to the reference.

    Args:
        path: output file.
        rows: rows of a summary.
    """
    from matplotlib.figure import Figure

    groups: dict[str, list[SummaryRow]] = {}
    for row in rows:
        title = ", ".join(str(row[name]) for name in ("trace", "workload", "variant") if row[name])
        groups.setdefault(title, []).append(row)
    longest = max(len(group) for group in groups.values())
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(5.6 * columns + 1, lines * (0.42 * longest + 1.5)), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, (title, group) in zip(grid.flat, groups.items(), strict=False):
        _bars(axes, title, group)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
    figure.savefig(path, dpi=110)


def _bars(axes: Any, title: str, group: Sequence[SummaryRow]) -> None:
    places = np.arange(len(group))[::-1]
    left = np.zeros(len(group))
    for loss in LOSSES:
        parts = np.array([max(0.0, float(row[f"lost_{loss}"])) for row in group])
        axes.barh(places, parts, left=left, color=_LOSS_COLOURS[loss], label=loss.replace("_", "-"), height=0.7)
        left = left + parts
    for place, end, row in zip(places, left, group, strict=True):
        ratio = f"   x {float(row['ratio']):.2f}" if "ratio" in row else ""
        axes.text(end, place, f" {100 * end:.1f} %{ratio}", va="center", fontsize=8)
    axes.set_yticks(places, [str(row["policy"]) for row in group])
    axes.set_xlim(0, max(1e-6, float(left.max())) * 1.38)
    axes.set_xlabel("lost, part of the ideal WAF")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3)
