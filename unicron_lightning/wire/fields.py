"""Types of message fields, the texts and numbers that are accepted from a network, and the base of messages.

msgspec checks them when a message is decoded. They bound the values that reach arithmetic, the log, the store and
terminals; the receiver checks whether a message makes sense in its present state.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

_UNSEEN: Final = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
"""Control characters, and characters that are invisible or change the direction of writing."""
_NAME: Final = rf"^[^\[\]{_UNSEEN}]*\Z"
MOST_STEPS: Final = 2**53
MOST_WEIGHT: Final = 1e6
MOST_LETTERS: Final = 100

Name = Annotated[str, Meta(min_length=1, max_length=255, pattern=_NAME)]
"""Name of a task, node or slot: one line of visible characters, without brackets, which terminal markup uses."""
Id = Annotated[str, Meta(min_length=1, max_length=600, pattern=_NAME)]
"""Identity of an agent or a worker, composed of names."""
Secret = Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-f]*\Z")]
"""Hexadecimal digits of a secret or of its digest; "" for none."""
Word = Annotated[str, Meta(max_length=100, pattern=_NAME)]
"""A kind, a phase, or the name of an event; "" if unknown."""
Line = Annotated[str, Meta(max_length=300, pattern=rf"^[^{_UNSEEN}]*\Z")]
"""A line of a program's output."""
Host = Annotated[str, Meta(max_length=255, pattern=rf"^[^\s{_UNSEEN}]*\Z")]
Key = Annotated[str, Meta(max_length=1000)]
Path = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*\Z")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Pid = Annotated[int, Meta(ge=0, le=2**31)]
Code = Annotated[int, Meta(ge=-(2**31), le=2**32)]
"""End of a process: an exit status, or a signal."""
Count = Annotated[int, Meta(ge=0, le=MOST_STEPS)]
"""Number of steps, rounds, epochs or bytes; exact as a float, too."""
Size = Annotated[int, Meta(ge=1, le=1_000_000)]
"""Number of workers, nodes or micro-batches: at least one."""
Index = Annotated[int, Meta(ge=0, lt=1_000_000)]
Wall = Annotated[float, Meta(ge=0, le=1e11)]
"""time.time()."""
Seconds = Annotated[float, Meta(ge=0, le=1e11)]
Rate = Annotated[float, Meta(ge=0, le=1e30)]
Weight = Annotated[float, Meta(gt=0, le=MOST_WEIGHT)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages."""


def check_numbers(fields: dict[str, Any], *names: str) -> None:
    """Check that the named entries of an otherwise opaque object are counts, if present.

    Raises:
        ValueError: an entry is no whole number in range; msgspec turns the error into a `msgspec.ValidationError`.
    """
    for name in names:
        value = fields.get(name)
        if value is not None and not (type(value) is int and 0 <= value <= MOST_STEPS):
            raise ValueError(f"expected {name} to be a whole number from 0 to {MOST_STEPS}, got {shortened(value)}")


def check_flags(fields: dict[str, Any], *names: str) -> None:
    """Check that the named entries of an otherwise opaque object are true or false, if present.

    Raises:
        ValueError: an entry is not.
    """
    for name in names:
        value = fields.get(name, False)
        if type(value) is not bool:
            raise ValueError(f"expected {name} to be true or false, got {shortened(value)}")


def check_report(state: dict[str, Any]) -> None:
    """Check the parts of a worker's report that are summed, if present.

    Raises:
        ValueError: the operation's name is no text, the report is no object, or an entry is no list of counts.
    """
    operation, report = state.get("operation", ""), state.get("report", {})
    if not (isinstance(operation, str) and len(operation) <= MOST_LETTERS):
        raise ValueError(f"expected operation to be a text of up to {MOST_LETTERS} letters, got {shortened(operation)}")
    if not isinstance(report, dict):
        raise ValueError(f"expected report to be an object, got {shortened(report)}")
    for name in ("finished", "reduced"):
        numbers = report.get(name, [])
        if not (isinstance(numbers, list) and all(type(n) is int and 0 <= n <= MOST_STEPS for n in numbers)):
            raise ValueError(f"expected {name} to be a list of whole numbers from 0, got {shortened(numbers)}")


def counted(number: int, noun: str) -> str:
    """Return a number of things in words, e.g. 1 incident, 2 incidents."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(value: object, most: int = 80) -> str:
    """A value as ASCII on one line, for errors and logs; long values are truncated."""
    if isinstance(value, str):
        text = ascii(value[: most + 1])
    elif isinstance(value, int | float | bool) or value is None:
        text = "a very large number" if isinstance(value, int) and abs(value) > 10**most else repr(value)
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(shortened(each, 20) for each in value[:5]) + (", ...]" if len(value) > 5 else "]")
    elif isinstance(value, dict):
        items = [f"{shortened(key, 20)}: {shortened(each, 20)}" for key, each in list(value.items())[:5]]
        text = "{" + ", ".join(items) + (", ...}" if len(value) > 5 else "}")
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."
