"""``unicron top``: tasks, nodes and training speed, as a live table."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Final, Literal

from unicron_lightning.cli.client import access_of, connecting, fetch
from unicron_lightning.cli.incidents import incident_table
from unicron_lightning.cli.inspection import nodes_table
from unicron_lightning.cli.output import all_visible, console, visible
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    top = commands.add_parser("top", parents=[connecting()], help="watch tasks and nodes")
    top.add_argument("--once", action="store_true", help="show them once and end")
    top.add_argument("--json", action="store_true", help="print the coordinator's answer and the speeds once, and end")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds; default: %(default)s")
    top.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    from rich.live import Live

    if not options.interval > 0:
        raise ConfigError(f"--interval {options.interval}: expected seconds > 0")
    access = access_of(options)
    speeds = Speeds()

    def look() -> dict[str, Any]:
        found = fetch(options.endpoint, "/v1/status", access)
        found["newest_incidents"] = fetch(options.endpoint, "/v1/incidents", access, limit=str(_SHOWN))["incidents"]
        return dict(found)

    status = all_visible(look())
    speeds.update(status, time.monotonic())
    screen = console()
    if options.once or options.json:
        time.sleep(options.interval)  # two looks make a speed
        answer = look()
        status = all_visible(answer)
        speeds.update(status, time.monotonic())
        if options.json:
            answer["steps_per_second"] = {task: speeds.of(task) for task in status["tasks"]}
            print(json.dumps(answer, indent=2))
            return 0
        screen.print(picture(status, speeds, None, screen.width))
        return 0
    try:
        with Live(
            picture(status, speeds, None, screen.width), console=screen, screen=screen.is_terminal, auto_refresh=False
        ) as live:
            while True:
                time.sleep(options.interval)
                away = None
                try:
                    status = all_visible(look())
                    speeds.update(status, time.monotonic())
                except CoordinatorUnavailable as error:
                    away = str(error)
                live.update(picture(status, speeds, away, screen.width), refresh=True)
    except KeyboardInterrupt:
        return 0


_SHOWN: Final = 5
"""Newest closed incidents that are shown, beside the open ones."""


class Speeds:
    """Steps per second of tasks, from their steps at different times, over the last 30 seconds or so."""

    _SECONDS = 30.0

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def update(self, status: dict[str, Any], now: float) -> None:
        """Record a status.

        Args:
            status: the coordinator's answer.
            now: seconds, of any monotonic clock.
        """
        for name, task in status["tasks"].items():
            step = task["progress"]["step"] if task["progress"] else 0
            seen = self._seen.setdefault(name, [])
            if seen and step < seen[-1][1]:
                seen.clear()  # a new life began at an earlier step
            seen.append((now, step))
            while len(seen) > 2 and seen[1][0] < now - self._SECONDS:
                del seen[0]

    def of(self, task: str) -> float | None:
        """Return its steps per second; None if it was seen once."""
        seen = self._seen.get(task, [])
        if len(seen) < 2 or seen[-1][0] == seen[0][0]:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def picture(status: dict[str, Any], speeds: Speeds, away: str | None, width: int = 80) -> Any:
    """Render the screen.

    Args:
        status: the coordinator's newest answer.
        speeds: steps per second.
        away: why there is no newer answer, or None.
        width: columns of the terminal.
    """
    from rich.console import Group
    from rich.text import Text

    about = status["coordinator"]
    head = f"coordinator {about['host']}:{about['port']}  pid {about['pid']}"
    parts: list[Any] = [head] if away is None else [Text(visible(away), style="red")]
    parts.append(_tasks(status, speeds) if status["tasks"] else "no tasks")
    if status["nodes"]:
        parts.append(nodes_table(status["nodes"]))
    if status["newest_incidents"]:
        parts.append(incident_table(status["newest_incidents"], width))
    if status["drained"]:
        parts.append(f"drained: {', '.join(status['drained'])}")
    parts += [f"{task}: {why}" for task, why in status["waiting"].items()]
    parts += [f"{node} stays: {why}" for node, why in status["staying"].items()]
    if status["lost"]:
        parts.append(Text(f"down: {', '.join(status['lost'])}", style="red"))
    return Group(*parts)


def _tasks(status: dict[str, Any], speeds: Speeds) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fits into 80 columns
    texts = ("task", "state", "slots")
    for column in ("task", "state", "slots", "workers", "step", "steps/s", "loss", "goodput", "inc."):
        side: Literal["left", "right"] = "left" if column in texts else "right"
        least = 8 if column == "task" else None
        shown.add_column(column, justify=side, no_wrap=column != "task", overflow="fold", min_width=least)
    for name, task in status["tasks"].items():
        has = sum(1 for agent in task["agents"] if agent["slot"] == "granted")
        alive = sum(1 for member in task["members"] if member["alive"])
        speed = speeds.of(name)
        loss = task["progress"]["metrics"].get("loss") if task["progress"] else None
        shown.add_row(
            name,
            task["state"],
            f"{has} of {task['min_nodes']}:{task['max_nodes']}",
            str(alive),
            str(task["progress"]["step"]) if task["progress"] else "",
            "" if speed is None else f"{speed:.2f}",
            "" if loss is None else f"{loss:.4g}",
            "" if task["goodput"] is None else f"{100 * task['goodput']:.1f}%",
            str(task["incidents"]),
        )
    return shown
