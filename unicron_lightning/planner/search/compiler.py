"""numba's compiler, with its on-disk cache where a writable folder exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile ``function`` to machine code at its first call; cache the code on disk for other processes.

    If neither the installed package nor the user's cache folder is writable, every process compiles for itself.
    """
    try:
        made = numba.njit(cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = numba.njit(function)
    return cast("Function", made)
