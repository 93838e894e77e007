"""Tables for the terminal, and in Markdown for the documents.

Percentages are of the ideal's accumulated WAF, except ETTR, which is of time; ``to detect`` and ``to recover`` are
means over incidents. Brackets show the minimum and maximum over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from unicron_lightning.simulate.output.summaries import SummaryRow

Say = Callable[[SummaryRow], str]


def _part(name: str) -> Say:
    return lambda row: f"{100 * float(row[name]):.2f}".replace("-0.00", "0.00") if name in row else ""


def _range(name: str, form: str, factor: float = 1.0) -> Say:
    def say(row: SummaryRow) -> str:
        if name not in row:
            return ""
        text = form.format(factor * float(row[name]))
        if int(row.get("seeds", 1)) < 2:
            return text
        least, most = (form.format(factor * float(row[f"{name}_{end}"])) for end in ("least", "most"))
        return text if least == most else f"{text} [{least}-{most}]"

    return say


def _seconds(name: str) -> Say:
    def say(row: SummaryRow) -> str:
        value = float(row[name])
        return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"

    return say


def _text(name: str) -> Say:
    return lambda row: str(row[name])


COLUMNS: Final[tuple[tuple[str, Say], ...]] = (
    ("trace", _text("trace")),
    ("workload", _text("workload")),
    ("variant", _text("variant")),
    ("policy", _text("policy")),
    ("WAF %", _range("of_ideal", "{:.1f}", 100)),
    ("ratio", _range("ratio", "{:.2f}")),
    ("detection %", _part("lost_detection")),
    ("transition %", _part("lost_transition")),
    ("sub-healthy %", _part("lost_sub_healthy")),
    ("overhead %", _part("lost_overhead")),
    ("ETTR %", _part("ettr")),
    ("to detect", _seconds("detection_seconds")),
    ("to recover", _seconds("transition_seconds")),
    ("incidents", lambda row: f"{float(row['incidents']):.0f}"),
)


_WORDS: Final = ("trace", "workload", "variant", "policy")
_UNLESS_DIFFERENT: Final = ("workload", "variant")


def _shown(rows: Sequence[SummaryRow]) -> list[tuple[str, Say]]:
    """Select columns with content; workload and variant only where they differ."""
    kept = []
    for title, say in COLUMNS:
        texts = {say(row) for row in rows}
        if not texts <= {"", "0.00"} and not (title in _UNLESS_DIFFERENT and len(texts) == 1):
            kept.append((title, say))
    return kept


def console() -> Console:
    """Return standard output as a console, wide enough for a table if it is not a terminal."""
    return Console() if Console().is_terminal else Console(width=170)


def as_table(rows: Sequence[SummaryRow], title: str) -> Table:
    """Render rows for a terminal."""
    table = Table(title=title, title_justify="left")
    columns = _shown(rows)
    for name, _ in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    last = None
    for row in rows:
        now = (row["trace"], row["workload"], row["variant"])
        if last is not None and now != last:
            table.add_section()
        last = now
        table.add_row(*(say(row) for _, say in columns))
    return table


def as_markdown(rows: Sequence[SummaryRow]) -> str:
    """Render rows for a document."""
    columns = _shown(rows)
    lines = [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "|" + "|".join("---" if name in _WORDS else "---:" for name, _ in columns) + "|",
    ]
    lines += ["| " + " | ".join(say(row) for _, say in columns) + " |" for row in rows]
    return "\n".join(lines)
