"""Faults that a worker injects into itself (docs/faults.md). Each function acts; none decides."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import time
from importlib import import_module

import torch
from torch import Tensor

from unicron_lightning.faults.examples import EXAMPLES, Example
from unicron_lightning.worker.communicator import CommunicatorAborted

_NAP_SECONDS = 0.05
_HOLD_SECONDS = 4000
"""Longest sleep of usleep in whole seconds; its limit in microseconds is slightly higher."""


def hang(how: str, seconds: float | None) -> None:
    """Block for ``seconds`` (None: for ever).

    Args:
        how: ``sleep``, ``spin``, or ``gil``: sleep with the interpreter's lock, so that no other thread runs either,
            except for a moment at a signal.
        seconds: duration.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if how == "sleep":
            time.sleep(min(_NAP_SECONDS, left))
        elif how == "gil":
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(1e6 * min(_HOLD_SECONDS, left))))


def leave(status: int) -> None:
    """End the process at once, as a library's ``exit`` does."""
    logging.shutdown()
    os._exit(status)


def error(kind: str, in_operation: bool) -> Exception:
    """The exception that a library raises for an error of this kind.

    Args:
        kind: one of `EXAMPLES`.
        in_operation: whether the error is raised in an operation of the engine. There, collectives raise broken
            connections as `CommunicatorAborted`, which is handled in place.
    """
    example = EXAMPLES[kind]
    raised = _class_of(example)(example.text)
    if not (example.collective and in_operation):
        return raised
    aborted = CommunicatorAborted(example.text)
    aborted.__cause__ = raised
    return aborted


def corrupt_next_gradient(module: torch.nn.Module) -> None:
    """Make the next backward produce NaN for the first parameter that needs a gradient."""
    parameter = next((p for p in module.parameters() if p.requires_grad), None)
    if parameter is None:
        return

    def spoil(gradient: Tensor) -> Tensor:
        handle.remove()
        return torch.full_like(gradient, float("nan"))

    handle = parameter.register_hook(spoil)


def _class_of(example: Example) -> type[Exception]:
    path, _, name = example.exception.rpartition(".")
    found: type[Exception] = getattr(import_module(path or "builtins"), name, RuntimeError)
    return found
