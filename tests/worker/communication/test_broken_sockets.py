"""Connections break between live workers while a join is pending: the join is not entered in the middle of a step."""

from __future__ import annotations

import threading
from typing import Any

from worker.simulation import SECONDS, Coordinator, run_threads
from worker.test_engine import Program, check

from unicron_lightning import wire


class Mending(Coordinator):
    """Answers a communication error during a pending join as the real coordinator does: with an epoch of the
    members.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[tuple[str, int]] = []
        self.kinds: list[wire.EpochKind] = []

    def hear(self, message: Any) -> None:
        assert isinstance(message, wire.CommError)
        with self.condition:
            self.errors.append((message.worker, message.epoch))
            assert self.epoch is not None
            if self.epoch.kind == "join" and self.epoch.number not in self.gone:
                self._joiners = [m for m in self._members if m not in self._admitted]
                self._members = [m for m in self._members if m in self._admitted]
                self._publish("fail")

    def _publish(self, kind: wire.EpochKind) -> None:
        super()._publish(kind)
        self.kinds.append(kind)


def test_members_finish_the_step_among_themselves_before_a_joiner_enters() -> None:
    coordinator, in_step = Mending(), threading.Event()
    programs = {name: Program(coordinator.worker(name)) for name in ("w0", "w1")}
    programs["j0"] = Program(coordinator.worker("j0", joiner=True), joiner=True)
    engines = {name: program.engine for name, program in programs.items()}
    for engine in engines.values():
        assert engine.control is not None
        engine.control.send = coordinator.hear  # type: ignore[method-assign]

    def late() -> Program:
        assert in_step.wait(SECONDS)
        return programs["j0"]()

    def break_sockets(*point: Any) -> None:
        if point[:2] == ("micro_batch", 1) and not in_step.is_set():
            in_step.set()
            with coordinator.condition:
                assert coordinator.condition.wait_for(lambda: coordinator.kinds[-1] == "join", SECONDS)
            for name in ("w0", "w1"):
                engines[name].communicator.abort("connection reset by peer")

    engines["w0"].fault = break_sockets
    coordinator.start()
    run_threads(coordinator, [("w0", programs["w0"]), ("w1", programs["w1"]), ("j0", late)])
    assert coordinator.errors and set(coordinator.errors) <= {("w0", 1), ("w1", 1)}
    assert coordinator.kinds == ["init", "join", "fail", "join"]
    assert programs["j0"].ran, "the joiner has taken part"
    check(coordinator, programs, {})
