"""Command line and environment of a process as the system shows them, in ``/proc/PID/cmdline`` and ``environ``.

The kernel reads both from the memory that it filled when the program was started. The agent identifies its workers by
them, and users find processes by them, so a forked worker writes its own there. The prepared process is started with
`PADDING` in both, so that there is room.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PADDING_NAME: Final = "UNICRON_PREPARED_PADDING"
"""Variable of the prepared process alone."""
PADDING: Final = "-" * 16384

_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
_FIELDS: Final = {
    "start_code": 26, "end_code": 27, "start_data": 45, "end_data": 46, "start_brk": 47, "start_stack": 28,
    "arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51,
}  # fmt: skip
"""Places in ``/proc/PID/stat``, as proc(5) counts them."""


class _Map(ctypes.Structure):
    """The kernel's ``struct prctl_mm_map``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


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
    at = dict(_map_at_start())
    arguments = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    places = (at["arg_start"], at["arg_end"], arguments), (at["env_start"], at["env_end"], variables)
    if any(start == 0 or len(content) > end - start for start, end, content in places):
        return False
    for start, end, content in places:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))
    at["arg_end"], at["env_end"] = (start + len(content) for start, _, content in places)
    _set_ends(at)
    return True


@functools.cache
def _map_at_start() -> Mapping[str, int]:
    """Return the places that the kernel had filled, which processes that this one forks then have, too."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return {name: int(fields[place - 3]) for name, place in _FIELDS.items()}


def _set_ends(at: Mapping[str, int]) -> None:
    """Have what is shown end with its content; on kernels that refuse it, empty words follow."""
    library = ctypes.CDLL(None)
    library.sbrk.restype = ctypes.c_void_p
    mapped = _Map(**at, brk=library.sbrk(0), exe_fd=0xFFFFFFFF)
    size = ctypes.c_ulong(ctypes.sizeof(mapped))
    library.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(mapped), size, ctypes.c_ulong(0))
