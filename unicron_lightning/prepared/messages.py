"""Messages between an agent, its prepared process and a forked worker, over sockets without names."""

from __future__ import annotations

from typing import Final

FORK: Final = b"fork"
"""Agent to prepared process, with `FILES` descriptors: the text of the request, the standard files, a worker's socket.

The text is JSON: ``{"command": [...], "environment": {...}, "ignored": [...]}``, the last one with numbers of signals.
"""
FILES: Final = 5
NO_ROOM: Final = b"no room"
"""Answer over the worker's socket in place of its process number: the request is longer than what `shown` can write."""
GO: Final = b"go"
"""Agent to worker, which has reported its process number: the program may begin."""
