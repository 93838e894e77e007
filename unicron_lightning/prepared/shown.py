"""Command line and environment of a process as the system shows them, in ``/proc/PID/cmdline`` and ``environ``.

The kernel reads both from the memory that it filled when the program was started. The agent identifies its workers by
them, and users find processes by them, so a forked worker writes its own there. The prepared process is started with
`PADDING` in both, so that there is room.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PADDING_NAME: Final = "UNICRON_PREPARED_PADDING"
"""Variable of the prepared process alone."""
PADDING: Final = "-" * 16384

_PR_SET_MM: Final = 35
_PR_SET_MM_ARG_END: Final = 9
_FIRST_FIELD: Final = 47
"""Place of ``arg_start`` in ``/proc/PID/stat``, which ``arg_end``, ``env_start`` and ``env_end`` follow, from 0."""


def move_environment() -> None:
    """Have C's environment point to copies of its strings, so that the original ones can be overwritten.

    Only complete before libraries are loaded which may keep pointers to values.
    """
    os.environ.pop(PADDING_NAME, None)
    for name, value in list(os.environ.items()):
        os.environ[name] = value


def show(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Have the system show a command line and an environment for this process and those that it forks.

    Returns:
        Whether there is room; otherwise nothing has changed.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[_FIRST_FIELD - 2 : _FIRST_FIELD + 2])
    arguments = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    if 0 in (arg_start, env_start) or len(arguments) > arg_end - arg_start or len(variables) > env_end - env_start:
        return False
    for start, end, content in ((arg_start, arg_end, arguments), (env_start, env_end, variables)):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))
    # With the right to do it, also the size; otherwise programs see empty arguments at the end.
    ctypes.CDLL(None).prctl(_PR_SET_MM, _PR_SET_MM_ARG_END, ctypes.c_ulong(arg_start + len(arguments)), 0, 0)
    return True
