"""The commands that show a coordinator's state and log: ``unicron status``, ``events``, ``checkpoints``, ``incidents``,
``dashboard``, ``metrics`` and ``top``, a live table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
import webbrowser
from http import HTTPStatus
from typing import Any, Final, Literal

from unicron_lightning.cli.client import (
    access_of,
    answering,
    answering_endpoint,
    ask,
    connecting,
    events_of,
    fetch,
    quoted,
    request,
    stored,
)
from unicron_lightning.cli.orders import ALL, NONE, current, print_jobs
from unicron_lightning.cli.output import all_visible, clock, console, duration, printed, table, visible
from unicron_lightning.coordinator.incidents.facts import PHASES, PhaseCost
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, UnicronError
from unicron_lightning.proof import scrape_credential


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of ``unicron``."""
    asking = argparse.ArgumentParser(add_help=False, parents=[answering()])
    asking.add_argument("--task", metavar="ID", help="only this task (torchrun's --rdzv-id)")
    status = commands.add_parser("status", parents=[asking], help="show tasks, members and agents")
    status.set_defaults(run=_status)
    events = commands.add_parser("events", parents=[asking], help="show the event log")
    events.add_argument("--since", type=int, default=0, metavar="SEQ", help="only events after this one")
    events.set_defaults(run=_events)
    does = "show the versions of a task's state from which it can resume"
    shown = commands.add_parser("checkpoints", parents=[answering()], help=does)
    shown.add_argument("task", metavar="TASK", help="its name (torchrun's --rdzv-id)")
    shown.set_defaults(run=_checkpoints)
    page = commands.add_parser("dashboard", parents=[answering()], help="open the coordinator's page in a browser")
    page.add_argument("--open", action="store_true", help="start the browser of this machine")
    page.set_defaults(run=_dashboard)
    figures = commands.add_parser("metrics", parents=[connecting()], help="show the figures for Prometheus")
    words = "print the credential for Prometheus instead: it permits to read /metrics, and nothing else"
    figures.add_argument("--credential", action="store_true", help=words)
    figures.set_defaults(run=_metrics)


def _status(options: argparse.Namespace) -> int:
    try:
        answer = fetch(options.endpoint, "/v1/status", access_of(options))
    except CoordinatorUnavailable:
        jobs = None if options.json else stored(options.endpoint, "/v1/jobs", current="1")
        if jobs is None:
            raise
        print_jobs([job for job in jobs if options.task in (None, job["name"])])
        return 0
    tasks: dict[str, Any] = answer["tasks"]
    if options.task is not None:
        if options.task not in tasks:
            raise UnicronError(f"no task {options.task!r} at {options.endpoint}; expected one of: {sorted(tasks)}")
        answer["tasks"] = tasks = {options.task: tasks[options.task]}
    if options.json:
        return printed(options, answer)
    answer = all_visible(answer)
    tasks = answer["tasks"]
    screen = console()
    about = answer["coordinator"]
    screen.print(f"coordinator {options.endpoint}  pid {about['pid']}  version {about['version']}", highlight=False)
    if about["store_error"]:
        screen.print(f"its state is not being saved: {about['store_error']}", style="red")
    if not tasks:
        screen.print("no tasks")
    if answer["nodes"]:
        screen.print(_nodes_table(answer["nodes"]))
    for task_id, task in tasks.items():
        screen.print(_task_table(task_id, task))
        if (why := answer["waiting"].get(task_id)) is not None:
            screen.print(f"{task_id}: {why}", highlight=False)
    drained = [node for node in answer["drained"] if node not in answer["cordoned"]]
    if drained:
        screen.print(f"drained: {', '.join(drained)}", highlight=False)
    for node, reason in answer["cordoned"].items():
        screen.print(f"cordoned: {node}: {reason}", highlight=False)
    for node, reason in answer["staying"].items():
        screen.print(f"{node} stays: {reason}", highlight=False)
    for node, at in answer["lost"].items():
        since = time.strftime("%m-%d %H:%M:%S", time.localtime(at))
        screen.print(f"down: {node}, lost at {since}", style="red", highlight=False)
    return 0


def _nodes_table(nodes: dict[str, Any]) -> Any:
    """Return the nodes that have a daemon, with their slots, as a table."""
    shown = table("node", "host", "state", "slot", "has", "agents")
    for label, node in nodes.items():
        state = "away" if not node["connected"] else "drained" if node["drained"] else "ready"
        for place, (slot, about) in enumerate(node["slots"].items()):
            first = (label, node["host"], state) if place == 0 else ("", "", "")
            shown.add_row(*first, slot, about["assigned"] or "", " ".join(about["agents"]))
    return shown


def _layout(layout: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in layout.items())


def _task_table(task_id: str, task: dict[str, Any]) -> Any:
    nodes = f"{task['min_nodes']}:{task['max_nodes']} nodes" + (f", {task['target']} wanted" if task["target"] else "")
    title = f"{task_id}  {task['state']}  epoch {task['epoch']}  life {task['life']}  {nodes}"
    if task["progress"] is not None:
        title += f"  step {task['progress']['step']}"
    caption = f"incidents {task['incidents']}, restarts {task['restarts']}"
    if doing := (task.get("calibration") or {}).get("doing"):
        caption += f", {doing}"
    if (layout := task.get("layout")) is not None:
        caption += f", {_layout(layout)}"
    if (ordered := task.get("layout_ordered")) is not None:
        caption += f", on its way to {_layout(ordered)}"
    if task["degraded"]:
        caption += ", slower than usual"
    if task["checkpoint"]:
        caption += f", checkpoint of step {task['checkpoint']['step']}: {task['checkpoint']['path']}"
    if (failure := task.get("last_failure")) is not None:
        caption += f"\nlast failure: {failure['worker'] or failure['node']}: {failure['cause']}"
    columns, left = ("rank", "worker", "node", "state"), {"title_justify": "left", "caption_justify": "left"}
    shown = table(*columns, right=("rank",), title=title, caption=caption, min_width=len(title), **left)
    for member in task["members"]:
        state = "member" if member["alive"] else "finished" if member["finished"] else "dead"
        if member["worker"] in task["stragglers"]:
            state += f", straggler ({task['stragglers'][member['worker']]}x)"
        shown.add_row(str(member["rank"]), member["worker"], member["node"], state + _part(member))
    for state in ("candidates", "starting"):
        for worker in task[state]:
            shown.add_row("", worker["worker"], "", state.rstrip("s"))
    for agent in task["agents"]:
        # An agent whose workers are shown needs no line of its own.
        if agent["slot"] != "granted" or not agent["connected"] or not task["members"]:
            shown.add_row("", agent["agent"], agent["node"], _agent_state(agent))
    return shown


def _part(member: dict[str, Any]) -> str:
    """A member's part in a model that is spread over several workers."""
    if member.get("spare"):
        return ", spare"
    if member.get("replica") is None:
        return ""
    part = f"shard {member['shard']}" if member["stage"] is None else f"stage {member['stage']}"
    return f", replica {member['replica']} {part}"


def _agent_state(agent: dict[str, Any]) -> str:
    if not agent["connected"]:
        return "agent away"
    if agent.get("unhealthy") and agent["slot"] != "granted":
        return f"barred: {agent['unhealthy']}"
    states = {"granted": "agent runs", "warm": "agent stands by, warm", "waiting": "agent stands by"}
    return states.get(agent["slot"], "agent without slot")


def _events(options: argparse.Namespace) -> int:
    events = events_of(options, since=options.since, task=options.task)
    if options.json:
        return printed(options, events)
    for event in all_visible(events):
        at = time.strftime("%H:%M:%S", time.localtime(event["at"])) + f"{event['at'] % 1:.3f}"[1:]
        fields = " ".join(f"{name}={json.dumps(value)}" for name, value in event["fields"].items())
        print(f"{event['seq']:6d} {at} {event['task'] or '-'} {event['incident'] or '-'} {event['name']} {fields}")
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/checkpoints"
    versions: list[dict[str, Any]] = fetch(options.endpoint, path, access_of(options))
    if options.json:
        return printed(options, versions)
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


def _dashboard(options: argparse.Namespace) -> int:
    """Print the address of the page, with a code that opens it once."""
    access = access_of(options)
    endpoint = answering_endpoint(options.endpoint, access)
    answer = fetch(endpoint, "/v1/dashboard/code", access, method="POST")
    status = fetch(endpoint, "/v1/status", access)["coordinator"]
    scheme = "https" if status["encrypted"] else "http"
    # Browsers send no server the part behind "#", so that the code is in no log; the page removes it from the address.
    address = f"{scheme}://{endpoint}/dashboard#code={answer['code']}"
    words = f"It opens the page once, within {answer['seconds'] / 60:.0f} minutes."
    printed(options, {"address": address, "seconds": answer["seconds"]}, address, words)
    if options.open:
        webbrowser.open(address)
    return 0


def _metrics(options: argparse.Namespace) -> int:
    """Print the figures as Prometheus reads them, or the credential that it needs."""
    access = access_of(options)
    if options.credential:
        print(scrape_credential(access.token.secret))
        return 0
    status, answer = request(options.endpoint, "GET", "/metrics", access)
    if status != HTTPStatus.OK:
        raise CoordinatorUnavailable(f"{options.endpoint} answers HTTP {status}")
    sys.stdout.write(answer.decode())
    return 0


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
_PHASES_SHOWN: Final = ("detection", "transition", "sub-healthy")
"""Names of `PHASES` in tables."""


def add_incidents(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
        printed(options, answer)
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
    screen.print(_incident_table(sorted(bills, key=lambda bill: bill["fault_at"]), screen.width))
    screen.print(f"all {sums['incidents']}: {_sums(sums['phases'])}", highlight=False)
    if sums["unknown_waf"]:
        screen.print(f"{sums['unknown_waf']} without WAF-seconds: {_UNKNOWN}", highlight=False)


def _incident_table(bills: list[dict[str, Any]], width: int) -> Any:
    """Return a table of incidents, a line each: names and causes that are too long for the width are cut."""
    several = len({bill["task"] for bill in bills}) > 1
    columns = ("id", *(("task",) if several else ()), "at", "cause", *_PHASES_SHOWN, "end")
    title = None if several else f"task {bills[0]['task']}, cost of its incidents"
    shown = table(*columns, right=_PHASES_SHOWN, title=title, title_justify="left")
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
            *((name, _cost(bill["phases"][phase])) for phase, name in zip(PHASES, _PHASES_SHOWN, strict=True)),
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
    parts = [f"{name} {duration(phases[phase]['seconds'])}" for phase, name in zip(PHASES, _PHASES_SHOWN, strict=True)]
    workers, waf = (sum(phases[phase][unit] or 0.0 for phase in PHASES) for unit in ("worker_seconds", "waf_seconds"))
    return f"{', '.join(parts)}; lost {workers:.2f} worker-seconds, {waf:.3g} WAF-seconds"


def add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
            return printed(options, answer)
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
        parts.append(_nodes_table(status["nodes"]))
    if status["newest_incidents"]:
        parts.append(_incident_table(status["newest_incidents"], width))
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
    for column in (*texts, "workers", "step", "steps/s", "loss", "goodput", "inc."):
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
