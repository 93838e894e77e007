"""Pictures of the experiments: the sensitivity of a result, and a number over another one. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from unicron_lightning.simulate.output import SummaryRow, colour_of


def tornado_picture(path: Path, title: str, base: float, swings: Mapping[str, tuple[float, float]], label: str) -> None:
    """Draw the sensitivity of a result: a bar for each figure, from the result at its minimum to that at its maximum.

    Args:
        path: output file.
        title: title of the picture.
        base: the result with all figures unchanged.
        swings: figure -> results at its minimum and maximum; drawn in this order from the top.
        label: label of the results.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 0.36 * len(swings) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(swings))[::-1]
    for place, (least, most) in zip(places, swings.values(), strict=True):
        axes.barh(place, least - base, left=base, color="#4477aa", height=0.65)
        axes.barh(place, most - base, left=base, color="#ee7733", height=0.65)
    axes.axvline(base, color="black", linewidth=0.8)
    handles = [Patch(color="#4477aa", label="at its least"), Patch(color="#ee7733", label="at its most")]
    axes.set_yticks(places, list(swings))
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.1)
    axes.legend(handles=handles, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110)


def sweep_picture(
    path: Path, rows: Sequence[SummaryRow], values: Mapping[str, float], x: str, name: str, y: str
) -> None:
    """Draw one number over another, a line for each policy.

    Args:
        path: output file.
        rows: rows of a summary.
        values: variant -> its position on the logarithmic axis.
        x: label of that axis.
        name: column that is drawn.
        y: label of the column's axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(str(row["policy"]) for row in rows):
        points = sorted((values[str(row["variant"])], float(row[name])) for row in rows if row["policy"] == policy)
        axes.plot(*zip(*points, strict=True), "o-", color=colour_of(policy), label=policy, linewidth=1.5, markersize=4)
    axes.set_xscale("log")
    axes.set_xticks(list(values.values()), [f"{value:g}" for value in values.values()])
    axes.minorticks_off()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(0, 1.03)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
