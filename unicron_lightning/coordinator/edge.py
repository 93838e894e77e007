"""Refusal of malformed messages, in one sentence that quotes the value."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from unicron_lightning.wire.fields import shortened


class Misplaced(Exception):
    """A message names a place that its sender may not name."""


UNREADABLE: Final = (msgspec.DecodeError, UnicodeError, RecursionError, Misplaced)
"""Raised by decoders for messages that they cannot decode."""
_PLACE: Final = re.compile(r" - at `\$([^`]*)`\Z")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_FIRST: Final = ("register", "node_hello")


def described(data: str, error: Exception) -> str:
    """Describe the error in a message, quoting the wrong value, shortened.

    Args:
        data: the message.
        error: one of `UNREADABLE`, raised for the message.
    """
    text = str(error)
    if isinstance(error, Misplaced):
        return text
    found = _PLACE.search(text)
    if found is None:
        return f"{text}, got {shortened(data)}"
    name = f"{found.group(1).removeprefix('.')}"
    try:
        value = _at(msgspec.json.decode(data), found.group(1))
    except (*UNREADABLE, LookupError, TypeError):
        return f"{name}: {_lower(text[: found.start()])}"
    return f"{name}={shortened(value)}: {_lower(text[: found.start()])}"


def is_first(data: str) -> bool:
    """Whether a message was meant as a connection's first; its sender is then notified that it can't take part."""
    try:
        message = msgspec.json.decode(data)
    except UNREADABLE:
        return False
    return isinstance(message, dict) and message.get("type") in _FIRST


def _at(value: Any, path: str) -> Any:
    for key, index in _STEP.findall(path):
        value = value[key] if key else value[int(index)]
    return value


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
