"""A communicator whose waits are recorded: a rank blocked in a collective waits for others and does not hang itself."""

from __future__ import annotations

from torch import Tensor

from unicron_lightning.worker.activity import Activity
from unicron_lightning.worker.communicator import Communicator, Handle


class WatchedCommunicator:
    """Forwards all calls.

    Args:
        communicator: the communicator whose waits are recorded.
        activity: the record.
    """

    def __init__(self, communicator: Communicator, activity: Activity) -> None:
        self.rank = communicator.rank
        self.world = communicator.world
        self.tells_success = communicator.tells_success
        self._communicator = communicator
        self._activity = activity

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._communicator.all_reduce(tensor)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._communicator.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._communicator.broadcast(tensor, root)

    def wait(self, handle: Handle) -> None:
        self._activity.waits(True)
        try:
            self._communicator.wait(handle)
        finally:
            self._activity.waits(False)

    def abort(self, reason: str) -> None:
        self._communicator.abort(reason)

    def close(self) -> None:
        self._communicator.close()

    def released(self, seconds: float) -> bool:
        return self._communicator.released(seconds)
