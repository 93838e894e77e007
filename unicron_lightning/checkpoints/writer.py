"""The process that writes a worker's part of checkpoints, while the worker trains.

    python -m unicron_lightning.checkpoints.writer DESCRIPTOR

It ends when the worker closes the connection, or dies, once it has written the worker's own part of the versions that
it has received. The memory with the state has no name: it is gone when both have ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
from multiprocessing.connection import wait
from typing import Final

import torch

from unicron_lightning.checkpoints.messages import (
    Channel,
    LeaveUntraced,
    ToWriter,
    WriterReady,
    WritersGone,
    WriteVersion,
)
from unicron_lightning.checkpoints.version import Versions

_LOOK_SECONDS: Final = 0.05
"""Seconds between two looks at the files of other writers."""
_LAST_SECONDS: Final = 600
"""Seconds after the worker's end in which this process ends, even if the storage does not answer."""
_NICE: Final = 5
"""Added to the niceness: the training has precedence."""


def serve(channel: Channel) -> None:
    """Write versions until the worker is gone."""
    versions = Versions()
    channel.send(WriterReady())
    while True:
        ready = wait([channel.fileno()], _LOOK_SECONDS if versions else None)
        if ready:
            received = channel.receive()
            if received is None:
                signal.alarm(_LAST_SECONDS)
                versions.leave()
                return
            message, descriptors = received
            if isinstance(message, WriteVersion):
                versions.add(message, [_mapped(descriptor) for descriptor in descriptors])
            elif isinstance(message, WritersGone):
                versions.gone(message.number, message.ranks)
            elif isinstance(message, LeaveUntraced):
                versions.leave_untraced()
            else:
                versions.ending = True
        for outcome in versions.advance():
            channel.send(outcome)


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def main() -> None:
    """Serve the worker that started this process, in a session of its own: signals to the worker's do not reach it."""
    descriptor = int(sys.argv[1])
    os.nice(_NICE)
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(OSError):
        serve(Channel(connection, ToWriter))


if __name__ == "__main__":
    main()
