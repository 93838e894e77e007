"""``unicron report``: one file about a task: its world, steps, loss, incidents, goodput, and what was saved.

The command reads the event log, and a logger's CSV file for the loss. The report is one self-contained HTML file,
without scripts or anything from elsewhere, or Markdown.

The comparison with a restart from the newest checkpoint is an estimate from this task's own figures: a restart repeats
the time since that checkpoint (or since the first step, if there was none), and costs the task's own start-up again.
Detection and the time with fewer workers are the same in both cases and left out.
"""

from __future__ import annotations

import argparse
import csv
import html
import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unicron_lightning.cli.client import ask, connecting, events_of
from unicron_lightning.cli.output import clock, duration, visible
from unicron_lightning.coordinator.incidents.facts import (
    PHASES,
    EpochPublished,
    EpochSettled,
    FirstStep,
    LifeBegun,
    TaskEnd,
    read_fact,
)
from unicron_lightning.errors import ConfigError
from unicron_lightning.wire.fields import counted


@dataclass(frozen=True, kw_only=True)
class SavedTime:
    """What an incident cost, and would have cost with a restart from the newest checkpoint; seconds of the whole task.

    Attributes:
        incident: its id.
        transition: the interruption.
        repeated: time since the newest checkpoint, which a restart would repeat.
        start_up: a start of the task, as measured; None if it has not finished a step.
        restarted: whether the task did restart from a checkpoint.
    """

    incident: str
    transition: float
    repeated: float
    start_up: float | None
    restarted: bool

    @property
    def seconds(self) -> float:
        """Seconds saved; 0 if the task restarted."""
        return 0.0 if self.restarted else self.repeated + (self.start_up or 0.0) - self.transition


@dataclass(frozen=True, kw_only=True)
class TaskStory:
    """The newest run of a task; times are time.time().

    Attributes:
        task: its id.
        began, ended: its times; the present if it has not ended.
        outcome: ``succeeded``, ``failed``, or None if it runs.
        reason: of its end, or why it does not train now; "" for none.
        world: times of changes of the world, with its number of workers from then on.
        steps: times of known steps, with the step: first steps of epochs, and checkpoints.
        checkpoints: times of checkpoints.
        bills: its incidents, oldest first, as `/v1/incidents` answers.
        start_up: seconds until the first finished step; None if there was none.
        lost: seconds of the whole task's work lost, by phase.
        saved: comparison of each incident.
        recomputed: micro-batches that survivors computed again.
    """

    task: str
    began: float
    ended: float
    outcome: str | None
    reason: str
    world: Sequence[tuple[float, int]]
    steps: Sequence[tuple[float, int]]
    checkpoints: Sequence[float]
    bills: Sequence[Mapping[str, Any]]
    start_up: float | None
    lost: Mapping[str, float]
    saved: Sequence[SavedTime]
    recomputed: int

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of the run by kind: productive, start_up, and the phases of incidents."""
        start = self.ended - self.began if self.start_up is None else self.start_up
        rest = max(0.0, self.ended - self.began - start - sum(self.lost.values()))
        return {"productive": rest, "start_up": start, **self.lost}

    @property
    def goodput(self) -> float:
        """Productive share of the run."""
        return self.kinds["productive"] / max(1e-9, self.ended - self.began)


def story_of(
    task: str,
    events: Sequence[Mapping[str, Any]],
    bills: Sequence[Mapping[str, Any]],
    now: float,
    waits: str = "",
) -> TaskStory:
    """Return the course of a task's newest run.

    Args:
        task: its id.
        events: its event log, oldest first.
        bills: its incidents.
        now: time.time(), for a run that has not ended.
        waits: why it does not train now, if it has not ended; "" if it trains.

    Raises:
        ConfigError: the log has no event of the task.
    """
    first = max([place for place, event in enumerate(events) if event["name"] == "task_created"], default=0)
    own = events[first:]
    if not own:
        raise ConfigError(f"task {task!r}: the event log has no event of it; unicron jobs lists the tasks")
    facts = [(event["at"], read_fact(event["name"], event["fields"], event["at"])) for event in own]
    began = own[0]["at"]
    end = next(((at, fact) for at, fact in facts if isinstance(fact, TaskEnd)), None)
    steps = [
        (fact.at, fact.step or 0, len(fact.recomputed), fact.epoch) for _, fact in facts if isinstance(fact, FirstStep)
    ]
    saves = [(event["at"], int(event["fields"].get("step", 0))) for event in own if event["name"] == "checkpoint_saved"]
    lives = [at for at, fact in facts if isinstance(fact, LifeBegun)]
    mine = sorted((bill for bill in bills if bill["fault_at"] >= began - 1), key=lambda bill: bill["fault_at"])
    first_step = min([at for at, *_ in steps], default=None)
    start_up = None if first_step is None else max(0.0, first_step - began)
    return TaskStory(
        task=task,
        began=began,
        ended=now if end is None else end[0],
        outcome=None if end is None else "succeeded" if end[1].succeeded else "failed",
        reason=waits if end is None else end[1].reason,
        world=_world(facts),
        steps=sorted([*((at, step) for at, step, *_ in steps), *saves]),
        checkpoints=[at for at, _ in saves],
        bills=mine,
        start_up=start_up,
        lost={phase: sum(_lost(bill, phase) for bill in mine) for phase in PHASES},
        saved=[_saved(bill, [at for at, _ in saves], first_step, start_up, lives) for bill in mine],
        recomputed=sum({epoch: again for _, _, again, epoch in steps}.values()),
    )


def _world(facts: Sequence[tuple[float, Any]]) -> list[tuple[float, int]]:
    members: dict[int, int] = {}
    found: list[tuple[float, int]] = []
    for at, fact in facts:
        match fact:
            case EpochPublished(number=number, members=names):
                members[number] = len(names)
            case EpochSettled(number=number) if number in members:
                found.append((at, members[number]))
            case LifeBegun() | TaskEnd():
                found.append((at, 0))
    return found


def _lost(bill: Mapping[str, Any], phase: str) -> float:
    """Return a phase's loss as seconds of the whole task: worker-seconds by the number of workers before."""
    workers = bill["weight"] * bill["workers_before"]
    return float(bill["phases"][phase]["worker_seconds"] / workers) if workers else 0.0


def _saved(
    bill: Mapping[str, Any],
    saves: Sequence[float],
    first_step: float | None,
    start_up: float | None,
    lives: Sequence[float],
) -> SavedTime:
    fault, stepped = bill["fault_at"], bill["stepped_at"] or bill["closed_at"] or float("inf")
    place = bisect_right(saves, fault)
    since = saves[place - 1] if place else fault if first_step is None else first_step
    return SavedTime(
        incident=bill["incident"],
        transition=bill["phases"]["transition"]["seconds"],
        repeated=max(0.0, fault - since),
        start_up=start_up,
        restarted=any(bill["known_at"] <= at <= stepped for at in lives),
    )


_WIDTH: Final = 860
_HEIGHT: Final = 170
_LEFT: Final = 60
_LONG_WORD: Final = 24
_COLOURS: Final = {
    "productive": "#1a8f4c",
    "start_up": "#8aa0bd",
    "detection": "#d03a3a",
    "transition": "#e08a1e",
    "sub_healthy": "#d9b92c",
}
_STYLE: Final = """
:root { color-scheme: light dark; --text: #1c2430; --back: #fff; --dim: #667085; --line: #dde3ec; --accent: #2f6feb; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e9f1; --back: #10161e; --dim: #93a0b4; --line: #2a3442; --accent: #6aa1ff; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 30px auto; padding: 0 20px; color: var(--text);
  background: var(--back); }
h1 { font-size: 24px; } h2 { font-size: 17px; margin-top: 30px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; } td.long { overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.dim { color: var(--dim); } .bar { display: flex; height: 20px; border-radius: 5px; overflow: hidden; margin: 10px 0; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 11px; } svg .axis { stroke: var(--line); }
svg .line { fill: none; stroke: var(--accent); stroke-width: 1.6; }
"""


def _facts(story: TaskStory, losses: Sequence[tuple[int, float]]) -> list[tuple[str, str]]:
    saved = sum(each.seconds for each in story.saved)
    known = max([*(step for _, step in story.steps), *(step for step, _ in losses)], default=None)
    rows = [
        ("began", clock(story.began)),
        ("ended", "not yet" if story.outcome is None else f"{clock(story.ended)}, {story.outcome}"),
        ("reason", visible(story.reason)),
        ("duration", duration(story.ended - story.began)),
        ("newest known step", "" if known is None else str(known)),
        ("goodput", f"{100 * story.goodput:.2f} %"),
        ("incidents", str(len(story.bills))),
        ("micro-batches computed again", str(story.recomputed)),
        ("saved, against restarts from checkpoints", duration(saved) if story.bills else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _incidents(story: TaskStory) -> list[list[str]]:
    rows = []
    for bill, saved in zip(story.bills, story.saved, strict=True):
        phases = [duration(bill["phases"][phase]["seconds"]) for phase in PHASES]
        would = duration(saved.repeated + (saved.start_up or 0.0))
        gain = "restarted" if saved.restarted else duration(saved.seconds)
        cells = [bill["incident"], clock(bill["fault_at"]), visible(bill["cause"])[:200], *phases]
        rows.append([*cells, bill["outcome"] or "open", would, gain])
    return rows


_INCIDENT_HEADS: Final = (
    *("incident", "began", "cause", "detection", "transition", "sub-healthy", "end"),
    *("a restart would cost", "saved"),
)
_METHOD: Final = (
    "A restart from the newest checkpoint is estimated from this task's own figures: the time since that checkpoint "
    "(or since the first step) is repeated, and the task starts again. The detection, and the time with fewer workers, "
    "are taken to be the same. Lost time is in seconds of the whole task: worker-seconds divided by the workers before "
    "the failure."
)


def _kinds(story: TaskStory) -> list[tuple[str, str, str]]:
    total = max(1e-9, sum(story.kinds.values()))
    return [
        (kind.replace("_", "-"), duration(value), f"{100 * value / total:.2f} %") for kind, value in story.kinds.items()
    ]


def markdown(story: TaskStory, losses: Sequence[tuple[int, float]]) -> str:
    """Return the report as Markdown.

    Args:
        story: the task's course.
        losses: values of the loss by step; empty if unknown.
    """

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        return "\n".join([row(heads), row(["---"] * len(heads)), *map(row, rows)])

    parts = [f"# Task {row([story.task])[2:-2]}", table(("", ""), _facts(story, losses))]
    parts += ["## Time", table(("kind", "time", "share"), _kinds(story))]
    if story.world:
        parts += [
            "## World",
            table(("from", "workers"), [(clock(at), str(workers)) for at, workers in story.world[-50:]]),
        ]
    if losses:
        parts += [
            "## Loss",
            table(("step", "loss"), [(str(step), f"{value:.6g}") for step, value in thinned(losses, 20)]),
        ]
    if story.bills:
        parts += ["## Incidents", table(_INCIDENT_HEADS, _incidents(story)), _METHOD]
    return "\n\n".join(parts) + "\n"


def page(story: TaskStory, losses: Sequence[tuple[int, float]]) -> str:
    """Return the report as HTML; arguments as those of `markdown`."""
    parts = [
        f"<h1>Task {_text(story.task)}</h1>",
        _table(("", ""), _facts(story, losses)),
        "<h2>Time</h2>",
        _bar(story),
    ]
    if story.world:
        parts += ["<h2>Workers over time</h2>", _world_chart(story)]
    if losses:
        parts += ["<h2>Loss over steps</h2>", _loss_chart(losses)]
    if story.bills:
        parts += [
            "<h2>Incidents</h2>",
            _table(_INCIDENT_HEADS, _incidents(story)),
            f'<p class="dim">{_text(_METHOD)}</p>',
        ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    title = f"<title>{_text(story.task)}</title><style>{_STYLE}</style>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{title}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"
    )


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return at most this many points, evenly chosen, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def _text(text: str) -> str:
    return html.escape(visible(text))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in heads) if any(heads) else ""
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    """Return a cell in which only words are divided that would widen the table beyond the page, such as paths."""
    start = '<td class="long">' if any(len(word) > _LONG_WORD for word in text.split()) else "<td>"
    return f"{start}{_text(text)}</td>"


def _bar(story: TaskStory) -> str:
    total = max(1e-9, sum(story.kinds.values()))
    parts = "".join(
        f'<i style="width:{100 * value / total:.3f}%;background:{_COLOURS[kind]}"></i>'
        for kind, value in story.kinds.items()
    )
    return f'<div class="bar">{parts}</div>' + _table(("kind", "time", "share"), _kinds(story))


def _frame(body: str, low: str, high: str, left: str, right: str) -> str:
    bottom = _HEIGHT - 20
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH}" '
        f'y2="{bottom}"/>{body}<text x="0" y="{bottom}">{_text(low)}</text><text x="0" y="14">{_text(high)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{_text(left)}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">{_text(right)}</text></svg>'
    )


def _world_chart(story: TaskStory) -> str:
    most = max(workers for _, workers in story.world) or 1
    span = max(1e-9, story.ended - story.began)

    def across(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * min(1.0, max(0.0, (at - story.began) / span))

    def up(workers: int) -> float:
        return _HEIGHT - 20 - (_HEIGHT - 34) * workers / most

    marks = []
    for bill in story.bills:
        begins, ends = across(bill["fault_at"]), across(bill["closed_at"] or story.ended)
        shape = f'x="{begins:.1f}" y="8" width="{max(1.5, ends - begins):.1f}" height="{_HEIGHT - 28}"'
        marks.append(f'<rect {shape} fill="{_COLOURS["transition"]}" opacity=".28"/>')
    line = [f"{across(story.began):.1f},{up(0):.1f}"]
    before = 0
    for at, workers in story.world:
        line += [f"{across(at):.1f},{up(before):.1f}", f"{across(at):.1f},{up(workers):.1f}"]
        before = workers
    line.append(f"{across(story.ended):.1f},{up(before):.1f}")
    body = "".join(marks) + f'<polyline class="line" points="{" ".join(line)}"/>'
    return _frame(body, "0", f"{most} workers", clock(story.began), clock(story.ended))


def _loss_chart(losses: Sequence[tuple[int, float]]) -> str:
    points = thinned(losses, 800)
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    line = " ".join(
        f"{_LEFT + (_WIDTH - _LEFT) * (step - first) / max(1, last - first):.1f},"
        f"{_HEIGHT - 24 - (_HEIGHT - 40) * (value - low) / ((high - low) or 1):.1f}"
        for step, value in points
    )
    return _frame(
        f'<polyline class="line" points="{line}"/>', f"{low:.4g}", f"{high:.4g}", f"step {first}", f"step {last}"
    )


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    parser = commands.add_parser("report", parents=[connecting()], help="write one file about a task")
    parser.add_argument("task", metavar="TASK", help="the task (torchrun's --rdzv-id)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="PATH.html or PATH.md; default: TASK.html")
    parser.add_argument(
        "--metrics", type=Path, metavar="CSV", help="metrics.csv of Lightning's CSVLogger, for the loss"
    )
    parser.add_argument("--loss", default="loss", metavar="COLUMN", help="column of the loss; default: %(default)s")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in options.task)
    out: Path = options.out or Path(f"{safe.lstrip('.') or 'task'}.html")
    if out.suffix not in (".html", ".md"):
        raise ConfigError(f"--out {out}: expected a path that ends with .html or .md")
    losses = [] if options.metrics is None else losses_of(options.metrics, options.loss)
    bills = ask(options, "/v1/incidents", task=options.task)["incidents"]
    waits = {job["name"]: job["reason"] or "" for job in ask(options, "/v1/jobs") if job["ended_at"] is None}
    story = story_of(
        options.task, events_of(options, task=options.task), bills, time.time(), waits.get(options.task, "")
    )
    try:
        out.write_text(page(story, losses) if out.suffix == ".html" else markdown(story, losses), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from None
    saved = sum(each.seconds for each in story.saved)
    gain = f", {duration(saved)} saved against restarts" if story.bills else ""
    print(f"{out}: {counted(len(story.bills), 'incident')}, goodput {100 * story.goodput:.2f} %{gain}")
    return 0


def losses_of(path: Path, column: str) -> list[tuple[int, float]]:
    """Return the finite values of a column by step, in order of the steps; of a repeated step the last one.

    Raises:
        ConfigError: the file cannot be read, or lacks the columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ())
            if column not in names or "step" not in names:
                raise ConfigError(f"--loss {column}: {path} has the columns {names}; expected step and {column}")
            values = {int(float(row["step"])): float(row[column]) for row in reader if row[column] and row["step"]}
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--metrics {path}: {error}") from None
    return [(step, value) for step, value in sorted(values.items()) if math.isfinite(value)]
