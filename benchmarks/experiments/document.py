"""``make experiments``: run all experiments of results.md beside this file, and write it with its pictures.

    python benchmarks/experiments/document.py [--docs docs] [--only NAME ...] [--seeds N] [--processes N]

Each experiment is a list of cases, a table and optionally a picture. Cases run in the requested number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from baseline import (
    RANGE_TEXT,
    SPEEDS_TEXT,
    baseline_cases,
    show_baseline,
    show_speeds,
    speed_cases,
)
from experiment_cases import (
    SimulationCase,
    at_our_worst,
    at_their_best,
    cases_of,
    composed,
    for_nothing,
    run,
    swings,
)
from experiment_pictures import sweep_picture, tornado_picture
from physics import PHYSICS_TEXT, physics_cases, show_physics
from process_pool import processes
from validation import VALIDATION_TEXT, show_validation, validation_cases

from unicron_lightning.simulate.output import (
    SummaryRow,
    WafCurve,
    as_markdown,
    curves_picture,
    losses_picture,
    summary,
    with_ratio,
)

ALL: Final = ("unicron", "megatron", "oobleck", "varuna", "bamboo", "torchft", "inprocess")
ABLATIONS: Final = (
    "unicron",
    "unicron_no_planner",
    "unicron_no_inband",
    "unicron_no_partial_reuse",
    "unicron_no_memory_checkpoint",
    "unicron_may_pause",
)
LLAMA3: Final = "experiment=llama3"
REFERENCE: Final = "megatron"
RESTARTING: Final = ("megatron", "varuna", "inprocess")
"""Policies that return to a checkpoint."""
FREE: Final = "failures cost nothing but their nodes"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A section of the results.

    Attributes:
        name: for ``--only`` and the names of pictures.
        title: the heading.
        text: the question.
        cases: creates the cases for a number of seeds.
        show: renders the results as Markdown; may draw into the folder.
    """

    name: str
    title: str
    text: str
    cases: Callable[[int], list[SimulationCase]]
    show: Callable[[Sequence[WafCurve], Path], str]


def means_of(curves: Sequence[WafCurve]) -> list[SummaryRow]:
    """Return the summary, with ratios to `REFERENCE`."""
    return summary(with_ratio([curve.row for curve in curves], REFERENCE))


def table(curves: Sequence[WafCurve], _folder: Path) -> str:
    """Render only the table."""
    return as_markdown(means_of(curves))


# ---- the experiments


def _headline(seeds: int) -> list[SimulationCase]:
    made = [case for trace in ("a", "b", "b_quick") for case in cases_of(ALL, seeds, f"trace={trace}")]
    nothing = for_nothing(composed(()).costs)
    for trace in ("a", "b", "b_quick"):
        made += cases_of(("unicron",), seeds, f"trace={trace}", variant=FREE, moves=nothing)
    return made


def verdict(rows: Sequence[SummaryRow], trace: str) -> str:
    """State Unicron's advantage, and the upper bound of any system's."""
    of = {(str(row["policy"]), str(row["variant"])): float(row["of_ideal"]) for row in rows if row["trace"] == trace}
    ours, free = of["unicron", ""], of["unicron", FREE]
    best = max(RESTARTING, key=lambda policy: of[policy, ""])
    other = max((policy for policy in ALL if policy not in ("unicron", *RESTARTING)), key=lambda policy: of[policy, ""])
    return (
        f"- Trace {trace}: mean accumulated WAF {ours / of[REFERENCE, '']:.2f} times that of {REFERENCE} with restart,"
        f" {ours / of[best, '']:.2f} times that of {best}, the best that returns to a checkpoint,"
        f" {ours / of[other, '']:.2f} times that of {other}, the best of the others."
        f" With costs of a millisecond it would be {free / of[REFERENCE, '']:.2f}, {free / of[best, '']:.2f} and"
        f" {free / of[other, '']:.2f} times."
    )


def _show_headline(curves: Sequence[WafCurve], folder: Path) -> str:
    ours = [curve for curve in curves if not curve.row["variant"]]
    curves_picture(folder / "waf.png", [curve for curve in ours if curve.row["trace"] != "b_quick"])
    losses_picture(folder / "losses.png", means_of(ours))
    pictures = "![WAF over time](images/waf.png)\n\n![Losses by cause](images/losses.png)"
    rows = means_of(curves)
    verdicts = "\n".join(verdict(rows, trace) for trace in ("a", "b", "b_quick"))
    return f"{verdicts}\n\n{as_markdown(rows)}\n\n{pictures}"


def _llama3(seeds: int) -> list[SimulationCase]:
    return cases_of(ALL, min(seeds, 2), LLAMA3)


def _ablations(seeds: int) -> list[SimulationCase]:
    made = []
    for trace in ("a", "b"):
        made += cases_of((*ABLATIONS, REFERENCE), min(seeds, 2), f"trace={trace}")
    return made


def _workloads(seeds: int) -> list[SimulationCase]:
    workloads = ("equal", "sizes", "weights", "churn")
    policies = ("unicron", REFERENCE, "varuna", "torchft")
    return [
        case for name in workloads for case in cases_of(policies, min(seeds, 2), "trace=b_quick", f"workload={name}")
    ]


_SIZES: Final = (1024, 4096, 16384, 98304)


def _sizes(_seeds: int) -> list[SimulationCase]:
    made = []
    for workers in _SIZES:
        spare = max(1, round(workers / 128 / 16))
        nodes = workers // 8 + 16 * spare
        overrides = (LLAMA3, "trace.days=14", f"cluster.num_nodes={nodes}")
        limit = f"workload.tasks.llama3-405b.max_workers={workers}"
        name = f"{workers:,} GPUs"
        made += cases_of(("unicron", REFERENCE, "varuna", "torchft"), 1, *overrides, limit, variant=name)
    return made


def _show_sweep(
    file: str, caption: str, values: Mapping[str, float], axis: str, column: str = "of_ideal"
) -> Callable[[Sequence[WafCurve], Path], str]:
    """Return what renders a table, and a picture of a column by the values of the variants."""

    def show(curves: Sequence[WafCurve], folder: Path) -> str:
        rows = means_of(curves)
        label = "ETTR" if column == "ettr" else "accumulated WAF, of the ideal"
        sweep_picture(folder / file, rows, values, axis, column, label)
        return f"{as_markdown(rows)}\n\n![{caption}](images/{file})"

    return show


_show_sizes = _show_sweep(
    "sizes.png",
    "ETTR by size",
    {f"{size:,} GPUs": float(size) for size in _SIZES},
    "GPUs of the task",
    "ettr",
)


_INTERVALS: Final = (300, 900, 1800, 3600, 7200)


def _intervals(seeds: int) -> list[SimulationCase]:
    made = []
    for interval in _INTERVALS:
        policies = (REFERENCE, "varuna", "inprocess", "unicron")
        moves = tuple((f"{policy}.checkpoint_interval", float(interval)) for policy in policies)
        memory = (("inprocess.memory_checkpoint_interval", float(interval)),)
        made += cases_of(policies, min(seeds, 2), "trace=b_quick", variant=f"{interval} s", moves=moves + memory)
    return made


_show_intervals = _show_sweep(
    "intervals.png",
    "WAF by checkpoint interval",
    {f"{each} s": float(each) for each in _INTERVALS},
    "seconds between checkpoints",
)


_FREQUENCIES: Final = (0.25, 1, 4, 16, 64)


def _mtbf(seeds: int) -> list[SimulationCase]:
    made = []
    for frequency in _FREQUENCIES:
        overrides = (
            "trace=b_quick",
            f"trace.sources.processes.frequency={frequency}",
            f"trace.sources.nodes.frequency={frequency}",
        )
        name = f"a x {frequency:g}"
        made += cases_of(
            ("unicron", REFERENCE, "varuna", "torchft", "inprocess"), min(seeds, 2), *overrides, variant=name
        )
    return made


_show_mtbf = _show_sweep(
    "frequencies.png",
    "WAF by frequency of failures",
    {f"a x {each:g}": each for each in _FREQUENCIES},
    "failures, times those of trace a",
)


def _favour(seeds: int) -> list[SimulationCase]:
    costs = composed(()).costs
    made = []
    for trace in ("a", "b", "b_quick"):
        made += cases_of(
            ALL, min(seeds, 2), f"trace={trace}", variant="others at their best", moves=at_their_best(costs)
        )
    worst = (*at_their_best(costs), *at_our_worst(costs))
    for trace in ("a", "b", "b_quick"):
        made += cases_of(ALL, min(seeds, 2), f"trace={trace}", variant="and ours at its worst", moves=worst)
    return made


def _sensitivity(_seeds: int) -> list[SimulationCase]:
    costs = composed(()).costs
    made = cases_of(ALL, 1, "trace=b_quick", variant="as it is")
    for key, least, most in swings(costs):
        owner = key.partition(".")[0]
        for name, value in (("least", least), ("most", most)):
            moves = ((key, value),)
            policies = ALL if owner == "common" else (owner,)
            made += cases_of(policies, 1, "trace=b_quick", variant=f"{key} {name}", moves=moves)
    return made


def _show_sensitivity(curves: Sequence[WafCurve], folder: Path) -> str:
    found = {(str(curve.row["variant"]), str(curve.row["policy"])): float(curve.row["of_ideal"]) for curve in curves}
    figures = dict(composed(()).costs.figures())

    def against(variant: str, other: str) -> float:
        ours, theirs = (found.get((variant, each), found["as it is", each]) for each in ("unicron", other))
        return ours / theirs

    lines = ["| figure | origin | value | least | most | system | its WAF % at the least | at the most |"]
    lines.append("|---|---|---:|---:|---:|---|---:|---:|")
    bars: dict[str, tuple[float, float]] = {}
    for key, least, most in swings(composed(()).costs):
        owner = key.partition(".")[0]
        system = "unicron" if owner == "common" else owner
        low, high = (100 * found[f"{key} {name}", system] for name in ("least", "most"))
        figure = figures[key]
        numbers = f"{figure.value:g} | {least:g} | {most:g}"
        lines.append(f"| `{key}` | {figure.origin} | {numbers} | {system} | {low:.2f} | {high:.2f} |")
        if owner in ("common", "unicron", REFERENCE):
            bars[key] = against(f"{key} least", REFERENCE), against(f"{key} most", REFERENCE)
    base = against("as it is", REFERENCE)
    wide = {key: ends for key, ends in bars.items() if abs(ends[1] - ends[0]) > 1e-3}
    widest = dict(sorted(wide.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:14])
    title = f"trace b_quick, seed 0: Unicron's WAF over Megatron's, {base:.2f}"
    tornado_picture(folder / "tornado.png", title, base, widest, "ratio of accumulated WAF")
    return "\n".join(lines) + "\n\n![Tornado](images/tornado.png)"


EXPERIMENTS: Final = (
    Experiment(
        name="baseline",
        title="The range: Unicron against Megatron with restart",
        text=RANGE_TEXT,
        cases=baseline_cases,
        show=show_baseline,
    ),
    Experiment(
        name="headline",
        title="Seven systems on the paper-like traces",
        text=f"Six tasks on 128 GPUs. The last rows of each trace, *{FREE}*, are Unicron with costs of a"
        " millisecond: the most that faster recovery can bring, except that other costs lead to other plans, which look"
        " one event ahead (`b_quick`).",
        cases=_headline,
        show=_show_headline,
    ),
    Experiment(
        name="speeds",
        title="Base speeds of Oobleck, Bamboo and Varuna",
        text=SPEEDS_TEXT,
        cases=speed_cases,
        show=show_speeds,
    ),
    Experiment(
        name="llama3",
        title="The Llama 3 trace",
        text="One task on 16,384 GPUs with 1,024 spares, for 54 days. Interruptions occur at the published rate: 419 on"
        " 16,384 GPUs, so 445 on all. A lost node costs its replica, 16 nodes, until the node returns or a spare"
        " replaces it.",
        cases=_llama3,
        show=table,
    ),
    Experiment(
        name="ablations",
        title="Ablations of Unicron",
        text="Without the planner, tasks keep their nodes; without in-band detection, every error waits for a time-out"
        " of 30 minutes; without partial reuse, the step in which a failure occurs is repeated. `unicron_may_pause`"
        " adds a part that jobs have to allow: the plan may pause a task that trains where another gains more by it.",
        cases=_ablations,
        show=table,
    ),
    Experiment(
        name="validation",
        title="Validation against published results",
        text=VALIDATION_TEXT,
        cases=validation_cases,
        show=show_validation,
    ),
    Experiment(
        name="physics",
        title="Slow nodes, corrupted state, bugs and the rest",
        text=PHYSICS_TEXT,
        cases=physics_cases,
        show=show_physics,
    ),
    Experiment(
        name="favour",
        title="Figures least favourable to Unicron",
        text="Every figure of the other systems at the best of its range; then also every figure of Unicron, and the"
        " common figures, at the worst.",
        cases=_favour,
        show=table,
    ),
    Experiment(name="workloads", title="Other workloads", text="On trace `b_quick`.", cases=_workloads, show=table),
    Experiment(
        name="sizes",
        title="Size of the cluster",
        text="The Llama 3 rates for 14 days on one task of up to 98,304 GPUs, with one spare replica for 16.",
        cases=_sizes,
        show=_show_sizes,
    ),
    Experiment(
        name="intervals",
        title="Interval of checkpoints",
        text="On trace `b_quick`; checkpoints themselves cost nothing here.",
        cases=_intervals,
        show=_show_intervals,
    ),
    Experiment(
        name="mtbf",
        title="Frequency of failures",
        text="A week of trace a's sources at other frequencies, with the repairs of `b_quick`.",
        cases=_mtbf,
        show=_show_mtbf,
    ),
    Experiment(
        name="sensitivity",
        title="Sensitivity to each figure",
        text="Trace `b_quick`, seed 0: one figure at a time at its minimum and its maximum. Common figures move all"
        " systems; the table shows Unicron's WAF, the picture its ratio to Megatron's.",
        cases=_sensitivity,
        show=_show_sensitivity,
    ),
)

HEAD: Final = """# Results of the simulator

Written by `make experiments`; [simulator.md](../../docs/simulator.md) describes the method. **These are simulations**:
of Unicron by its real coordinator and planner, of the other systems by models of their behaviour, with
[costs](../../docs/simulator.md#calibration) of which many were published for other models and machines, and some are
guesses. No GPU was involved.

*WAF* is accumulated WAF in per cent of the ideal (no failures); *ratio* is accumulated WAF over that of Megatron with
restart. *Detection*, *transition*, *sub-healthy* and *overhead* are the losses by cause, in per cent of the ideal.
Sub-healthy includes all work that nodes under repair would have done. *To detect* and *to recover* are means over
incidents. Brackets show the minimum and maximum over seeds.
"""

TAIL: Final = """\
## What has changed

Since the page of 2026-11-22:

| subject | before | now |
|---|---|---|
| WAF over Megatron with restart | 1.12 (a), 2.22 (b), 1.25 (`b_quick`), against tasks that wait for repairs | 1.00 \
to 1.12, 1.09 to 2.23, 1.05 to 1.24, by what operators do |
| the others' figures at their best, over Megatron | 1.09, 2.75, 1.19 | 1.01, 1.09, 1.06: torchrun's own times, and \
scaled down after an hour |
| Bamboo's redundancy, worst case | 0.3 of the throughput | 0.8, as Oobleck's simulator has it; the value stays 0.2 |
| a node that fails while it is down | ignored | is away for longer |
| slow nodes, NaN, silent corruption, bugs that strike all, coordinator failures, sizes of checkpoints | ignored | \
simulated, [above](#slow-nodes-corrupted-state-bugs-and-the-rest) |
| published failures and results | Llama 3's causes | eight more traces, and a \
[table](#validation-against-published-results) of predictions |
| declared error of T(t,x) from formulas | 10 % | 27 %, that of free search on runs that were not used, after a loss \
of 2 % for each doubling of the nodes ([planner.md](../../docs/planner.md#accuracy-of-the-analytic-model-of-ttx)) |
| a resize that changes TP x PP | as any other | every system's task saves and restarts, unless its \
change is a restart already |
| a lost node, in the tables of incidents of the other systems | detected and recovered from in no time | with its \
times; WAF was right before |
"""


def sections(found: Iterable[tuple[Experiment, Sequence[WafCurve]]], folder: Path) -> Iterator[str]:
    """Render each experiment as Markdown."""
    for experiment, curves in found:
        yield f"## {experiment.title}\n\n{experiment.text}\n\n{experiment.show(curves, folder)}\n"


def simulated(cases: Sequence[SimulationCase], num_processes: int | None) -> Iterator[WafCurve]:
    """Simulate each case once, whatever it is called, and report the progress on stderr."""
    began = time.monotonic()
    different = dict.fromkeys(replace(case, variant="") for case in cases)
    # The largest clusters take longest, so they come first. Neighbours share their settings, which are cached.
    in_order = sorted(different, key=lambda case: LLAMA3 not in case.overrides)
    with processes(num_processes) as pool:
        running = {case: pool.submit(run, case) for case in in_order}
        for done, _ in enumerate(as_completed(running.values()), 1):
            if done % 50 == 0 or done == len(running):
                print(f"simulated {done} of {len(running)} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        for case in cases:
            curve = running[replace(case, variant="")].result()
            yield replace(curve, row={**curve.row, "variant": case.variant})


def main(arguments: list[str] | None = None) -> None:
    """Run experiments and write the document."""
    parser = argparse.ArgumentParser(prog="python benchmarks/experiments/document.py", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="where to write results.md and images/"
    )
    parser.add_argument("--only", nargs="+", choices=[each.name for each in EXPERIMENTS], help="only these")
    parser.add_argument("--seeds", type=int, default=5, help="of the headline; others have at most 2")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that simulate at a time")
    options = parser.parse_args(arguments)
    images = options.folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in EXPERIMENTS if not options.only or each.name in options.only]
    cases = [(experiment, case) for experiment in chosen for case in experiment.cases(options.seeds)]
    found: dict[str, list[WafCurve]] = {experiment.name: [] for experiment in chosen}
    curves = simulated([case for _, case in cases], options.processes)
    for (experiment, _), curve in zip(cases, curves, strict=True):
        found[experiment.name].append(curve)
    text = "\n".join([HEAD, *sections(((each, found[each.name]) for each in chosen), images), TAIL])
    (options.folder / "results.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
