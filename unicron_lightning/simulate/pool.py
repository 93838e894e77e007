"""Processes that simulate many cases: they end with the command, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import FrameType

from unicron_lightning.launcher.tied import tie_to


@contextmanager
def processes(number: int | None) -> Iterator[ProcessPoolExecutor]:
    """A pool. If what is done with it ends early (Ctrl-C and SIGTERM included) its processes are killed.

    To be called from the main thread, which gets SIGTERM as `SystemExit`.

    Args:
        number: of processes; None for as many as there are CPUs.
    """
    others = set(multiprocessing.active_children())
    before = signal.signal(signal.SIGTERM, _leave)
    # Forked, so that the command is their parent: the kernel ends them with it.
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown()
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _begin(parent: int) -> None:
    """In a process of the pool: Ctrl-C, which the whole terminal gets, is the command's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tie_to(parent)
