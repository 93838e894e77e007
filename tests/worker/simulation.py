"""A task inside one process: engines in threads, with fake communicators and a fake coordinator.

Deaths are raised at the engine's own fault points. A collective that all ranks have begun completes on some at once and
on others only when they wait for it (chance, seeded), so an abort finds the ranks with different sets of results.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unicron_lightning import wire
from unicron_lightning.wire.report_sums import summed
from unicron_lightning.worker.communication.communicator import CommunicatorAborted, Handle, Route
from unicron_lightning.worker.engine import Engine, World

SECONDS = 10.0
"""Time after which a waiting thread counts as hung."""


class Killed(BaseException):
    """Raised at a worker's death."""


class TaskIsOver(BaseException):
    """Raised in a worker that waited to join and is no longer needed."""


class Dismissed(TaskIsOver):
    """Raised in a worker that has left on request."""


class FakeHandle(Handle):
    def __init__(self, call: int) -> None:
        super().__init__(None)
        self.done = False
        self.call = call

    def succeeded(self) -> bool:
        return self.done


class Transfers:
    """Routes that the members of an epoch have given, by rank and call."""

    def __init__(self) -> None:
        self._routes: dict[tuple[int, int], Sequence[Route]] = {}

    def add(self, rank: int, call: int, routes: Sequence[Route]) -> Tensor:
        """Keep a rank's routes; return what it takes part in a collective with."""
        self._routes[rank, call] = routes
        return torch.zeros(len(routes))

    def receive(self, rank: int, call: int) -> None:
        """Copy what a rank receives. No source changes its tensors before all ranks have what they lack."""
        for number, route in enumerate(self._routes[rank, call]):
            if rank in route.ranks[1:]:
                sent = torch.cat(list(self._routes[route.ranks[0], call][number].memory))
                parts = sent.split([len(each) for each in route.memory])
                for target, part in zip(route.memory, parts, strict=True):
                    target.copy_(part)


class Hub:
    """State shared by the members of one epoch."""

    def __init__(self, world: int, seed: int) -> None:
        self.world = world
        self.condition = threading.Condition()
        self.calls: dict[int, dict[int, tuple[str, Tensor, int, FakeHandle]]] = {}
        self.transfers = Transfers()
        self.random = random.Random(seed)

    def begin(self, rank: int, call: int, kind: str, tensor: Tensor, root: int) -> FakeHandle:
        handle = FakeHandle(call)
        with self.condition:
            parts = self.calls.setdefault(call, {})
            parts[rank] = (kind, tensor, root, handle)
            if len(parts) == self.world:
                kinds = {(k, r, tuple(t.shape), t.dtype) for k, t, r, _ in parts.values()}
                assert len(kinds) == 1, f"ranks started different collectives: {kinds}"
                for other in parts:
                    if self.random.random() < 0.5:
                        self.deliver(other, call)
                self.condition.notify_all()
        return handle

    def complete(self, call: int) -> bool:
        return len(self.calls.get(call, {})) == self.world

    def deliver(self, rank: int, call: int) -> None:
        kind, tensor, root, handle = self.calls[call][rank]
        if handle.done:
            return
        parts = self.calls[call]
        if kind == "transfer":
            self.transfers.receive(rank, call)
            handle.done = True
            return
        if "result" not in self.__dict__:
            self.result: dict[int, Tensor] = {}
        if call not in self.result:
            # before any rank's tensor is written
            if kind == "sum":
                self.result[call] = torch.stack([parts[r][1] for r in sorted(parts)]).sum(0, dtype=tensor.dtype)
            else:
                self.result[call] = parts[root][1].clone()
        tensor.copy_(self.result[call])
        handle.done = True


class HubCommunicator:
    """Base of communicators without a network: starts collectives in the hub that the members of an epoch share."""

    tells_success = True
    device: torch.device | None = None

    def __init__(self, hub: Any, rank: int) -> None:
        self.rank, self.world = rank, hub.world
        self._hub = hub
        self._calls = 0
        self._reason: str | None = None

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._begin("sum", tensor, 0)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        received.zero_()
        received[self.rank] = sent
        return self._begin("sum", received, 0)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._begin("broadcast", tensor, root)

    def transfer(self, routes: Sequence[Route]) -> Handle:
        return self._begin("transfer", self._hub.transfers.add(self.rank, self._calls + 1, routes), 0)

    def abort(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.abort("closed")

    def released(self, seconds: float) -> bool:
        return False

    def _begin(self, kind: str, tensor: Tensor, root: int) -> Handle:
        if self._reason is not None:
            raise CommunicatorAborted(self._reason)
        self._calls += 1
        return self._hub.begin(self.rank, self._calls, kind, tensor, root)


class FakeCommunicator(HubCommunicator):
    """A `Communicator` over a `Hub`."""

    def wait(self, handle: Handle) -> None:
        assert isinstance(handle, FakeHandle)
        hub = self._hub
        with hub.condition:
            ended = hub.condition.wait_for(
                lambda: handle.done or self._reason is not None or hub.complete(handle.call), SECONDS
            )
            assert ended, "a collective hangs"
            if handle.done:
                return
            if self._reason is not None:
                raise CommunicatorAborted(self._reason)
            hub.deliver(self.rank, handle.call)

    def abort(self, reason: str) -> None:
        with self._hub.condition:
            self._reason = self._reason or reason
            self._hub.condition.notify_all()


class FakeControl:
    """The parts of `Control` that `Engine` uses."""

    def __init__(self, coordinator: Coordinator, worker: str) -> None:
        self.worker = worker
        self.is_member = False
        self.engine: Engine | None = None
        self.condition = coordinator.condition
        self.latest: wire.Epoch | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._coordinator = coordinator

    def newer_than(self, number: int) -> wire.Epoch | None:
        if self.latest is not None and self.latest.number > number:
            return self.latest
        if self._coordinator.over and not self.is_member:
            raise TaskIsOver  # the real one ends the process
        return None

    def failed_since(self, number: int) -> bool:
        newer = self.newer_than(number)
        return newer is not None and newer.kind not in wire.PLANNED

    def wait_newer(self, number: int) -> None:
        with self.condition:
            known = self.condition.wait_for(
                lambda: self.newer_than(number) is not None or self._coordinator.over, SECONDS
            )
            assert known, "no newer epoch"
            if self.newer_than(number) is None:
                raise TaskIsOver

    def stand_aside(self, number: int) -> None:
        coordinator = self._coordinator
        with self.condition:
            known = self.condition.wait_for(
                lambda: self.newer_than(number) is not None or self.worker in coordinator.dismissed, SECONDS
            )
            assert known, f"{self.worker} is forgotten outside the task"
            if self.newer_than(number) is None:
                raise Dismissed  # the real one is stopped by its agent

    def wait_go(self, number: int) -> wire.Go | None:
        gone = self._coordinator.gone
        with self.condition:
            known = self.condition.wait_for(
                lambda: number in gone or self.newer_than(number) is not None or self._coordinator.over, SECONDS
            )
            assert known, f"epoch {number} is never settled"
            if number not in gone and self.newer_than(number) is None:
                raise TaskIsOver
            return gone.get(number)

    def ready(self, epoch: int, state: dict[str, Any]) -> None:
        self._coordinator.ready(self.worker, epoch, state)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def record(self, key: str, value: str, epoch: int, *, lasting: bool = False) -> None:
        self.send(wire.Record(key=key, value=value, epoch=epoch, lasting=lasting))

    def send(self, message: wire.Message) -> None:
        broken = isinstance(message, wire.CommError)
        assert self._coordinator.sockets_break or not broken, "fake sockets do not break"


class Coordinator:
    """Epochs of one task: a new one for every death, and one for joiners when no other change is pending."""

    sockets_break = False
    """Whether workers may detect a death by their sockets before they are notified."""

    def __init__(self, seed: int = 0, minimum: int = 1) -> None:
        self.minimum = minimum
        self.condition = threading.Condition(threading.RLock())
        self.epoch: wire.Epoch | None = None
        self.gone: dict[int, wire.Go] = {}
        self.hubs: dict[int, Hub] = {}
        self.positions: list[list[int]] = []
        self.over = False
        self._controls: dict[str, FakeControl] = {}
        self._members: list[str] = []
        self._joiners: list[str] = []
        self._admitted: set[str] = set()
        self._asked: set[str] = set()
        self._aside: list[str] = []
        self.dismissed: set[str] = set()
        self._states: dict[str, dict[str, Any]] = {}
        self._seed = seed

    def worker(self, name: str, joiner: bool = False) -> Engine:
        """A worker of the task."""
        control = FakeControl(self, name)
        worlds: list[World] = []
        control.engine = Engine(control, self._connect, worlds.append, joiner)  # type: ignore[arg-type]
        with self.condition:
            self._controls[name] = control
            if not joiner:
                self._members.append(name)
        return control.engine

    def start(self) -> None:
        with self.condition:
            self._publish("init")

    def leave(self, *workers: str) -> None:
        """Order workers to leave the task at a step boundary."""
        with self.condition:
            self._asked |= set(workers)
            self._admit()

    def ready(self, worker: str, epoch: int, state: dict[str, Any]) -> None:
        with self.condition:
            if epoch == 0:
                self._joiners.append(worker)
                self._admit()
                return
            if self.epoch is None or epoch != self.epoch.number or worker not in self._members:
                return
            self._states[worker] = state
            if len(self._states) == len(self._members):
                known = [s["position"] for s in self._states.values() if s["has_state"]]
                self.positions.append(known)
                self._admitted |= set(self._members)
                self.gone[epoch] = summed(epoch, [self._states[m] for m in self._members])
                for member in self._members:
                    self._controls[member].is_member = True
                self.dismissed |= set(self._aside)
                self._aside = []
                self.condition.notify_all()
                self._admit()

    def left(self, worker: str, died: bool) -> None:
        """Record that the worker's program ended, or that it died."""
        with self.condition:
            if worker in self._joiners:
                self._joiners.remove(worker)
            if worker not in self._members + self._aside:
                return
            assert self.epoch is not None
            settled = self.epoch.number in self.gone
            self._members = [m for m in self._members + self._aside if m != worker]
            self._aside = []
            if not settled and self.epoch.kind == "join":
                # joiners that have not been admitted wait for a later epoch
                again = [m for m in self._members if m not in self._admitted]
                self._members = [m for m in self._members if m not in again]
                self._joiners = again + self._joiners
            if self._members and (died or not settled):
                self._publish("fail")
            self.over = not self._members
            self.condition.notify_all()

    def _admit(self) -> None:
        going = [m for m in self._members if m in self._asked]
        settled = self.epoch is not None and self.epoch.number in self.gone
        if going and settled and len(going) < len(self._members):
            self._aside = going
            self._members = [m for m in self._members if m not in going]
            self._publish("leave")
        elif self._joiners and self.epoch is not None and self.epoch.number in self.gone and self._members:
            self._members += self._joiners
            self._joiners = []
            self._publish("join")

    def _publish(self, kind: wire.EpochKind) -> None:
        number = 1 if self.epoch is None else self.epoch.number + 1
        self.epoch = wire.Epoch(
            number=number,
            kind=kind,
            members=[wire.Member(worker=m, agent=m, node=m, host="127.0.0.1", local_rank=0) for m in self._members],
            store=wire.Address(host="", port=0),
            hold=len(self._members) < self.minimum,
            incident=None,
            published_at=0.0,
        )
        self._states = {}
        self.hubs[number] = Hub(len(self._members), self._seed + number)
        for member in self._members + self._aside:
            self._controls[member].latest = self.epoch
        self.condition.notify_all()
        if kind not in wire.PLANNED:
            for member in self._members:
                engine = self._controls[member].engine
                assert engine is not None
                engine.abort(self.epoch)

    def _connect(self, epoch: wire.Epoch, rank: int, world: int) -> FakeCommunicator:
        return FakeCommunicator(self.hubs[epoch.number], rank)


class Fault:
    """Dies at the n-th fault point that the worker passes (1 is the first); a callable for `Engine.fault`."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.point: tuple[Any, ...] | None = None

    def __call__(self, *point: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.point = point
            raise Killed


class LateFault:
    """Dies at a fault point, once the others have come as far as is wanted; a callable for `Engine.fault`.

    Args:
        at: the beginning of the point.
        passed: whether they have.
    """

    def __init__(self, at: tuple[Any, ...], passed: Callable[[], bool]) -> None:
        self._at, self._passed = at, passed

    def __call__(self, *point: Any) -> None:
        if point[: len(self._at)] == self._at:
            deadline = time.monotonic() + SECONDS
            while not self._passed():
                assert time.monotonic() < deadline, f"the others do not come as far as {self._at}"
                time.sleep(0.001)
            raise Killed


def run_threads(coordinator: Coordinator, programs: Sequence[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    """Run each worker's program in a thread; return the results, `Killed` for the killed ones."""
    results: dict[str, Any] = {}

    def body(name: str, program: Callable[[], Any]) -> None:
        died = True
        try:
            results[name] = program()
            died = False
        except (Killed, TaskIsOver) as end:
            results[name] = end
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            results[name] = error
        coordinator.left(name, died)

    threads = [threading.Thread(target=body, args=item, name=f"sim-{item[0]}") for item in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
        assert not thread.is_alive(), f"{thread.name} hangs"
    for result in results.values():
        if isinstance(result, BaseException) and not isinstance(result, (Killed, TaskIsOver)):
            raise result
    return results
