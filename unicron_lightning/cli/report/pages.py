"""A report as one self-contained HTML file, without scripts or anything from elsewhere, or as Markdown. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from unicron_lightning.cli.output import clock, duration, visible
from unicron_lightning.cli.report.story import TaskStory
from unicron_lightning.coordinator.incidents.record import PHASES

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
    kinds = [
        (kind, duration(value), f"{100 * value / max(1e-9, story.ended - story.began):.2f} %")
        for kind, value in story.kinds.items()
    ]
    parts += ["## Time", table(("kind", "time", "share"), kinds)]
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
    rows = [
        (kind.replace("_", "-"), duration(value), f"{100 * value / total:.2f} %") for kind, value in story.kinds.items()
    ]
    return f'<div class="bar">{parts}</div>' + _table(("kind", "time", "share"), rows)


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
