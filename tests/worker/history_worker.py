"""One worker of a history: a real `Engine` and `Control` in a thread that runs only when it is its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from worker.history_data import SimConnecting

from unicron_lightning import wire
from unicron_lightning.worker import engine as engine_module
from unicron_lightning.worker.buckets import FlatBucket
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.control import thread as control_module
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement, Evaluation, Join
from unicron_lightning.worker.rows import ReportSum, plan_rows
from unicron_lightning.worker.step import GradientStep

if TYPE_CHECKING:
    from worker.history import History
    from worker.history_agent import SimAgent

MICRO_BATCHES = 5
BUCKETS = 2
BATCHES = 3
"""Of an evaluation."""


class Killed(BaseException):
    """The process ends here."""


class _Leaves(BaseException):
    """The control thread ends the process."""


def _leave(status: int) -> None:
    raise _Leaves(status)


@contextmanager
def replaced() -> Iterator[None]:
    """What would end this process, or start threads of its own, is replaced for the simulated workers."""
    with (
        mock.patch.object(control_module, "_leave", _leave),
        mock.patch.object(engine_module, "Connecting", SimConnecting),
    ):
        yield


class Condition:
    """A condition whose wait is a turn of the history."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._worker.block(predicate)
        return predicate()

    def notify_all(self) -> None: ...


class SimControl(Control):
    """The real one without its socket and thread."""

    def __init__(self, worker: SimWorker, on_failure: Callable[[wire.Epoch], None]) -> None:
        self.worker, self.local_rank, self.is_member, self.fit = worker.name, 0, False, 0
        self.condition = Condition(worker)  # type: ignore[assignment]
        self.task_over = self.flops_per_step = self._monitor = self._latest = self._welcome = self._progress = None
        self.listeners, self._went, self._replies, self._noted = [], {}, {}, {}
        self._on_failure = on_failure
        self.on_order = lambda order: None
        self._closed = self._ending = False
        self._sim = worker

    def send(self, message: wire.Message) -> None:
        self._sim.up.queue.append(message)

    def close(self) -> None: ...


class Gradients:
    """`GradientBuckets` as far as a step asks: each bucket has a place for each micro-batch."""

    def __init__(self, worker: SimWorker) -> None:
        self.buckets = [FlatBucket(torch.zeros(MICRO_BATCHES, dtype=torch.float64)) for _ in range(BUCKETS)]
        self._worker = worker
        self._order: list[int] = []
        self._launch: Callable[[int], None] | None = None

    def arm(self, order: Sequence[int], launch: Callable[[int], None]) -> None:
        self._order, self._launch = list(order), launch

    def add(self, micro_batch: int) -> None:
        """Backward: bucket after bucket, each launched as soon as it is whole."""
        for index, bucket in enumerate(self.buckets):
            self._worker.turn()
            bucket.local[micro_batch] += 1
            if self._launch is not None and self._order and self._order[0] == index:
                self._launch(self._order.pop(0))

    def take(self) -> None:
        """Nothing is moved after a backward."""

    def finish(self) -> list[int]:
        self._launch = None
        return self._order


class Count:
    """`Sums`: the number of micro-batches."""

    buckets: Sequence[FlatBucket] = ()

    def __init__(self) -> None:
        self.own, self.total = 0, 0.0

    def totals(self) -> list[float]:
        return [float(self.own)]

    def read(self, totals: Sequence[float]) -> bool:
        (self.total,) = totals
        return False

    def settle(self, engine: Engine) -> None:
        raise AssertionError("nothing to settle")


class SimWorker:
    """A process with a training thread."""

    def __init__(self, history: History, agent: SimAgent, name: str) -> None:
        self.history, self.agent, self.name = history, agent, name
        self.alive, self.done = True, False
        self.waits_for_data = False
        self.exit: int | None = None
        self.up = history.link(lambda message: agent.from_worker(self, message))
        self.down = history.link(self._receive)
        self.control = SimControl(self, lambda epoch: self.engine.abort(epoch))
        self.engine: Engine = Engine(self.control, self._connect, lambda world: None, False)  # type: ignore[arg-type]
        self._may_run = threading.Semaphore(0)
        self._predicate: Callable[[], Any] = lambda: True
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"history-{name}", daemon=True)
        self._thread.start()

    # ---- turns

    def runnable(self) -> bool:
        return self.alive and not self.done and bool(self._predicate())

    def resume(self) -> None:
        """[history] Its turn, until it waits."""
        self._may_run.release()
        self.history.baton.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def block(self, predicate: Callable[[], Any]) -> None:
        """[worker] Waits; others run."""
        self._predicate = predicate
        self.history.baton.release()
        self._may_run.acquire()
        if not self.alive:
            raise Killed

    def turn(self, *point: Any) -> None:
        """[worker] Anything may happen here."""
        self.block(lambda: True)

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if self.alive:
                self._program()
                self.done, self.exit = True, 0
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the history's thread
            self._error = error
            self.alive = False
        self.history.hubs.left(self)
        self.history.baton.release()

    def die(self, why: str, status: int = 1) -> None:
        """The process ends at once."""
        if self.alive and not self.done:
            self.history.note("dies", self.name, why)
            if self.history.patient and why != "killed" and self.engine.has_state and self.engine.position:
                self.history.violations.append(f"{self.name} was given up although it lived: {why}")
            self.exit = status
            self.end(why)

    def end(self, why: str) -> None:
        """Ends the thread."""
        self.alive = False
        if self._thread.is_alive():
            self.resume()
        self._thread.join()
        self.down.queue.clear()

    def members(self) -> Sequence[wire.Member]:
        """Of the epoch that it has entered."""
        return self._members

    # ---- control

    def _receive(self, message: wire.Message) -> None:
        if not self.alive or self.done:
            return
        try:
            self.control._receive(wire.encode(message))
        except _Leaves as leaves:
            self.die("leaves", int(leaves.args[0]))

    def _connect(self, epoch: wire.Epoch, rank: int, world: int) -> Any:
        self._members = epoch.members
        return self.history.hubs.of(epoch), self, rank

    # ---- the program

    def _program(self) -> None:
        control, engine = self.control, self.engine
        control.hello(8)
        welcome = control.wait_welcome()
        if welcome.founder:
            control.ready(0, {"step": 0, "has_state": True, "founder": True})
            self.block(lambda: control.latest is not None or not control.welcome.founder)
            welcome = control.welcome
        self.life = welcome.life
        engine.has_state = welcome.founder
        engine.fault = self.turn
        step = 0
        if not welcome.founder:
            control.ready(0, {"step": 0, "has_state": False})
            join = Join(lambda: b"")
            engine.run(join)
            assert join.received is not None
            step = engine.step
        else:
            engine.run(Agreement("start", lambda rank: b""))
        while step < self.history.steps:
            engine.step = step
            self.turn()
            engine.switch(Join(lambda: b"state"))
            self._step(step)
            step += 1
            engine.step = step
            control.progress(step, {})
            control._tell_progress()
            if step % 2:
                self._evaluate()
        engine.run(Agreement("end", lambda rank: b""))
        engine.close()

    def _step(self, step: int) -> None:
        gradients, count = Gradients(self), Count()

        def run(micro_batch: int) -> None:
            self.turn()
            gradients.add(micro_batch)
            count.own += 1
            self.history.computed(self, (self.life, step, micro_batch))

        operation = GradientStep(range(MICRO_BATCHES), gradients, count, run)  # type: ignore[arg-type]
        self.engine.run(operation)
        for bucket in gradients.buckets:
            assert bucket.reduced.tolist() == [1.0] * MICRO_BATCHES, "a micro-batch counts once"
        assert count.total == MICRO_BATCHES

    def _evaluate(self) -> None:
        finished: set[int] = set()

        def run(number: int) -> None:
            self.turn()
            finished.add(number)

        def todo(reports: ReportSum, rank: int) -> list[int]:
            return plan_rows(range(BATCHES), reports.finished, rank, reports.world).rows

        operation = Evaluation(todo, run, finished, lambda: bytes(sorted(finished)))
        parts = unpack_parts(self.engine.run(operation))
        assert sorted(b"".join(parts)) == list(range(BATCHES))
