"""Kinds of errors by message: a table of patterns, data and not code (patterns.yaml)."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning.errors import ConfigError

UNKNOWN: Final = "other_software_error"
"""Kind of messages that match no pattern: a program's own error."""
_SEARCHED_CHARACTERS: Final = 20_000


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table.

    Raises:
        ConfigError: ``pattern`` is no regular expression.
    """

    pattern: str
    """A regular expression of Python, searched in messages."""
    kind: str
    """One of `coordinator.severity.errors.SEVERITY`."""
    name: str = "own"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"pattern {self.pattern!r} of kind {self.kind}: {error}") from None

    def found_in(self, text: str) -> bool:
        """Whether the text matches."""
        return re.search(self.pattern, text) is not None


def classify(texts: Sequence[str], patterns: Sequence[Pattern] = ()) -> Pattern | None:
    """Return the first matching pattern.

    Args:
        texts: ``TYPE: message`` of an exception, then of its causes: the first text with a match counts.
        patterns: the user's own, which precede the built-in ones.
    """
    for text in texts:
        for pattern in (*patterns, *builtin()):
            if pattern.found_in(text[:_SEARCHED_CHARACTERS]):
                return pattern
    return None


@functools.cache
def builtin() -> tuple[Pattern, ...]:
    """Load the table of this package."""
    data = Path(__file__).with_name("patterns.yaml").read_bytes()
    return tuple(msgspec.yaml.decode(data, type=list[Pattern]))
