"""numba's compiler, with its cache where one can be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile ``function`` to machine code when it is first called; keep the code on disk for other processes.

    Where neither the installed package nor the user's cache folder can be written to, every process compiles anew.
    """
    try:
        made = numba.njit(cache=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = numba.njit(function)
    return cast("Function", made)
