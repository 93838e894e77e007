"""Runs of the trainer in a worker that an agent has started: their errors are reported before the trainer's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override


class RunLauncher(_Launcher):
    """Calls the trainer's functions in this process.

    Lightning tells a strategy of an error after it has called the callbacks' ``on_exception``, which may write a
    checkpoint for minutes. The peers should not wait so long, and the agent should know that this worker still writes.

    Args:
        failed: called with an error at once.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("trainer", None)
        try:
            return function(*args, **kwargs)
        except _TunerExitException:  # the regular end of a search
            raise
        except BaseException as error:
            self._failed(error)
            raise

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: it has started no process."""
