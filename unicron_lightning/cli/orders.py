"""Orders to a coordinator: ``unicron submit``, ``cancel``, ``resize``, ``relayout``, ``drain``, ``undrain`` and
``inject``; and ``jobs``, the tasks that the nodes' daemons run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from heapq import merge
from pathlib import Path
from typing import Any, Final

from unicron_lightning.cli.client import access_of, answering, ask, fetch, quoted
from unicron_lightning.cli.output import all_visible, console, printed, table, visible
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, UnicronError
from unicron_lightning.faults.arrivals import arrivals
from unicron_lightning.faults.fault import Fault, Faults, text

_EXAMPLE = "examples/job.yaml"
_POLL_SECONDS = 0.5
ALL: Final = "also of tasks that had ended before this coordinator started"
NONE: Final = "since this coordinator started; --all shows what former ones had"


def add_jobs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of ``unicron``."""
    submit = commands.add_parser("submit", parents=[answering()], help="have the nodes' daemons run a task")
    submit.add_argument("file", nargs="?", metavar="FILE", help="the task, in YAML")
    submit.add_argument("--example", action="store_true", help="print an example of such a file")
    submit.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the file")
    many = "submit a job for each index, e.g. 0-9,12: NAME-0, NAME-1, ..."
    submit.add_argument("--array", metavar="INDICES", help=many)
    submit.add_argument("--wait", action="store_true", help="until all have ended; status 1 unless all succeeded")
    submit.set_defaults(run=_submit)
    cancel = commands.add_parser("cancel", parents=[answering()], help="end a task now, submitted or not")
    cancel.add_argument("task", metavar="TASK", help="its name (torchrun's --rdzv-id)")
    saves = "let the members write a checkpoint first, within detection.pause_grace seconds"
    cancel.add_argument("--save", action="store_true", help=saves)
    cancel.set_defaults(run=_cancel)
    jobs = commands.add_parser("jobs", parents=[answering()], help="show tasks that wait, run, or have ended")
    jobs.add_argument("--all", action="store_true", help=ALL)
    jobs.set_defaults(run=_jobs)


def _submit(options: argparse.Namespace) -> int:
    if options.example:
        from importlib import resources

        print(resources.files("unicron_lightning.conf").joinpath(_EXAMPLE).read_text(encoding="utf-8"), end="")
        return 0
    if options.file is None:
        raise ConfigError("submit: no FILE: expected one (unicron submit --example prints an example)")
    import msgspec

    from unicron_lightning.cli.job_file import array_of, read_job

    job = read_job(Path(options.file), options.set)
    jobs = [job] if options.array is None else array_of(job, options.array)
    body = msgspec.to_builtins(jobs, str_keys=True)
    answers = fetch(options.endpoint, "/v1/jobs", access_of(options), method="POST", body=body)
    if not options.json:
        for answer in answers:
            print(visible(f"{answer['name']}: {answer['state']}"), flush=True)
    if options.wait:
        answers = [_wait(options, answer["name"]) for answer in answers]
    if options.json:
        print(json.dumps(answers, indent=2))
    return 0 if not options.wait or all(job["state"] == "succeeded" for job in answers) else 1


def _wait(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Wait for a job's end, even while the coordinator is away; return the job."""
    job: dict[str, Any] = {"ended_at": None}
    while job["ended_at"] is None:
        time.sleep(_POLL_SECONDS)
        with contextlib.suppress(CoordinatorUnavailable):
            job = fetch(options.endpoint, f"/v1/jobs/{quoted(name)}", access_of(options))
    if not options.json:
        print(f"{visible(name)}: {job['state']} ({_lines_of(job['reason'] or '')})", flush=True)
    return job


def _cancel(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/cancel"
    query = {"save": "1"} if options.save else {}
    answer = fetch(options.endpoint, path, access_of(options), method="POST", **query)
    saves = options.save and answer["ended_at"] is None
    follows = ", and ends once it has written a checkpoint; then `unicron jobs` names it" if saves else ""
    return printed(options, answer, visible(f"{answer['name']}: {answer['state']}{follows}"))


def _jobs(options: argparse.Namespace) -> int:
    jobs: list[dict[str, Any]] = ask(options, "/v1/jobs", **current(options))
    if options.json:
        return printed(options, jobs)
    print_jobs(jobs, none="no jobs" if options.all else f"no jobs {NONE}")
    return 0


def current(options: argparse.Namespace) -> dict[str, str]:
    """Return the query for what belongs to the coordinator, unless ``--all`` is given."""
    return {} if options.all else {"current": "1"}


def print_jobs(jobs: list[dict[str, Any]], none: str = "no jobs") -> None:
    """Print a table of jobs, as answered for /v1/jobs; without any, the text ``none``."""
    shown = table("task", "state", "since", "by", "reason")
    for job in jobs:
        since = time.strftime("%m-%d %H:%M:%S", time.localtime(job["ended_at"] or job["submitted_at"]))
        by = "submit" if job["managed"] else "torchrun"
        shown.add_row(visible(job["name"]), visible(job["state"]), since, by, _lines_of(job["reason"] or ""))
    console().print(shown if jobs else none)


def _lines_of(reason: str) -> str:
    """Return a reason, of which the lines after the first are indented: none of them looks like one of this command."""
    return "\n  ".join(visible(line) for line in reason.splitlines())


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of ``unicron``."""
    resize = commands.add_parser("resize", parents=[answering()], help="set the number of nodes of a task")
    resize.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    resize.add_argument("nodes", metavar="N|all", help="within --nnodes MIN:MAX; all: all available ones, up to MAX")
    resize.set_defaults(run=_resize)
    other = "change the layout of a model that is spread over workers, through a checkpoint"
    relayout = commands.add_parser("relayout", parents=[answering()], help=other)
    relayout.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    relayout.add_argument("--tp", metavar="T", help="tensor-parallel size of a Megatron task")
    relayout.add_argument("--pp", metavar="P", help="pipeline stages of a Megatron task")
    relayout.add_argument("--ep", metavar="E", help="workers that divide its experts; the present number by default")
    relayout.add_argument("--shards", metavar="S", help="workers of a replica of a task of unicron_fsdp")
    relayout.set_defaults(run=_relayout)
    for verb, does in (("drain", "remove the workers of a node"), ("undrain", "allow workers on a node again")):
        order = commands.add_parser(verb, parents=[answering()], help=does)
        order.add_argument("nodes", nargs="+", metavar="NODE", help="a node's label, or an agent's id")
        order.set_defaults(run=_drain, verb=verb)
    _add_inject(commands)


def _resize(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/resize"
    answer = fetch(options.endpoint, path, access_of(options), method="POST", nodes=options.nodes)
    shown = all_visible(answer)
    return printed(options, answer, f"{shown['task']}: {shown['nodes'] or 'all'} nodes")


def _relayout(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/relayout"
    sizes = {name: size for name in ("tp", "pp", "ep", "shards") if (size := getattr(options, name)) is not None}
    if set(sizes) not in ({"tp", "pp"}, {"tp", "pp", "ep"}, {"shards"}):
        raise ConfigError(
            f"relayout with {', '.join(f'--{name}' for name in sizes) or 'no size'}: expected --tp and --pp, "
            "also with --ep, or --shards"
        )
    answer = fetch(options.endpoint, path, access_of(options), method="POST", **sizes)
    shown = all_visible(answer)
    words = ", ".join(f"{name}={shown[name]}" for name in ("shards", "tp", "pp", "cp", "ep") if name in shown)
    return printed(options, answer, f"{shown['task']}: {words} after a checkpoint")


def _drain(options: argparse.Namespace) -> int:
    for node in options.nodes:
        path = f"/v1/nodes/{quoted(node)}/{options.verb}"
        answer = fetch(options.endpoint, path, access_of(options), method="POST")
    shown = all_visible(answer)
    staying = [f"{node} stays: {reason}" for node, reason in shown["staying"].items()]
    return printed(options, answer, f"drained: {', '.join(shown['drained']) or 'none'}", *staying)


def _add_inject(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inject = commands.add_parser(
        "inject", parents=[answering()], help="inject faults into a task (docs/faults.md has the language)"
    )
    inject.add_argument("faults", nargs="*", metavar="FAULT", help='e.g. "kill rank=1", "stop node=b for=5s"')
    inject.add_argument("--file", metavar="PATH", help="a YAML list of more")
    inject.add_argument("--task", metavar="TASK", help="torchrun's --rdzv-id; else each fault has task=")
    inject.add_argument("--seed", type=int, default=None, help="seed of random draws; default: another each time")
    inject.set_defaults(run=_inject)


def _inject(options: argparse.Namespace) -> int:
    faults = Faults([*Faults(options.faults), *(Faults.read(options.file) if options.file else ())])
    if options.seed is not None:
        faults = faults.seeded(options.seed)
    if not faults:
        raise UnicronError('nothing to inject: expected faults, e.g. "kill rank=1"')
    for fault in faults:
        if (fault.task or options.task) is None:
            raise UnicronError(f"{text(fault)!r}: no task: expected --task TASK, or task= in the fault")
    began = time.monotonic()
    for at, fault in _schedule(faults, random.randrange(1 << 32)):
        time.sleep(max(0.0, began + at - time.monotonic()))
        _order(options, fault)
    return 0


def _schedule(faults: Faults, seed: int) -> Iterator[tuple[float, Fault]]:
    """Iterate over strikes with their seconds from now, in order; endless if a fault has a rate and no ``times``."""

    def strikes(place: int, fault: Fault) -> Iterator[tuple[float, int, int, Fault]]:
        once = replace(fault, after=None, rate=None, times=fault.times if fault.waits and fault.rate is None else None)
        for number, at in enumerate(arrivals(fault, place, seed=seed)):
            own = None if fault.seed is None else fault.seed + number  # another victim each time
            yield at, place, number, replace(once, seed=own)
            if once.times is not None:  # the worker counts the strikes
                return

    for at, _, _, fault in merge(*(strikes(place, fault) for place, fault in enumerate(faults))):
        yield at, fault


def _order(options: argparse.Namespace, fault: Fault) -> None:
    path = f"/v1/tasks/{quoted(fault.task or options.task)}/inject"
    access = access_of(options)
    fatal = fault.kind == "kill coordinator" and not fault.waits
    if fatal:  # afterwards, a killed coordinator looks like one that never ran
        fetch(options.endpoint, "/v1/status", access)
    try:
        answer: dict[str, Any] = fetch(options.endpoint, path, access, method="POST", body={"fault": text(fault)})
    except CoordinatorUnavailable:
        if not fatal:
            raise
        answer = {"fault": text(fault), "targets": ["coordinator"]}
    # One line for each strike: with a rate there is no end.
    line = json.dumps(answer) if options.json else visible(f"{answer['fault']}: {', '.join(answer['targets'])}")
    print(line, flush=True)
