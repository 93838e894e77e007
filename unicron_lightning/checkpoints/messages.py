"""Messages between a worker and its writer: a length, then JSON, over a socket pair, with descriptors of memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

import msgspec

_LENGTH: Final = 8
_DESCRIPTORS: Final = 64
"""Most descriptors of a message."""


class StagedTensor(msgspec.Struct, frozen=True):
    """A piece of a tensor in shared memory, or an object as torch.save has written it.

    Attributes:
        name: in the index.
        dtype: without ``torch.``; "" for an object.
        whole: shape of the tensor.
        offsets, sizes: place of the piece in the tensor.
        start: first byte in the memory.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


class StagedPart(msgspec.Struct, frozen=True):
    """A part of a version in one shared memory."""

    part: int
    tensors: list[StagedTensor]


class WriteVersion(msgspec.Struct, frozen=True, kw_only=True, tag="write"):
    """Write this worker's part of a checkpoint, and others as their writers fail.

    Descriptors of the parts' memories follow in their order, then that of the memory with the `pack_parts` of the
    further files' contents, and of the objects that are in no part, each as torch.save writes them.

    Attributes:
        number: of the version, for this worker.
        name: of the version, equal on all workers and unique.
        path: path or URL of the checkpoint.
        rank: of this worker among those that write the version.
        holders: ranks that hold each part, in the order in which they are to write it.
        parts: held by this worker.
        files: names of the further files.
        objects: names of the objects that are in no part.
        places: path of each entry of the index in the nested state.
        seconds: time limit.
        record: file for the record of the complete version (`checkpoints.files`); "": none.
        step, fit: of the checkpoint.
        error: why this worker cannot write; it then only notifies the others.
    """

    number: int
    name: str
    path: str
    rank: int
    holders: list[list[int]]
    parts: list[StagedPart] = []
    files: list[str] = []
    objects: list[str] = []
    places: dict[str, list[str | int]] = {}
    seconds: float = 600.0
    record: str = ""
    step: int = 0
    fit: int = 1
    error: str = ""


class WritersGone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """Some ranks of a version are no longer members of the task."""

    number: int
    ranks: list[int]


class WriterEnds(msgspec.Struct, frozen=True, kw_only=True, tag="ends"):
    """The worker's run ends once its versions are finished."""


class LeaveUntraced(msgspec.Struct, frozen=True, kw_only=True, tag="untraced"):
    """The worker waits: versions of which there is no trace, and to which this writer has nothing to add, are over."""


class WriterReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """[to the worker] The writer has started."""


class VersionWritten(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """[to the worker] The checkpoint is complete, with this digest."""

    number: int
    digest: str


class VersionFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """[to the worker] The version is abandoned."""

    number: int
    error: str


HOLDERS_LOST: Final = "all holders of the parts"
"""Beginning of the error of a version that nobody can write any more."""


class VersionOver(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """[to the worker] Others have finished the version, and nothing of it is left."""

    number: int


ToWriter = WriteVersion | WritersGone | WriterEnds | LeaveUntraced
VersionOutcome = VersionWritten | VersionFailed | VersionOver
FromWriter = VersionOutcome | WriterReady


class Channel:
    """One end of the connection; a message is sent and received as a whole.

    Args:
        connection: a stream socket.
        kind: type of the messages that are received.
    """

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._socket = connection
        self._decoder = msgspec.json.Decoder(kind)

    def fileno(self) -> int:
        """Return the descriptor, for waiting."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        data = msgspec.json.encode(message)
        socket.send_fds(self._socket, [len(data).to_bytes(_LENGTH, "little")], descriptors)
        self._socket.sendall(data)

    def receive(self) -> tuple[Any, list[int]] | None:
        """Wait for a message; return it with its descriptors, or None once the other end is gone."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH, _DESCRIPTORS)
            head += self._exactly(_LENGTH - len(head)) if head else b""
            if len(head) < _LENGTH:
                return None
            data = self._exactly(int.from_bytes(head, "little"))
            return self._decoder.decode(data), list(descriptors)
        except (OSError, EOFError):
            return None

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._socket.recv(min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
