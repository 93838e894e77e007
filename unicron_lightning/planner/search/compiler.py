"""Machine code for the search's loops, which are interpreted until a problem is large.

A plan for 128 units and 6 tasks takes 4 ms interpreted. Importing numba takes most of a second, and compiling several,
once per machine. Large problems take minutes interpreted, and milliseconds compiled.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

INTERPRETED: Final = 8192
"""Largest number of units x tasks that is planned interpreted: at most 0.3 s, with the plans made ahead 0.6 s."""

_LOCK = threading.Lock()
_INTERPRETED: list[Callable[..., Any]] = []
_REPORTED: list[int] = []


def compilable(function: Function) -> Function:
    """Register a function of a module, which other modules must call as an attribute of that module."""
    _INTERPRETED.append(function)
    return function


def prepare(size: int) -> None:
    """Compile all registered functions if a problem is large.

    Without numba it warns once, and everything stays interpreted.

    Args:
        size: units x tasks.
    """
    if size <= INTERPRETED or not _INTERPRETED or compile_all() or _REPORTED:
        return
    _REPORTED.append(size)
    logger.warning(
        "planning_is_interpreted units_x_tasks=%d: plans of this size can take minutes without numba; "
        "install unicron-lightning[plan]",
        size,
    )


def compile_all() -> bool:
    """Replace the registered functions in their modules by compiled ones; return False without numba."""
    with _LOCK:
        if _INTERPRETED and importlib.util.find_spec("numba") is None:
            return False
        while _INTERPRETED:
            function: Any = _INTERPRETED[0]
            setattr(sys.modules[function.__module__], function.__name__, machine_code(function))
            del _INTERPRETED[0]
    return True


def machine_code(function: Function) -> Function:
    """Compile a function at its first call; cache the code on disk for other processes.

    If neither the installed package nor the user's cache folder is writable, every process compiles for itself. The
    code runs without the interpreter's lock: planning ahead does not stop other threads.
    """
    import numba

    try:
        made = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = numba.njit(nogil=True)(function)
    return cast("Function", made)
