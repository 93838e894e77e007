"""Faults as CSV: reads a user's own events, writes any trace.

    at,kind,node,worker,repair
    86400,ecc_error,3,,172800
    2026-03-01T04:00:00,exited_abnormally,0,5,

``at``: seconds from the beginning, or times in ISO 8601, all in one format; the first time is the beginning unless a
line ``# start TIME`` gives another. ``kind``: of the table of severities. ``node``: a number from 0 on. ``worker``: its
local rank, empty for the whole node. ``repair``: seconds until the node can be used again, empty for 0; for kinds that
slow it down, until it is as fast as before, and for kinds that corrupt the state, until that is detected. Two more
columns are optional: ``strikes``, ``one`` (default) or ``task``, for all workers of its task; and ``slowdown``, the
fraction by which steps take longer (default 0.1). Lines that begin with # and empty lines are skipped; the order of
lines and columns does not matter. A line for a node that is down prolongs its absence.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Mapping
from pathlib import Path

from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.trace import SLOWDOWN, SLOWING, SimCluster, TraceFault

COLUMNS = ("at", "kind", "node", "worker", "repair")
_FURTHER = ("strikes", "slowdown")
_OPTIONAL = ("worker", "repair", *_FURTHER)
_START = "# start "


def read_table(path: Path, cluster: SimCluster) -> list[TraceFault]:
    """Read a file.

    Raises:
        ConfigError: it can't be read, or a line is wrong; the message has the line's number.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}: expected a CSV file with {', '.join(COLUMNS)}") from error
    return parse_table(text, cluster, str(path))


def parse_table(text: str, cluster: SimCluster, name: str) -> list[TraceFault]:
    """Read text.

    Args:
        text: the file's text.
        cluster: the cluster whose nodes and workers are valid.
        name: name of the file, for messages.

    Raises:
        ConfigError: as for `read_table`.
    """
    lines = text.splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    if not numbers:
        raise ConfigError(f"{name}: no lines: expected a header with {', '.join(COLUMNS)}")
    rows = csv.reader([lines[number - 1] for number in numbers])
    header = [column.strip() for column in next(rows)]
    unknown, missing = set(header) - set(COLUMNS) - set(_FURTHER), set(COLUMNS) - set(header) - set(_OPTIONAL)
    if unknown or missing or len(set(header)) < len(header):
        raise ConfigError(f"{name}, line {numbers[0]}: header {','.join(header)!r}: expected {','.join(COLUMNS)}")
    start = _start(lines, name)
    faults = []
    times: set[bool] = set()
    parsed = []
    for number, row in zip(numbers[1:], rows, strict=True):
        where = f"{name}, line {number}"
        if len(row) != len(header):
            raise ConfigError(f"{where}: {len(row)} values: expected {len(header)}, as in the header")
        values = {column: value.strip() for column, value in zip(header, row, strict=True)}
        at = _time(values["at"], where)
        times.add(isinstance(at, float))
        if len(times) > 1:
            raise ConfigError(f"{where}: at={values['at']!r}: expected all times in seconds, or all in ISO 8601")
        parsed.append((where, at, values))
    dates = [at for _, at, _ in parsed if isinstance(at, datetime.datetime)]
    begin = start or (min(dates) if dates else None)
    for where, at, values in parsed:
        seconds = at if isinstance(at, float) else _since(at, begin, where)
        faults.append(_fault(seconds, values, cluster, where))
    return faults


def _start(lines: list[str], name: str) -> datetime.datetime | None:
    for number, line in enumerate(lines, 1):
        if line.startswith(_START):
            at = _time(line.removeprefix(_START).strip(), f"{name}, line {number}")
            if isinstance(at, float):
                raise ConfigError(f"{name}, line {number}: {line!r}: expected a time in ISO 8601")
            return at
    return None


def _time(text: str, where: str) -> float | datetime.datetime:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        # Python 3.10 does not read the Z.
        at = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ConfigError(f"{where}: at={text!r}: expected seconds, or a time like 2026-03-01T04:00:00") from None
    return at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)


def _since(at: datetime.datetime, begin: datetime.datetime | None, where: str) -> float:
    assert begin is not None
    seconds = (at - begin).total_seconds()
    if seconds < 0:
        raise ConfigError(f"{where}: at={at.isoformat()}: expected a time after the start, {begin.isoformat()}")
    return seconds


def _fault(at: float, values: Mapping[str, str], cluster: SimCluster, where: str) -> TraceFault:
    node = _number(values["node"], "node", cluster.num_nodes, where)
    worker = None
    if values.get("worker"):
        worker = _number(values["worker"], "worker", cluster.workers_per_node, where)
    kind, strikes = values["kind"], values.get("strikes") or "one"
    repair = _real(values.get("repair") or "0", "repair", "seconds", where)
    slow = _real(values.get("slowdown") or str(SLOWDOWN if kind in SLOWING else 0.0), "slowdown", "a fraction", where)
    try:
        return TraceFault(
            at=at,
            kind=kind,
            node=node,
            worker=worker,
            repair=repair,
            strikes=strikes,  # type: ignore[arg-type]
            slowdown=slow,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _real(text: str, name: str, expected: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}={text!r}: expected {expected}") from error


def _number(text: str, name: str, limit: int, where: str) -> int:
    if not (text.isdecimal() and int(text) < limit):
        raise ConfigError(f"{where}: {name}={text!r}: expected a whole number from 0 to {limit - 1}")
    return int(text)
