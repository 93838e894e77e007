"""Methods of a strategy that a mock in Lightning's class `Strategy` can watch."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Final, TypeVar, cast

from lightning.pytorch.strategies import Strategy

Method = TypeVar("Method", bound=Callable[..., Any])
LIGHTNING_BACKWARD: Final = Strategy.backward
"""Lightning's own method, whatever a script has put in its place."""


def watched(method: Method) -> Method:
    """Let a mock that a script has put into `Strategy` under a method's name get the calls instead of the method.

    A function there is not called: it would run Lightning's backward, which a global batch replaces. A mock is no
    function, and reaches the strategy only by a method that the script has taken from it before:
    ``patch.object(Strategy, "backward", wraps=trainer.strategy.backward)``.
    """
    return cast(Method, _Watched(method))


class _Watched:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._name = method.__name__
        self.__doc__ = method.__doc__

    def __get__(self, strategy: Strategy | None, owner: type | None = None) -> Callable[..., Any]:
        if strategy is None:
            return self._method
        present = vars(Strategy)[self._name]
        if callable(present) and not hasattr(type(present), "__get__"):
            return cast(Callable[..., Any], present)
        return MethodType(self._method, strategy)
