"""Processes that simulate many cases; they end with the command, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import FrameType

from unicron_lightning.parent_death import tie_to


@contextmanager
def processes(number: int | None) -> Iterator[ProcessPoolExecutor]:
    """Create a pool whose processes are killed if the block ends early (Ctrl-C and SIGTERM included).

    Call it from the main thread, which receives SIGTERM as `SystemExit`.

    Args:
        number: number of processes; None for one per CPU.
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
    """Initialize a process of the pool: Ctrl-C, which the whole terminal receives, is handled by the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not tie_to(parent):
        sys.exit(1)
