"""Log of requests that are no valid HTTP: any process that reaches the port can send them, so they get one line.

aiohttp logs them with a traceback each. An error in a handler keeps its traceback.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

from unicron_lightning.wire.fields import shortened

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
