"""``unicron checkpoints``: the versions of a task's state, in the memory of agents and on disk."""

from __future__ import annotations

import argparse
import json
from typing import Any

from unicron_lightning.cli.client import access_of, answering, fetch, quoted
from unicron_lightning.cli.output import console, table, visible


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    does = "show the versions of a task's state from which it can resume"
    shown = commands.add_parser("checkpoints", parents=[answering()], help=does)
    shown.add_argument("task", metavar="TASK", help="its name (torchrun's --rdzv-id)")
    shown.set_defaults(run=_checkpoints)


def _checkpoints(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/checkpoints"
    versions: list[dict[str, Any]] = fetch(options.endpoint, path, access_of(options))
    if options.json:
        print(json.dumps(versions, indent=2))
        return 0
    shown = table("step", "tier", "state", "life", "size", "held by")
    for each in versions:
        holders = (_holder(name, parts) for name, parts in each["holders"].items())
        row = (str(each["step"]), each["tier"], each["state"], str(each["life"]), _size(each["bytes"]))
        shown.add_row(*map(visible, row), visible(", ".join(holders)))
    console().print(shown if versions else "no versions are known")
    return 0


def _holder(name: str, parts: list[int]) -> str:
    return f"{name} ({' '.join(map(str, parts))})" if parts else name


def _size(number: int | None) -> str:
    if number is None:
        return ""
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
