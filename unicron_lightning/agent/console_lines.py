"""Lines of an agent on a console on which its workers show progress bars.

A bar leaves the cursor at the end of its line, which a warning of the agent, such as ``agent_departs``, would continue.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from unicron_lightning import environ


class FreshLines(logging.StreamHandler[TextIO]):
    """Prints warnings to standard error, each on a line of its own.

    On a terminal the bar's line is erased; the bar writes it again. In a file the bar's line ends before the warning.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.WARNING)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, with what ends the line before it."""
        return f"{_begin(self.stream)}{super().format(record)}"


def install() -> None:
    """Make `FreshLines` print what no handler of the user's does. Idempotent."""
    if environ.LOGS not in os.environ and not isinstance(logging.lastResort, FreshLines):  # workers print elsewhere
        logging.lastResort = FreshLines()


def _begin(stream: TextIO) -> str:
    return "\r\x1b[K" if stream.isatty() else "\n"
