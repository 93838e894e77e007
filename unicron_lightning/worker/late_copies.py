"""Copies that a thread makes while training continues, until what it copies changes.

Parameters and states of optimizers change only in the optimizer's step. The training thread waits for the copies before
that, and not while it computes the gradients; torch copies without the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class LateCopies:
    """Makes the copies of one version at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> bool:
        """Whether copies are being made."""
        return self._thread is not None

    def begin(
        self, copy: Callable[[], None], sources: Sequence[Tensor], then: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """Begin to copy; `settle` must be called before the sources may change.

        Args:
            copy: makes the copies; it reports its errors itself.
            sources: of the copies.
            then: called afterwards, by the same thread, with the sources that have changed: their copies are not valid.
        """
        self.settle()
        versions = [source._version for source in sources]

        def run() -> None:
            with torch.no_grad():
                copy()
            pairs = zip(versions, sources, strict=True)
            then([source for version, source in pairs if version != source._version])

        self._thread = threading.Thread(target=run, name="unicron-late-copies", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the copies are made."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
