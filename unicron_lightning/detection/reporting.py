"""How a worker's exception reaches its agent before the process ends.

Lightning tells the strategy of what is raised inside a trainer. What is raised outside (imports, data preparation,
plain scripts) is seen by `sys.excepthook`, which goes on to whatever was there before: nobody's record is replaced.
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
    """Have this process, a worker, tell its agent of the exception that ends it."""
    before, watched = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if os.getpid() == watched and issubclass(kind, Exception):  # forked children are no workers
                report_unseen(error.with_traceback(trace))
        except Exception:  # supervisor boundary: the user's own error is what has to be shown
            logger.debug("report_failed", exc_info=True)
        finally:
            before(kind, error, trace)

    sys.excepthook = hook


def report_unseen(error: BaseException) -> None:
    """Tell of an exception that nobody has told of yet."""
    module = sys.modules.get("unicron_lightning.strategies.session")
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
