"""The data plane of a history: collectives that complete, or break, for one rank at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from worker.simulation import HubCommunicator, Transfers

from unicron_lightning.worker.communication.communicator import CommunicatorAborted, Handle

if TYPE_CHECKING:
    from worker.history import History
    from worker.history_worker import SimWorker


class SimHandle(Handle):
    def __init__(self) -> None:
        super().__init__(None)
        self.done = False

    def succeeded(self) -> bool:
        return self.done


class Hub:
    """What the members of one epoch share."""

    def __init__(self, history: History, world: int) -> None:
        self.history = history
        self.world = world
        self.ranks: dict[int, SimCommunicator] = {}
        self.calls: dict[int, dict[int, tuple[str, Tensor, int, SimHandle]]] = {}
        self.results: dict[int, Tensor] = {}
        self.transfers = Transfers()
        self.due: list[tuple[int, int]] = []
        self.broken = False
        """Some rank has gone, or has cut its connections."""

    def begin(self, rank: int, call: int, kind: str, tensor: Tensor, root: int) -> SimHandle:
        handle = SimHandle()
        parts = self.calls.setdefault(call, {})
        parts[rank] = (kind, tensor, root, handle)
        if len(parts) == self.world:
            kinds = {(k, r, tuple(t.shape), t.dtype) for k, t, r, _ in parts.values()}
            assert len(kinds) == 1, f"ranks started different collectives: {kinds}"
            tensors = [parts[r][1] for r in sorted(parts)]
            summed = torch.stack(tensors).sum(0, dtype=tensor.dtype) if kind == "sum" else parts[root][1].clone()
            self.results[call] = summed
            self.due += [(r, call) for r in parts]
        return handle

    def deliver(self, place: int) -> None:
        rank, call = self.due.pop(place)
        kind, tensor, _, handle = self.calls[call][rank]
        if not self.ranks[rank].is_over:
            if kind == "transfer":
                self.transfers.receive(rank, call)
            else:
                tensor.copy_(self.results[call])
            handle.done = True

    def choices(self) -> list[Callable[[], None]]:
        self.due = [(rank, call) for rank, call in self.due if not self.ranks[rank].is_over]
        choices: list[Callable[[], None]] = [lambda p=p: self.deliver(p) for p in range(len(self.due))]  # type: ignore[misc]
        if self.broken:
            live = [each for each in self.ranks.values() if not each.is_over and each.worker.waits_for_data]
            choices += [lambda each=each: each.fail("the connection was closed") for each in live]  # type: ignore[misc]
        return choices


class SimCommunicator(HubCommunicator):
    """`Communicator` over a `Hub`."""

    def __init__(self, hub: Hub, rank: int, worker: SimWorker) -> None:
        super().__init__(hub, rank)
        self.worker = worker
        hub.ranks[rank] = self

    @property
    def is_over(self) -> bool:
        return self._reason is not None

    def wait(self, handle: Handle) -> None:
        assert isinstance(handle, SimHandle)
        self.worker.waits_for_data = True
        self.worker.block(lambda: handle.done or self._reason is not None)
        self.worker.waits_for_data = False
        if not handle.done:
            raise CommunicatorAborted(str(self._reason))

    def abort(self, reason: str) -> None:
        self.fail(reason)

    def fail(self, reason: str) -> None:
        """It is over for this rank; the others may notice."""
        self._reason = self._reason or reason
        self._hub.broken = True


class SimConnecting:
    """In the place of `Connecting`: finished when all members have begun, or broken if one of them has gone."""

    def __init__(self, connect: Any, epoch: Any, rank: int) -> None:
        self._hub, self._worker, self._rank = connect(epoch, rank, len(epoch.members))
        self.communicator: SimCommunicator | None = None

    def start(self, condition: Any) -> None:
        self.communicator = SimCommunicator(self._hub, self._rank, self._worker)
        self._worker.waits_for_data = True

    @property
    def finished(self) -> bool:
        assert self.communicator is not None
        return len(self._hub.ranks) == self._hub.world or self.communicator.is_over

    def take(self) -> SimCommunicator | None:
        assert self.communicator is not None
        self._worker.waits_for_data = False
        if not self.finished:
            self.communicator.close()
            return None
        if self.communicator.is_over:
            raise CommunicatorAborted("a peer was not there")
        return self.communicator


class Hubs:
    """One for each epoch."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._hubs: dict[tuple[Any, ...], Hub] = {}

    def of(self, epoch: Any) -> Hub:
        names = tuple(member.worker for member in epoch.members)
        return self._hubs.setdefault((epoch.number, names, epoch.key), Hub(self._history, len(names)))

    def choices(self) -> list[Callable[[], None]]:
        return [choice for hub in list(self._hubs.values())[-3:] for choice in hub.choices()]

    def left(self, worker: SimWorker) -> None:
        """A process has ended: its connections close."""
        for hub in self._hubs.values():
            for communicator in hub.ranks.values():
                if communicator.worker is worker:
                    communicator.fail("dead")

    def break_one(self) -> None:
        """A connection breaks although all workers live."""
        for hub in list(self._hubs.values())[-1:]:
            hub.broken = True
