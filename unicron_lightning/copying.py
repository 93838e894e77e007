"""Copies of trainers: what belongs to this process, such as threads, sockets and hooks, is not copied.

Scripts for ddp copy trainers with `copy.deepcopy` and pickle them. A copy of a trainer under ``unicron`` has its
settings, its counters and its model; it opens its part in the task when it is run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, SupportsIndex


class OfProcess:
    """Base of objects that exist once in a process: the copy of a reference to one, or what is pickled, is None."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return type(None), ()


class Instead:
    """Takes the place of an object's method; a copy of the object has the method alone.

    Args:
        owner, name: the method.
        function: called with the method and its arguments.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._method, self._owner = getattr(type(owner), name), owner
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(partial(self._method, self._owner), *args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return partial, (self._method, self._owner)


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Have a function called instead of a method, in place of one of an earlier run; see `Instead`."""
    vars(owner)[name] = Instead(owner, name, function)
