"""Writes what the acceptance kit has seen into the table of docs/gpu.md, item by item."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "<!-- kit: begin -->", "<!-- kit: end -->"
HEAD = ("| item | test | result | seconds | measured | with |", "|---|---|---|---|---|---|")

Row = tuple[str, str, str, str, str, str]
"""Item, test, result, seconds, measured values, versions."""


def rows_of(text: str) -> dict[str, Row]:
    """Return the table's rows by test.

    Raises:
        ValueError: the document has no place for the table.
    """
    table = _parts(text)[1]
    return {row[1]: row for row in map(_row, table.splitlines()) if row is not None}


def _parts(text: str) -> tuple[str, str, str]:
    """Divide a document into what is before the table, the table, and what follows."""
    before, found, rest = text.partition(BEGIN)
    table, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"expected a table between {BEGIN} and {END}")
    return before, table, after


def merged(text: str, rows: Mapping[str, Row]) -> str:
    """Return the document with rows by test replaced or added; those of other tests stay.

    Raises:
        ValueError: the document has no place for the table.
    """
    before, _, after = _parts(text)
    lines = sorted({**rows_of(text), **rows}.values(), key=lambda row: (_number(row[0]), row[1]))
    body = [*HEAD, *("| " + " | ".join(row) + " |" for row in lines)]
    return before + BEGIN + "\n" + "\n".join(body) + "\n" + END + after


def update(path: Path, rows: Mapping[str, Row]) -> None:
    """Write rows into the document at ``path``."""
    path.write_text(merged(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


def _row(line: str) -> Row | None:
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if len(cells) != len(HEAD[1].strip("|").split("|")) or not re.fullmatch(r"K\d+|figure", cells[0]):
        return None
    first, second, third, fourth, fifth, sixth = cells
    return first, second, third, fourth, fifth, sixth


def _number(item: str) -> int:
    return int(item[1:]) if item.startswith("K") else 1000
