"""Copies of tensors that are made by a thread while training continues, until the tensors change.

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

    def begin(self, copies: Sequence[tuple[Tensor, Tensor]], then: Callable[[str], None]) -> None:
        """Begin to copy; `settle` must be called before the sources may change.

        Args:
            copies: target, in host memory, and source of each; of equal sizes.
            then: called by the thread, when all is copied, with "" or the reason why the copies are not valid.
        """
        self.settle()
        versions = [source._version for _, source in copies]
        arguments = copies, versions, then
        self._thread = threading.Thread(target=_copy, args=arguments, name="unicron-late-copies", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the copies are made."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()


def _copy(copies: Sequence[tuple[Tensor, Tensor]], versions: Sequence[int], then: Callable[[str], None]) -> None:
    error = ""
    try:
        with torch.no_grad():
            for target, source in copies:
                target.copy_(source)
        changed = sum(version != source._version for version, (_, source) in zip(versions, copies, strict=True))
        if changed:
            error = f"{changed} tensors were changed before the next step of the optimizer, while they were copied"
    except RuntimeError as problem:
        error = str(problem) or repr(problem)
    then(error)
