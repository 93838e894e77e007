"""``unicron incidents``: the cost of failures."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from typing import Any, Final

from unicron_lightning.cli.client import connecting
from unicron_lightning.cli.output import all_visible, console, table
from unicron_lightning.cli.stored import ask
from unicron_lightning.coordinator.incidents.record import PHASES, PhaseCost

_UNITS: Final = PhaseCost.__struct_fields__
_ABOUT: Final = (
    *("task", "incident", "outcome", "cause", "failures", "fault_at", "known_at", "stepped_at", "closed_at"),
    *("slots_before", "workers_before", "weight", "flops_per_step"),
)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    parser = commands.add_parser("incidents", parents=[connecting()], help="show the cost of failures")
    parser.add_argument("--task", metavar="ID", help="only this task (torchrun's --rdzv-id)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print what the coordinator answers")
    form.add_argument("--csv", action="store_true", help="a row per incident, times as seconds since 1970")
    parser.set_defaults(run=_incidents)


def _incidents(options: argparse.Namespace) -> int:
    query = {"task": options.task} if options.task is not None else {}
    answer = ask(options, "/v1/incidents", **query)
    if options.json:
        print(json.dumps(answer, indent=2))
    elif options.csv:
        _print_csv(all_visible(answer["incidents"]))
    else:
        _print_table(all_visible(answer))
    return 0


def _print_csv(bills: list[dict[str, Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [(phase, unit) for phase in PHASES for unit in _UNITS]
    writer.writerow([*_ABOUT, *(f"{phase}_{unit}" for phase, unit in columns)])
    for bill in bills:
        writer.writerow([*(bill[name] for name in _ABOUT), *(bill["phases"][phase][unit] for phase, unit in columns)])


def _print_table(answer: dict[str, Any]) -> None:
    title = "seconds / weighted worker-seconds lost / WAF-seconds (FLOP) lost"
    phases = ("detection", "transition", "sub-healthy")
    shown = table("task", "at", "cause", *phases, "end", right=phases, title=title, title_justify="left")
    shown.columns[-1].no_wrap = True
    for bill in answer["incidents"]:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(bill["fault_at"]))
        costs = [_cost(bill["phases"][phase]) for phase in PHASES]
        shown.add_row(f"{bill['task']}\n{bill['incident']}", at, bill["cause"], *costs, bill["outcome"] or "open")
        shown.add_section()
    sums = answer["totals"]
    shown.add_row(f"all {sums['incidents']}", "", "", *(_cost(sums["phases"][phase]) for phase in PHASES), "")
    if sums["unknown_waf"]:
        shown.caption = f"{sums['unknown_waf']} without WAF-seconds: their FLOPs per step, or their pace, is not known"
    console().print(shown)


def _cost(phase: dict[str, float | None]) -> str:
    waf = phase["waf_seconds"]
    return f"{phase['seconds']:.2f}\n{phase['worker_seconds']:.2f}\n{'?' if waf is None else f'{waf:.3g}'}"
