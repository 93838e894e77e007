"""Results of simulations: rows and their summaries, tables, files, pictures, and Hydra's callback around a sweep.

Tables are for the terminal, and in Markdown for the documents. Percentages are of the ideal's accumulated WAF, except
ETTR, which is of time; ``to detect`` and ``to recover`` are means over incidents. Brackets show the minimum and maximum
over seeds.

Files are CSV, or Parquet by pyarrow; equal rows give equal bytes. Pictures need matplotlib: WAF over time by policy,
accumulated WAF, and losses by cause. While a sweep runs, a progress bar is shown, and its summary at the end.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from numpy.typing import NDArray
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from unicron_lightning.coordinator.incidents.facts import PHASES
from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.result import LOSSES, MICRO, STATES, SimIncident, SimulationResult
from unicron_lightning.simulate.settings import Format

SummaryRow = Mapping[str, str | int | float]

_WHAT: Final = ("policy", "trace", "workload", "variant")
"""Columns that identify the simulation; the results are averaged over `seed`."""
_EXACT: Final = "seed"


def row_of(
    result: SimulationResult, *, workload: str, seed: int, variant: str, num_workers: int, num_faults: int
) -> SummaryRow:
    """Convert a result to a row: WAF in weighted FLOP, losses as fractions of the ideal, states of all workers'
    time.
    """
    ideal = result.ideal or 1.0
    workers = result.seconds * num_workers * MICRO
    present = sum(task.present for task in result.tasks.values()) or 1.0
    incidents = len(result.incidents)
    row: dict[str, str | int | float] = {
        "policy": result.policy,
        "trace": result.trace,
        "workload": workload,
        "variant": variant,
        "seed": seed,
        "workers": num_workers,
        "days": result.seconds / 86400,
        "faults": num_faults,
        "incidents": incidents,
        "waf": result.accumulated_waf,
        "ideal": result.ideal,
        "of_ideal": result.of_ideal,
        "ettr": sum(task.ettr * task.present for task in result.tasks.values()) / present,
        "flops_per_second": sum(task.flops for task in result.tasks.values()) / result.seconds,
    }
    samples = [task.samples for task in result.tasks.values()]
    if len(samples) == 1 and samples[0] is not None:  # those of different models do not add up
        row["samples_per_second"] = samples[0] / result.seconds
    row.update({f"lost_{loss}": result.lost[loss] / ideal for loss in LOSSES})
    for phase in PHASES:
        total = sum(incident.seconds[phase] for incident in result.incidents)
        row[f"{phase}_seconds"] = total / incidents if incidents else 0.0
    row.update({f"time_{state}": result.worker_micros.get(state, 0) / workers for state in STATES})
    return row


def with_ratio(rows: Sequence[SummaryRow], reference: str) -> list[SummaryRow]:
    """Add ``ratio`` to rows: accumulated WAF over that of the reference policy in the same situation and seed.

    A variant without a reference of its own is compared with the unchanged reference. Without any reference, no ratio
    is added.
    """
    base = {_situation(row): float(row["waf"]) for row in rows if row["policy"] == reference}
    made: list[SummaryRow] = []
    for row in rows:
        trace, workload, _, seed = _situation(row)
        waf = base.get(_situation(row), base.get((trace, workload, "", seed)))
        made.append({**row, "ratio": float(row["waf"]) / waf} if waf else row)
    return made


def _situation(row: SummaryRow) -> tuple[str, str, str, int]:
    return str(row["trace"]), str(row["workload"]), str(row["variant"]), int(row["seed"])


def summary(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Summarize rows by policy, trace, workload and variant: means over seeds, with ranges of the main results."""
    groups: dict[tuple[str, ...], list[SummaryRow]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[name]) for name in _WHAT), []).append(row)
    made = []
    for key, group in groups.items():
        mean: dict[str, str | int | float] = dict(zip(_WHAT, key, strict=True))
        mean["seeds"] = len(group)
        for name in group[0]:
            if name not in (*_WHAT, _EXACT) and all(name in row for row in group):
                mean[name] = statistics.fmean(float(row[name]) for row in group)
        for name in ("of_ideal", "ratio"):
            if name in mean:
                values = [float(row[name]) for row in group]
                mean[f"{name}_least"], mean[f"{name}_most"] = min(values), max(values)
        made.append(mean)
    # By situation, in the order of first appearance; policies in theirs.
    first: dict[tuple[str, ...], int] = {}
    for mean in made:
        first.setdefault(_group(mean), len(first))
    return sorted(made, key=lambda mean: first[_group(mean)])


def _group(row: SummaryRow) -> tuple[str, ...]:
    return str(row["trace"]), str(row["workload"]), str(row["variant"])


Say = Callable[[SummaryRow], str]


def _part(name: str) -> Say:
    return lambda row: f"{100 * float(row[name]):.2f}".replace("-0.00", "0.00") if name in row else ""


def _range(name: str, form: str, factor: float = 1.0) -> Say:
    def say(row: SummaryRow) -> str:
        if name not in row:
            return ""
        text = form.format(factor * float(row[name]))
        if int(row.get("seeds", 1)) < 2:
            return text
        least, most = (form.format(factor * float(row[f"{name}_{end}"])) for end in ("least", "most"))
        return text if least == most else f"{text} [{least}-{most}]"

    return say


def _seconds(name: str) -> Say:
    def say(row: SummaryRow) -> str:
        value = float(row[name])
        return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"

    return say


def _text(name: str) -> Say:
    return lambda row: str(row[name])


COLUMNS: Final[tuple[tuple[str, Say], ...]] = (
    ("trace", _text("trace")),
    ("workload", _text("workload")),
    ("variant", _text("variant")),
    ("policy", _text("policy")),
    ("WAF %", _range("of_ideal", "{:.1f}", 100)),
    ("ratio", _range("ratio", "{:.2f}")),
    ("detection %", _part("lost_detection")),
    ("transition %", _part("lost_transition")),
    ("sub-healthy %", _part("lost_sub_healthy")),
    ("overhead %", _part("lost_overhead")),
    ("ETTR %", _part("ettr")),
    ("to detect", _seconds("detection_seconds")),
    ("to recover", _seconds("transition_seconds")),
    ("incidents", lambda row: f"{float(row['incidents']):.0f}"),
)
FURTHER: Final[Mapping[str, Say]] = {
    "workers": lambda row: f"{float(row['workers']):.0f}",
    "samples/s": lambda row: f"{float(row['samples_per_second']):.2f}" if "samples_per_second" in row else "",
    "PFLOP/s": lambda row: f"{float(row['flops_per_second']) / 1e15:.2f}",
    "TFLOP/s per worker": lambda row: f"{float(row['flops_per_second']) / float(row['workers']) / 1e12:.1f}",
}
"""Columns that tables have if the configuration names them."""


_WORDS: Final = ("trace", "workload", "variant", "policy")
_UNLESS_DIFFERENT: Final = ("workload", "variant")


def _shown(rows: Sequence[SummaryRow], further: Sequence[str] = ()) -> list[tuple[str, Say]]:
    """Select columns with content; workload and variant only where they differ."""
    if unknown := [name for name in further if name not in FURTHER]:
        raise ConfigError(f"output.columns={unknown}: expected some of {', '.join(FURTHER)}")
    kept = []
    for title, say in (*COLUMNS, *((name, FURTHER[name]) for name in further)):
        texts = {say(row) for row in rows}
        if not texts <= {"", "0.00"} and not (title in _UNLESS_DIFFERENT and len(texts) == 1):
            kept.append((title, say))
    return kept


def console() -> Console:
    """Return standard output as a console, wide enough for a table if it is not a terminal."""
    return Console() if Console().is_terminal else Console(width=170)


def as_table(rows: Sequence[SummaryRow], title: str, further: Sequence[str] = ()) -> Table:
    """Render rows for a terminal, with some of `FURTHER`.

    Raises:
        ConfigError: there is no such column.
    """
    table = Table(title=title, title_justify="left")
    columns = _shown(rows, further)
    for name, _ in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    last = None
    for row in rows:
        now = (row["trace"], row["workload"], row["variant"])
        if last is not None and now != last:
            table.add_section()
        last = now
        table.add_row(*(say(row) for _, say in columns))
    return table


def as_markdown(rows: Sequence[SummaryRow]) -> str:
    """Render rows for a document."""
    columns = _shown(rows)
    lines = [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "|" + "|".join("---" if name in _WORDS else "---:" for name, _ in columns) + "|",
    ]
    lines += ["| " + " | ".join(say(row) for _, say in columns) + " |" for row in rows]
    return "\n".join(lines)


def save_table(path: Path, rows: Sequence[SummaryRow], form: Format) -> Path:
    """Write rows; columns are those of all rows, in the order of first appearance.

    Args:
        path: without the suffix, which is added.
        rows: the table.
        form: format of the file.

    Returns:
        The file.

    Raises:
        ConfigError: pyarrow is needed and not installed.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = path.with_name(f"{path.name}.{form}")
    if form == "parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            needed = "expected it from: pip install 'unicron-lightning[simulate]'"
            raise ConfigError(f"output.format=parquet: pyarrow is not installed, {needed}") from error
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
        parquet.write_table(table, file)
        return file
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file


def save_result(folder: Path, result: SimulationResult, row: SummaryRow, form: Format) -> None:
    """Write one simulation: ``row.json``, the table of WAF over time, and that of incidents."""
    folder.mkdir(parents=True, exist_ok=True)
    times = result.times.tolist()
    values = result.values.tolist()
    save_table(folder / "waf", [{"seconds": t, "waf": v} for t, v in zip(times, values, strict=True)], form)
    save_table(folder / "incidents", list(_incidents(result.incidents)), form)
    # Written last and appearing whole, so that a folder that contains it is complete whenever the sweep is interrupted.
    text = json.dumps({**row, "curve": [times, values]})
    part = folder / "row.json.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(folder / "row.json")


def _incidents(incidents: Iterable[SimIncident]) -> Iterable[SummaryRow]:
    for incident in incidents:
        row: dict[str, str | int | float] = {"task": incident.task, "kind": incident.kind, "at": incident.at}
        for phase in PHASES:
            row[f"{phase}_seconds"] = incident.seconds[phase]
            row[f"{phase}_waf"] = incident.waf_seconds[phase]
        yield row


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


_LOOK_SECONDS = 0.3


class SweepSummary(Callback):
    """Summary of a multirun; a single run shows its own table.

    Hydra does not call `on_multirun_end` if a job fails or the user interrupts: the command calls `end` then, so that
    results of the finished jobs are kept and shown.
    """

    running: ClassVar[SweepSummary | None] = None
    """The summary of the multirun in progress."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._config: DictConfig | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._config = config
        SweepSummary.running = self
        if config.output.progress and Console(stderr=True).is_terminal:
            self._bar = _Bar(Path(config.hydra.sweep.dir), num_jobs(config.hydra))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        self.end()

    def end(self) -> None:
        """Write and show the results of all finished jobs, once."""
        config, self._config, SweepSummary.running = self._config, None, None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if config is None:
            return
        folder = Path(config.hydra.sweep.dir)
        curves = read_curves(folder)
        if curves:
            _conclude(folder, curves, config.output)
        else:
            Console(stderr=True).print(f"simulate: no simulation has finished of {num_jobs(config.hydra)}")


def _conclude(folder: Path, curves: list[WafCurve], output: Any) -> None:
    """Write and show a sweep's results: ``rows``, ``summary``, and pictures."""
    rows = with_ratio([curve.row for curve in curves], str(output.reference))
    means = summary(rows)
    save_table(folder / "rows", rows, output.format)
    save_table(folder / "summary", means, output.format)
    shown = console()
    title = f"{len(rows)} simulations; ratio: WAF over that of {output.reference}"
    shown.print(as_table(means, title, output.columns))
    if output.pictures:
        with suppress(ModuleNotFoundError):
            curves_picture(folder / "waf.png", curves)
            losses_picture(folder / "losses.png", means)
    shown.print(f"in {folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_file()))}")


def read_curves(folder: Path) -> list[WafCurve]:
    """Read all simulations of a sweep, in the order of their numbers."""
    return list(_curves(sorted(folder.glob("*/row.json"), key=lambda path: int(path.parent.name))))


def _curves(paths: list[Path]) -> Iterator[WafCurve]:
    for path in paths:
        row = json.loads(path.read_text(encoding="utf-8"))
        times, values = row.pop("curve")
        yield WafCurve(row=row, seconds=np.array(times), waf=np.array(values))


def num_jobs(hydra: Any) -> int:
    """Return the number of jobs that Hydra's basic sweeper creates: of its parameters, and of the command line."""
    parameters = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*parameters, *hydra.overrides.task])
    last = {override.get_key_element(): override for override in overrides}
    sweeps = [override for override in last.values() if override.is_sweep_override()]
    return math.prod(sum(1 for _ in override.sweep_iterator()) for override in sweeps)


class _Bar:
    """Counts finished folders: each job, in this or another process, writes one."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._over = threading.Event()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
        )
        self._task = self._progress.add_task("simulations", total=number)
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._progress.start()
        self._thread.start()

    def stop(self) -> None:
        """Remove the progress bar."""
        self._over.set()
        self._thread.join()
        self._progress.stop()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            done = sum(1 for _ in self._folder.glob("*/row.json"))
            self._progress.update(self._task, completed=done)
