"""Building a data set that would otherwise meet the other processes of its world, as MosaicML's does."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch.distributed as dist

_ONLY = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@contextmanager
def as_only_process() -> Iterator[None]:
    """Inside, this process is a world of its own for the data set that it builds.

    torchrun's variables have one rank, and `torch.distributed` is not initialized. The user's other processes on this
    machine build theirs before or after it, because the library gives each a number that is free at the moment.
    """
    with _one_at_a_time(), mock.patch.dict(os.environ, _ONLY), mock.patch.object(dist, "is_initialized", bool):
        yield


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    path = Path(tempfile.gettempdir(), f"unicron-data-{os.getuid()}.lock")
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
