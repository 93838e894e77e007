"""``unicron submit``, ``cancel`` and ``jobs``: tasks that the nodes' daemons run."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any, Final

from unicron_lightning.cli.client import access_of, answering, fetch, quoted
from unicron_lightning.cli.output import console, table, visible
from unicron_lightning.cli.stored import ask
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable

_EXAMPLE = "examples/job.yaml"
_POLL_SECONDS = 0.5
ALL: Final = "also of tasks that had ended before this coordinator started"
NONE: Final = "since this coordinator started; --all shows what former ones had"


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    saves = options.save and answer["ended_at"] is None
    follows = ", and ends once it has written a checkpoint; then `unicron jobs` names it" if saves else ""
    print(visible(f"{answer['name']}: {answer['state']}{follows}"))
    return 0


def _jobs(options: argparse.Namespace) -> int:
    jobs: list[dict[str, Any]] = ask(options, "/v1/jobs", **current(options))
    if options.json:
        print(json.dumps(jobs, indent=2))
        return 0
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
