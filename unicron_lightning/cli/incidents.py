"""``unicron incidents``: the cost of failures."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from typing import Any, Final

from unicron_lightning.cli.client import connecting
from unicron_lightning.cli.jobs import ALL, NONE, current
from unicron_lightning.cli.output import all_visible, clock, console, duration, table
from unicron_lightning.cli.stored import ask
from unicron_lightning.coordinator.incidents.record import PHASES, PhaseCost
from unicron_lightning.errors import UnicronError

_UNITS: Final = PhaseCost.__struct_fields__
_ABOUT: Final = (
    *("task", "incident", "outcome", "cause", "failures", "fault_at", "known_at", "stepped_at", "closed_at"),
    *("slots_before", "workers_before", "weight", "flops_per_step"),
)
_UNKNOWN: Final = "unknown, as are the FLOPs of a step or its pace"
_WIDE: Final = 500
_LEAST: Final = 8
_GAP: Final = 2
"""Width between two columns."""
_CUT: Final = ("task", "cause")
"""Columns whose texts are cut, the last one to what the others leave."""
PHASES_SHOWN: Final = ("detection", "transition", "sub-healthy")
"""Names of `PHASES` in tables."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    parser = commands.add_parser("incidents", parents=[connecting()], help="show the cost of failures")
    parser.add_argument("--task", metavar="ID", help="only this task (torchrun's --rdzv-id)")
    parser.add_argument("--id", metavar="INCIDENT", help="all figures of one, e.g. i3")
    parser.add_argument("--all", action="store_true", help=ALL)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print what the coordinator answers")
    form.add_argument("--csv", action="store_true", help="a row per incident, times as seconds since 1970")
    parser.set_defaults(run=_incidents)


def _incidents(options: argparse.Namespace) -> int:
    query = {"task": options.task} if options.task is not None else {}
    recent = {} if options.task else current(options)  # a task that is named may be a former one
    answer = ask(options, "/v1/incidents", **query, **recent)
    if options.json:
        print(json.dumps(answer, indent=2))
    elif options.csv:
        _print_csv(all_visible(answer["incidents"]))
    elif options.id is not None:
        _print_details(all_visible(answer), options.id)
    else:
        _print_table(all_visible(answer), "no incidents" if options.all else f"no incidents {NONE}")
    return 0


def _print_csv(bills: list[dict[str, Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [(phase, unit) for phase in PHASES for unit in _UNITS]
    writer.writerow([*_ABOUT, *(f"{phase}_{unit}" for phase, unit in columns)])
    for bill in bills:
        writer.writerow([*(bill[name] for name in _ABOUT), *(bill["phases"][phase][unit] for phase, unit in columns)])


def _print_table(answer: dict[str, Any], none: str) -> None:
    bills, sums = answer["incidents"], answer["totals"]
    screen = console()
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        screen.width = max(screen.width, _WIDE)  # nothing is cut for a file or another program
    if not bills:
        screen.print(none)
        return
    screen.print(incident_table(sorted(bills, key=lambda bill: bill["fault_at"]), screen.width))
    screen.print(f"all {sums['incidents']}: {_sums(sums['phases'])}", highlight=False)
    if sums["unknown_waf"]:
        screen.print(f"{sums['unknown_waf']} without WAF-seconds: {_UNKNOWN}", highlight=False)


def incident_table(bills: list[dict[str, Any]], width: int) -> Any:
    """Return a table of incidents, a line each: names and causes that are too long for the width are cut."""
    several = len({bill["task"] for bill in bills}) > 1
    columns = ("id", *(("task",) if several else ()), "at", "cause", *PHASES_SHOWN, "end")
    title = None if several else f"task {bills[0]['task']}, cost of its incidents"
    shown = table(*columns, right=PHASES_SHOWN, title=title, title_justify="left")
    rows = [list(columns), *(_row(bill, several=several) for bill in bills)]
    room = width - sum(max(map(len, cells)) + _GAP for cells in zip(*rows, strict=True) if cells[0] not in _CUT)
    for name in [name for name in _CUT if name in columns]:
        most = room - _GAP if name == "cause" else min(max(len(row[1]) for row in rows), room // 2)
        room -= most + _GAP
        for row in rows:
            row[columns.index(name)] = _cut(row[columns.index(name)], max(most, _LEAST))
    for row in rows[1:]:
        shown.add_row(*row)
    return shown


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _row(bill: dict[str, Any], *, several: bool) -> list[str]:
    day, at = time.strftime("%m-%d %H:%M:%S", time.localtime(bill["fault_at"])).split()
    about = [bill["incident"], *([bill["task"]] if several else [])]
    about.append(at if day == time.strftime("%m-%d") else f"{day} {at[:-3]}")
    seconds = [duration(bill["phases"][phase]["seconds"]) for phase in PHASES]
    return [*about, bill["cause"], *seconds, bill["outcome"] or "open"]


def _print_details(answer: dict[str, Any], incident: str) -> None:
    """Print all figures of the incidents that have this id, one in each task."""
    found = [bill for bill in answer["incidents"] if bill["incident"] == incident]
    if not found:
        known = sorted({bill["incident"] for bill in answer["incidents"]}, key=lambda name: (len(name), name))
        raise UnicronError(f"no incident {incident!r}; expected one of: {', '.join(known) or 'none'}")
    for bill in found:
        times = [("fault", "fault_at"), ("known", "known_at"), ("first step", "stepped_at"), ("closed", "closed_at")]
        rows = [(name, "not yet" if bill[key] is None else clock(bill[key])) for name, key in times]
        rows += [
            ("end", bill["outcome"] or "open"),
            ("failures", str(bill["failures"])),
            (
                "before it",
                f"{bill['workers_before']} workers in {bill['slots_before']} slots, weight {bill['weight']:g}",
            ),
            *((name, _cost(bill["phases"][phase])) for phase, name in zip(PHASES, PHASES_SHOWN, strict=True)),
        ]
        if any(bill["phases"][phase]["waf_seconds"] is None for phase in PHASES):
            rows.append(("WAF-seconds", _UNKNOWN))
        lines = [f"{bill['incident']} of task {bill['task']}: {bill['cause']}", *(f"  {a:12} {b}" for a, b in rows)]
        print("\n".join(lines))


def _cost(phase: dict[str, float | None]) -> str:
    waf = phase["waf_seconds"]
    lost = f"{duration(phase['seconds'] or 0.0)}; lost {phase['worker_seconds']:.2f} worker-seconds"
    return lost if waf is None else f"{lost}, {waf:.3g} WAF-seconds"


def _sums(phases: dict[str, dict[str, float]]) -> str:
    parts = [f"{name} {duration(phases[phase]['seconds'])}" for phase, name in zip(PHASES, PHASES_SHOWN, strict=True)]
    workers, waf = (sum(phases[phase][unit] or 0.0 for phase in PHASES) for unit in ("worker_seconds", "waf_seconds"))
    return f"{', '.join(parts)}; lost {workers:.2f} worker-seconds, {waf:.3g} WAF-seconds"
