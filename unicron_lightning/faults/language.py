"""Faults as text, and back: ``KIND [ARGUMENT] [key=value ...]``.

    kill rank=1 step=25 micro_batch=1
    kill SIGTERM node=b
    slow x3 rank=2 from_step=10 steps=20
    hang spin node=b rate=2/h seed=7

`parse` and `text` are inverse to each other; `text` writes values that differ from the defaults, in the order of
`docs/faults.md`. A file is a YAML list of such texts.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec

from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.fault import KINDS, SECONDS_PER_HOUR, Fault

_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER: Final = r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
_DURATION: Final = re.compile(_NUMBER + r"(ms|s|m|h|d)?")
_RATE: Final = re.compile(_NUMBER + r"/(s|m|h|d)")
_FACTOR: Final = re.compile("x?" + _NUMBER)
_WHOLE: Final = re.compile(r"-?\d+")


def parse(words: str) -> Fault:
    """Parse a fault.

    Raises:
        ConfigError: quotes the text and states the expected form.
    """
    try:
        return _parse(words)
    except ValueError as error:  # of shlex: unbalanced quotes; ConfigError is one, too
        raise ConfigError(f"fault {words!r}: {error}") from None


def text(fault: Fault) -> str:
    """Return a fault as text."""
    parts: list[str] = [fault.kind]
    if fault.argument is not None:
        parts.append(f"x{_number(float(fault.argument))}" if fault.kind == "slow" else str(fault.argument))
    for key, write in _WRITERS.items():
        value = getattr(fault, _FIELD.get(key, key))
        if value is not None and value is not False:
            parts.append(f"{key}={shlex.quote(write(value))}")
    return " ".join(parts)


def read_faults(path: Path) -> list[Fault]:
    """Read the faults of a file: a YAML list of texts.

    Raises:
        ConfigError: it can't be read, or has other contents.
    """
    try:
        lines = msgspec.yaml.decode(path.read_bytes(), type=list[str])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: expected a YAML list of faults as text: {error}") from error
    return [parse(line) for line in lines]


def _parse(words: str) -> Fault:
    parts = shlex.split(words)
    known = [kind for kind in KINDS if parts[: kind.count(" ") + 1] == kind.split()]
    if not known:
        raise ConfigError(f"expected it to begin with one of {', '.join(KINDS)}")
    kind = max(known, key=len)
    del parts[: kind.count(" ") + 1]
    arguments = [part for part in parts if "=" not in part]
    if len(arguments) > 1:
        raise ConfigError(f"{arguments[1]!r}: expected key=value")
    given: dict[str, Any] = {"argument": _argument(kind, arguments[0]) if arguments else None}
    for part in parts:
        if "=" not in part:
            continue
        key, _, word = part.partition("=")
        if key not in _READERS:
            raise ConfigError(f"{part!r}: expected one of {', '.join(f'{known}=' for known in _READERS)}")
        field = _FIELD.get(key, key)
        if field in given:
            raise ConfigError(f"{part!r}: given twice")
        given[field] = _READERS[key](key, word)
    return Fault(kind=kind, **given)


def _argument(kind: str, word: str) -> str | float:
    if kind == "slow":
        found = _FACTOR.fullmatch(word)
        if found is None:
            raise ConfigError(f"slow {word}: expected a factor above 1, e.g. x3")
        return float(found[1])
    if kind == "exit" and word.isdecimal():
        return int(word)
    if kind.startswith("kill") and f"SIG{word.upper()}" in signal.Signals.__members__:
        return f"SIG{word.upper()}"
    return word


def _read_whole(key: str, word: str) -> int:
    if _WHOLE.fullmatch(word) is None:
        raise ConfigError(f"{key}={word}: expected a whole number")
    return int(word)


def _read_rank(_key: str, word: str) -> int | str:
    if word == "all":
        return word
    if _WHOLE.fullmatch(word) is None:
        raise ConfigError(f"rank={word}: expected a whole number (-1: the last rank), or all")
    return int(word)


def _read_duration(key: str, word: str) -> float:
    found = _DURATION.fullmatch(word)
    if found is None:
        raise ConfigError(f"{key}={word}: expected a duration, e.g. 5, 200ms, 5s, 10m, 2h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _read_rate(_key: str, word: str) -> float:
    found = _RATE.fullmatch(word)
    if found is None:
        raise ConfigError(f"rate={word}: expected a number per s, m, h or d, e.g. 2/h")
    return float(found[1]) * (SECONDS_PER_HOUR / _UNITS[found[2]])


def _read_mtbf(key: str, word: str) -> float:
    seconds = _read_duration(key, word)
    if not seconds > 0:
        raise ConfigError(f"mtbf={word}: expected a duration > 0")
    return SECONDS_PER_HOUR / seconds


def _read_name(key: str, word: str) -> str:
    if not word:
        raise ConfigError(f"{key}=: expected a name")
    return word


def _read_yes(key: str, word: str) -> bool:
    if word not in ("yes", "no"):
        raise ConfigError(f"{key}={word}: expected yes or no")
    return word == "yes"


def _number(value: float) -> str:
    """Return the shortest digits that are read as the same number."""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else repr(value)


def _seconds(value: float) -> str:
    return f"{_number(value)}s"


_READERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "task": _read_name,
    "node": _read_name,
    "rank": _read_rank,
    "joiner": _read_yes,
    "step": _read_whole,
    "from_step": _read_whole,
    "micro_batch": _read_whole,
    "bucket": _read_whole,
    "phase": _read_name,
    "point": _read_name,
    "world": _read_whole,
    "after": _read_duration,
    "rate": _read_rate,
    "mtbf": _read_mtbf,
    "for": _read_duration,
    "steps": _read_whole,
    "times": _read_whole,
    "seed": _read_whole,
}
_FIELD: Final = {"for": "duration", "mtbf": "rate"}
"""Names of fields that differ from their keys."""
_WRITERS: Final[dict[str, Callable[[Any], str]]] = {
    key: {
        "after": _seconds,
        "for": _seconds,
        "rate": lambda rate: f"{_number(rate)}/h",
        "joiner": lambda yes: "yes",
    }.get(key, str)
    for key in _READERS
    if key != "mtbf"
}
assert {_FIELD.get(key, key) for key in _READERS} == {field.name for field in fields(Fault)} - {"kind", "argument"}
