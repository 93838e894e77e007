"""``unicron status``, ``events``, ``checkpoints``, ``dashboard`` and ``metrics``: the coordinator's state and log."""

from __future__ import annotations

import argparse
import json
import sys
import time
import webbrowser
from http import HTTPStatus
from typing import Any

from unicron_lightning.cli.client import access_of, answering, connecting, fetch, quoted, request
from unicron_lightning.cli.jobs import print_jobs
from unicron_lightning.cli.output import all_visible, console, table, visible
from unicron_lightning.cli.stored import events_of, stored
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
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
        print(json.dumps(answer, indent=2))
        return 0
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
        screen.print(nodes_table(answer["nodes"]))
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


def nodes_table(nodes: dict[str, Any]) -> Any:
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
        print(json.dumps(events, indent=2))
        return 0
    for event in all_visible(events):
        at = time.strftime("%H:%M:%S", time.localtime(event["at"])) + f"{event['at'] % 1:.3f}"[1:]
        fields = " ".join(f"{name}={json.dumps(value)}" for name, value in event["fields"].items())
        print(f"{event['seq']:6d} {at} {event['task'] or '-'} {event['incident'] or '-'} {event['name']} {fields}")
    return 0


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


def _dashboard(options: argparse.Namespace) -> int:
    """Print the address of the page, with a code that opens it once."""
    access = access_of(options)
    answer = fetch(options.endpoint, "/v1/dashboard/code", access, method="POST")
    status = fetch(options.endpoint, "/v1/status", access)["coordinator"]
    scheme = "https" if status["encrypted"] else "http"
    # Browsers send no server the part behind "#", so that the code is in no log; the page removes it from the address.
    address = f"{scheme}://{options.endpoint}/dashboard#code={answer['code']}"
    if options.json:
        print(json.dumps({"address": address, "seconds": answer["seconds"]}, indent=2))
    else:
        print(f"{address}\nIt opens the page once, within {answer['seconds'] / 60:.0f} minutes.")
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
