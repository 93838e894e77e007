"""Reports of exceptions to the coordinator, before the trainer's hooks for them."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from typing_extensions import override

from unicron_lightning.detection.exits import LEFT_EARLY
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.reporting import report_error


def told_flops(module: Any) -> float | None:
    """Return the module's attribute ``flops_per_step``, if any: FLOPs of one optimizer step of the whole task.

    Raises:
        ConfigError: it is no number above 0.
    """
    told = getattr(module, "flops_per_step", None)
    if told is None:
        return None
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 < told < math.inf:
        raise ConfigError(f"{type(module).__qualname__}.flops_per_step={told!r}: expected FLOPs, a finite number > 0")
    return float(told)


def report_exception(control: Control | None, error: BaseException, engine: Engine) -> None:
    """Report an exception that Lightning is about to raise out of the trainer; orders to end are no errors."""
    step = engine.step
    if isinstance(error, SIGTERMException):
        # Lightning raises it without a status; a worker that ends with 0 would have finished the task.
        error.code = 128 + signal.SIGTERM
    elif control is not None and isinstance(error, SystemExit) and error.code in (None, 0):
        cause = (
            f"the script left by SystemExit({error.code!r}) in the middle of a run, after step {step}; expected the "
            "trainer to end the run, e.g. by trainer.should_stop=True"
        )
        error.code = LEFT_EARLY
        control.report("other_software_error", cause, phase="script", step=step, details={}, ends=True)
    else:
        report_error(control, error, engine)


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
