"""The command ``unicron``: run a coordinator, ask one, or plan.

    unicron coordinator [key=value ...]        run a coordinator (--cfg job: show its configuration)
    unicron status [--task T] [--json]         what it coordinates
    unicron events [--task T] [--since SEQ]    what happened
    unicron resize TASK N|all                  have so many nodes train a task, from the next step on
    unicron drain NODE [NODE ...]              no workers there any more; they leave between two steps
    unicron undrain NODE [NODE ...]            workers may run there again
    unicron plan FILE [--what-if EVENT NAME]   the best allocation of workers to tasks; asks no coordinator

Exit status: 0 done; 1 the coordinator could not run; 2 wrong usage or configuration, or no coordinator answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.planning.command import add_parser as add_plan_parser

DEFAULT_ENDPOINT: Final = "127.0.0.1:29461"
_TIMEOUT_SECONDS: Final = 5.0


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; ends the process.

    Args:
        arguments: the command line without the program's name; default: the process's.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["coordinator"]:
        # Everything behind it is Hydra's, --help and --cfg included.
        from unicron_lightning.coordinator.__main__ import main as run_coordinator

        run_coordinator(given[1:])
        return
    options = _parser().parse_args(given)
    try:
        status: int = options.run(options)
    except UnicronError as error:
        print(f"unicron: {error}", file=sys.stderr)
        status = 2
    except BrokenPipeError:
        # The reader, e.g. `head`, has seen enough; keep Python from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def fetch(endpoint: str, path: str, token: str | None = None, *, method: str = "GET", **query: str) -> Any:
    """Ask a coordinator, or order something of it.

    Args:
        endpoint: ``HOST:PORT``.
        path: e.g. ``/v1/status``.
        token: what to show, None for nothing.
        method: GET, or POST for an order.
        query: parameters.

    Returns:
        The decoded JSON.

    Raises:
        CoordinatorUnavailable: nobody answers there, not a coordinator, or it wants another token.
        UnicronError: the coordinator refuses the order; the reason is its own.
    """
    url = f"http://{endpoint}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # No proxy: an endpoint is a host of the cluster.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url, headers=headers, method=method)
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            refusal = _reason(error) if method == "POST" and error.code == 404 else None
        if refusal is not None:
            raise UnicronError(refusal) from None
        hint = " (token: UNICRON_TOKEN or --token-file)" if error.code == 401 else ""
        raise CoordinatorUnavailable(f"{endpoint} answers HTTP {error.code}{hint}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CoordinatorUnavailable(f"no coordinator answers at {endpoint}: {reason}") from None


def _reason(error: urllib.error.HTTPError) -> str | None:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unicron", description="Training that heals itself.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("coordinator", help="run a coordinator, configured by key=value (see --help behind it)")

    connecting = argparse.ArgumentParser(add_help=False)
    connecting.add_argument("--endpoint", default=DEFAULT_ENDPOINT, metavar="HOST:PORT", help="default: %(default)s")
    connecting.add_argument("--token-file", metavar="PATH", help="file with the token; else UNICRON_TOKEN if set")
    asking = argparse.ArgumentParser(add_help=False, parents=[connecting])
    asking.add_argument("--task", metavar="ID", help="only this task (torchrun's --rdzv-id)")
    asking.add_argument("--json", action="store_true", help="print what the coordinator answers")

    status = commands.add_parser("status", parents=[asking], help="show tasks, members and agents")
    status.set_defaults(run=_status)
    events = commands.add_parser("events", parents=[asking], help="show the event log")
    events.add_argument("--since", type=int, default=0, metavar="SEQ", help="only events after this one")
    events.set_defaults(run=_events)
    resize = commands.add_parser("resize", parents=[connecting], help="have so many nodes train a task")
    resize.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    resize.add_argument("nodes", metavar="N|all", help="within --nnodes MIN:MAX; all: as many as there are, up to MAX")
    resize.set_defaults(run=_resize)
    for verb, does in (("drain", "have no workers on a node"), ("undrain", "allow workers on a node again")):
        order = commands.add_parser(verb, parents=[connecting], help=does)
        order.add_argument("nodes", nargs="+", metavar="NODE", help="a node's label, or an agent's id")
        order.set_defaults(run=_drain, verb=verb)
    add_plan_parser(commands)
    return parser


def _token(options: argparse.Namespace) -> str | None:
    from unicron_lightning.coordinator.config import read_token

    return read_token(options.token_file)


def _status(options: argparse.Namespace) -> int:
    answer = fetch(options.endpoint, "/v1/status", _token(options))
    tasks: dict[str, Any] = answer["tasks"]
    if options.task is not None:
        if options.task not in tasks:
            raise UnicronError(f"no task {options.task!r} at {options.endpoint}; there are: {sorted(tasks)}")
        answer["tasks"] = tasks = {options.task: tasks[options.task]}
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    about = answer["coordinator"]
    console.print(f"coordinator {options.endpoint}  pid {about['pid']}  version {about['version']}", highlight=False)
    if about["store_error"]:
        console.print(f"[red]its state is not being saved: {escape(about['store_error'])}")
    if not tasks:
        console.print("no tasks")
    for task_id, task in tasks.items():
        console.print(_task_table(task_id, task))
    if answer["drained"]:
        console.print(f"drained: {escape(', '.join(answer['drained']))}", highlight=False)
    return 0


def _task_table(task_id: str, task: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    nodes = f"{task['min_nodes']}:{task['max_nodes']} nodes" + (f", {task['target']} wanted" if task["target"] else "")
    title = f"{escape(task_id)}  {task['state']}  epoch {task['epoch']}  life {task['life']}  {nodes}"
    caption = f"incidents {task['incidents']}, restarts {task['restarts']}"
    if task["checkpoint"]:
        caption += f", checkpoint of step {task['checkpoint']['step']}: {escape(task['checkpoint']['path'])}"
    table = Table(title=title, caption=caption, min_width=len(title), title_justify="left", caption_justify="left")
    for column in ("rank", "worker", "node", "state", "step"):
        table.add_column(column, justify="right" if column in ("rank", "step") else "left")
    for member in task["members"]:
        state = "member" if member["alive"] else "finished" if member["finished"] else "dead"
        step = "" if member["step"] is None else str(member["step"])
        table.add_row(str(member["rank"]), escape(member["worker"]), escape(member["node"]), state, step)
    for state in ("candidates", "starting"):
        for worker in task[state]:
            table.add_row("", escape(worker["worker"]), "", state.rstrip("s"), "")
    for agent in task["agents"]:
        # An agent whose workers are shown needs no line of its own.
        if agent["slot"] != "granted" or not agent["connected"] or not task["members"]:
            table.add_row("", escape(agent["agent"]), escape(agent["node"]), _agent_state(agent), "")
    return table


def _agent_state(agent: dict[str, Any]) -> str:
    if not agent["connected"]:
        return "agent away"
    return {"granted": "agent runs", "waiting": "agent stands by", "none": "agent without slot"}[agent["slot"]]


def _resize(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{urllib.parse.quote(options.task, safe='')}/resize"
    answer = fetch(options.endpoint, path, _token(options), method="POST", nodes=options.nodes)
    print(f"{answer['task']}: {answer['nodes'] or 'all'} nodes")
    return 0


def _drain(options: argparse.Namespace) -> int:
    for node in options.nodes:
        path = f"/v1/nodes/{urllib.parse.quote(node, safe='')}/{options.verb}"
        answer = fetch(options.endpoint, path, _token(options), method="POST")
    print(f"drained: {', '.join(answer['drained']) or 'none'}")
    return 0


def _events(options: argparse.Namespace) -> int:
    query = {"since": str(options.since)} | ({"task": options.task} if options.task is not None else {})
    events = fetch(options.endpoint, "/v1/events", _token(options), **query)
    if options.json:
        print(json.dumps(events, indent=2))
        return 0
    for event in events:
        at = time.strftime("%H:%M:%S", time.localtime(event["at"])) + f"{event['at'] % 1:.3f}"[1:]
        fields = " ".join(f"{name}={json.dumps(value)}" for name, value in event["fields"].items())
        print(f"{event['seq']:6d} {at} {event['task'] or '-'} {event['incident'] or '-'} {event['name']} {fields}")
    return 0
