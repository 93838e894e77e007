"""Reports a worker's exception to its agent before the process ends.

Lightning passes exceptions raised inside a trainer to the strategy. Exceptions raised outside (imports, data
preparation, plain scripts) reach `sys.excepthook`, which then calls the hook that was installed before.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from types import TracebackType
from typing import Final

from unicron_lightning import environ

logger = logging.getLogger(__name__)

_SEND_SECONDS: Final = 2.0


def watch_exceptions() -> None:
    """Make this process, a worker, report the exception that ends it to its agent."""
    before, watched = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if os.getpid() == watched and issubclass(kind, Exception):  # forked children are no workers
                report_unseen(error.with_traceback(trace))
        except Exception:  # supervisor boundary: the user's own error has to be shown
            logger.debug("report_failed", exc_info=True)
        finally:
            before(kind, error, trace)

    sys.excepthook = hook


def report_unseen(error: BaseException) -> None:
    """Report an exception that has not been reported yet."""
    module = sys.modules.get("unicron_lightning.worker.session")
    control = module.control_of_process() if module is not None else None
    from unicron_lightning.detection.exceptions import describe

    told = describe(error)
    if control is not None:
        control.report(told.kind, told.cause, phase=told.phase, step=None, details=told.details, ends=True)
        return
    from unicron_lightning import wire

    own = environ.read()
    report = wire.ErrorReport(
        worker=own.worker,
        kind=told.kind,
        cause=told.cause,
        phase=told.phase,
        step=None,
        at=time.time(),
        details={**told.details, "pid": os.getpid()},
        ends=True,
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_SEND_SECONDS)
        link.connect(own.agent_socket)
        link.sendall(wire.encode(report) + b"\n")
