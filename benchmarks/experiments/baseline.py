"""Axes of the baseline: choices of the operators of Megatron, which decide the headline more than Unicron does.

* *Scaled down by hand*: hours until operators restart a task with the nodes that are left; never is the default.
* *Spare nodes*: nodes beyond those that the tasks can use. Every system has them, and they fail like all others.
* *Time-outs*: as published for production (30 min to detect, 23 min to restart), or as measured for torchrun here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from experiment_cases import SimulationCase, cases_of

from unicron_lightning.simulate.output import WafCurve

BASELINE: Final = "megatron"
OURS: Final = "unicron"
TRACES: Final = ("a", "b", "b_quick")
HOURS: Final[tuple[float | None, ...]] = (None, 24.0, 6.0, 1.0)
SPARES: Final = (0, 1, 2)
_NODES: Final = 16
"""Nodes that the tasks of the workload ``six`` can use."""
MEASURED: Final = (
    ("megatron.detection.default", 5.19),
    ("megatron.detection.lost_connection", 45.5),
    ("megatron.change.restart", 9.41 - 5.19 + 3 * 60.0),
)
"""torchrun here (docs/benchmarks.md), with 3 min for a process's start on a GPU node, communicators and loading."""
TIMES: Final[Mapping[str, tuple[tuple[str, float], ...]]] = {"as published": (), "as torchrun here": MEASURED}
PAPERS: Final[Mapping[str, float]] = {"oobleck": 3.7, "bamboo": 4.8, "varuna": 5.8}
"""Ratios of Unicron's accumulated WAF to each system's that are attributed to the paper's evaluation."""

Point = tuple[str, str, float | None, int]
"""A trace, a choice of `TIMES`, hours, and spare nodes."""


def baseline_cases(seeds: int) -> list[SimulationCase]:
    """Create the cases of all points; Unicron's depend on the trace and the spare nodes only."""
    made = []
    for trace in TRACES:
        for spares in SPARES:
            overrides = (f"trace={trace}", f"cluster.num_nodes={_NODES + spares}")
            made += cases_of((OURS,), seeds, *overrides, variant=_name("", None, spares))
            for times, moves in TIMES.items():
                for hours in HOURS:
                    by_hand = () if hours is None else ((f"{BASELINE}.extra.scale_down_hours", hours),)
                    name = _name(times, hours, spares)
                    made += cases_of((BASELINE,), seeds, *overrides, variant=name, moves=(*moves, *by_hand))
    return made


def _name(times: str, hours: float | None, spares: int) -> str:
    return f"{times}/{hours}/{spares}"


def ratios(curves: Sequence[WafCurve]) -> dict[Point, float]:
    """Return Unicron's accumulated WAF over the baseline's at each point, both summed over seeds."""
    waf: dict[tuple[str, str, str], float] = {}
    for curve in curves:
        key = str(curve.row["policy"]), str(curve.row["trace"]), str(curve.row["variant"])
        waf[key] = waf.get(key, 0.0) + float(curve.row["of_ideal"])
    return {
        (trace, times, hours, spares): waf[OURS, trace, _name("", None, spares)]
        / waf[BASELINE, trace, _name(times, hours, spares)]
        for trace in TRACES
        for times in TIMES
        for hours in HOURS
        for spares in SPARES
    }


def show_baseline(curves: Sequence[WafCurve], _folder: Path) -> str:
    """State the range on each trace, then the table of all points, and what moves them."""
    found = ratios(curves)
    lines = [*(_range(found, trace) for trace in TRACES), ""]
    titles = ["never scaled down" if hours is None else f"after {hours:g} h" for hours in HOURS]
    lines.append(f"| trace | time-outs | spare nodes | {' | '.join(titles)} |")
    lines.append(f"|---|---|---:|{'---:|' * len(titles)}")
    for trace in TRACES:
        for times in TIMES:
            for spares in SPARES:
                cells = " | ".join(f"{found[trace, times, hours, spares]:.2f}" for hours in HOURS)
                lines.append(f"| {trace} | {times} | {spares} | {cells} |")
    return "\n".join([*lines, "", SMALLER])


def _range(found: Mapping[Point, float], trace: str) -> str:
    here = [value for (of, *_), value in found.items() if of == trace]
    default = found[trace, "as published", None, 0]
    return (
        f"- **Trace {trace}: {min(here):.2f} to {max(here):.2f} times** Megatron's accumulated WAF; {default:.2f} with"
        " published times, no spare node, and nobody who scales down."
    )


def speed_cases(seeds: int) -> list[SimulationCase]:
    """Create the cases of `show_speeds`."""
    return [case for trace in ("a", "b") for case in cases_of((OURS, *PAPERS), seeds, f"trace={trace}")]


def show_speeds(curves: Sequence[WafCurve], _folder: Path) -> str:
    """Tabulate the base speed that would explain each of `PAPERS`, as a part of Megatron's."""
    waf: dict[tuple[str, str], float] = {}
    for curve in curves:
        key = str(curve.row["policy"]), str(curve.row["trace"])
        waf[key] = waf.get(key, 0.0) + float(curve.row["of_ideal"])
    lines = [
        "| system | Unicron's WAF over its, a | b | attributed to the paper | base speed that explains it, a | b |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for policy, paper in PAPERS.items():
        here = [waf[OURS, trace] / waf[policy, trace] for trace in ("a", "b")]
        implied = " | ".join(f"{ratio / paper:.2f}" for ratio in here)
        lines.append(f"| {policy} | {here[0]:.2f} | {here[1]:.2f} | {paper:g} | {implied} |")
    return "\n".join(lines)


RANGE_TEXT: Final = """\
Unicron's accumulated WAF over Megatron's, by what Megatron's operators do: hours until they restart a task by hand on
the nodes that are left, spare nodes (which Unicron has too), and times to detect and to restart. *As published*: 30 min
and 23 min (arXiv 2401.00134, section 2). *As torchrun here*: 5.2 s if a worker has died, else the time-out of 30 min,
and 3 min to restart. The paper describes tasks that run on fewer nodes for hours or days after hardware faults, and
shows scaling down by hand (figure 2). It does not support that tasks wait until a node is repaired, as in the column
*never*, and gives neither a delay nor a number of spare nodes."""

SMALLER: Final = """\
### What would make these numbers smaller

The largest number needs a baseline whose operators let a task wait for days. It gets smaller:

- if they restart it on the nodes that are left: by more than half of the advantage after a day, by six sevenths after
  an hour (trace b);
- with spare nodes, which every system uses for what the planner would do: with one or two little of trace a's is left;
- with repairs of hours instead of days (`b_quick`);
- with the times of torchrun here instead of those published for production;
- against systems that continue with fewer nodes, such as torchft: 1.00 to 1.06 (next section), whatever the times are;
- if a change of TP x PP takes longer than the 134 s assumed: Megatron's restarts include it;
- if training with Unicron is slower than without: each per cent of step time is a per cent of WAF
  ([measured](../../docs/benchmarks.md): none on CPUs; unknown on GPUs).

It gets larger with larger tasks and more frequent failures, as time-outs and restarts take a larger part (below)."""

SPEEDS_TEXT: Final = """\
All other sections take the three as fast as Megatron. The paper's evaluation (arXiv 2401.00134) is quoted with larger
ratios than recovery explains; the last columns are the parts of Megatron's speed at which they would follow from this
simulator. The paper's text was not at hand, so these ratios are not verified here. No source was found that compares
one of the three with Megatron on a fast network. Oobleck's own simulator (SymbioticLab/Oobleck, tools/simulator, 30
nodes) has Varuna at 0.95 (GPT-3 6.7B) and 1.06 (2.7B), and Bamboo at 0.32 (BERT-large), of Oobleck's throughput. To
simulate a base speed: `costs.oobleck.step_overhead=2.7` makes a step 3.7 times as long."""
