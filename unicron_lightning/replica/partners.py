"""Detects a partner's cut of its replica's connections, for workers that wait in NCCL's kernels.

A worker that cuts its replica's connections shuts gloo's sockets, which all partners have beside NCCL's groups, and
aborts its own NCCL groups. Within a machine NCCL's peers share memory and are not notified. Therefore a thread checks
the sockets, and has this worker's groups aborted, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from unicron_lightning.worker.communication.gloo import GlooGroup

LOOK_SECONDS: Final = 0.1


class PartnerWatch:
    """Checks the groups until it is closed or has detected a cut.

    Args:
        groups: with partners.
        let_go: called from the watch's thread, once, when a connection of one of them has been closed.
    """

    def __init__(self, groups: Sequence[GlooGroup], let_go: Callable[[], None]) -> None:
        self._groups = groups
        self._let_go = let_go
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="unicron-partners", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; call this before the groups are closed."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if any(group.broken() for group in self._groups):
                self._let_go()
                return
