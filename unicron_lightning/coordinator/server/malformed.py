"""Malformed input: messages are refused in one sentence that quotes the value; invalid HTTP gets one line in the log.

Any process that reaches the port can send requests that are no valid HTTP. aiohttp logs them with a traceback each; an
error in a handler keeps its traceback.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Final

import msgspec
from aiohttp.http_exceptions import HttpProcessingError

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


_LOG_SECONDS: Final = 1.0


class Malformed(logging.Filter):
    """Reduces records of malformed requests to one line, at most one a second."""

    def __init__(self) -> None:
        super().__init__()
        self._last = float("-inf")
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if not isinstance(error, HttpProcessingError):
            return True
        now = time.monotonic()
        if now - self._last < _LOG_SECONDS:
            self._left_out += 1
            return False
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.exc_info, record.exc_text = "request_malformed error=%s left_out=%d", None, None
        record.args = (shortened(error.message), self._left_out)
        self._last, self._left_out = now, 0
        return True


def request_logger() -> logging.Logger:
    """Return the logger for aiohttp's server, with the filter."""
    logger = logging.getLogger(__name__)
    if not any(isinstance(each, Malformed) for each in logger.filters):
        logger.addFilter(Malformed())
    return logger
