"""A simulation as one row, and summaries of many rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from unicron_lightning.coordinator.incidents.record import PHASES
from unicron_lightning.simulate.result import LOSSES, MICRO, STATES, SimulationResult

SummaryRow = Mapping[str, str | int | float]

WHAT: Final = ("policy", "trace", "workload", "variant")
"""Columns that identify the simulation; the results are averaged over `seed`."""
EXACT: Final = "seed"


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
    }
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
        groups.setdefault(tuple(str(row[name]) for name in WHAT), []).append(row)
    made = []
    for key, group in groups.items():
        mean: dict[str, str | int | float] = dict(zip(WHAT, key, strict=True))
        mean["seeds"] = len(group)
        for name in group[0]:
            if name not in (*WHAT, EXACT) and all(name in row for row in group):
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
