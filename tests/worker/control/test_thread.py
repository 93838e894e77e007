"""A worker's control thread handles epochs that arrive faster than the training thread processes them."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from unicron_lightning import wire
from unicron_lightning.worker.control import thread as control_module
from unicron_lightning.worker.control.thread import Control


class Agent:
    """The agent's end of a worker's socket."""

    def __init__(self) -> None:
        self.path = str(Path(mkdtemp()) / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self.control = Control(self.path, "a", 0, lambda epoch: None)
        self._connection, _ = self._listener.accept()

    def say(self, *messages: wire.Message) -> None:
        """Send messages, and wait until all are processed."""
        end = wire.LookupReply(worker="a", key=f"{time.monotonic()}", value=None)
        self._connection.sendall(b"".join(wire.encode(message) + b"\n" for message in (*messages, end)))
        assert self.control.condition.acquire(timeout=10)
        try:
            assert self.control.condition.wait_for(lambda: end.key in self.control._replies, 10)
        finally:
            self.control.condition.release()

    def close(self) -> None:
        self.control.close()
        self._connection.close()
        self._listener.close()
        Path(self.path).unlink()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    def left(status: int) -> None:
        raise AssertionError(f"the worker ended itself with {status}")

    monkeypatch.setattr(control_module, "_leave", left)
    made = Agent()
    yield made
    made.close()


def epoch(number: int, kind: wire.EpochKind, *workers: str) -> wire.Epoch:
    members = [wire.Member(worker=w, agent=w, node=w, host="", local_rank=0) for w in workers]
    store = wire.Address(host="", port=1)
    return wire.Epoch(
        number=number, kind=kind, members=members, store=store, hold=False, incident=None, published_at=0.0
    )


def go(number: int) -> wire.Go:
    return wire.Go(epoch=number)


def test_a_leave_right_after_one_that_was_given_up(agent: Agent) -> None:
    """A member dies while this worker is to leave; the epoch of the remaining ones settles, and it is to leave
    again.
    """
    control = agent.control
    agent.say(epoch(1, "init", "a", "b", "c"), go(1), epoch(2, "leave", "b", "c"))
    assert not control.is_member and control.failed_since(1) is False
    agent.say(epoch(3, "fail", "a", "c"), go(3), epoch(4, "leave", "c"))
    assert control.wait_go(3) == go(3)
    newer = control.newer_than(3)
    assert newer is not None and (newer.number, newer.kind) == (4, "leave")


def test_what_comes_after_a_leave_is_others_business(agent: Agent) -> None:
    """Even if the training thread has not noticed yet that this worker was a member."""
    control = agent.control
    agent.say(epoch(1, "join", "b", "a"), go(1), epoch(2, "leave", "b"))
    assert control.wait_go(1) == go(1) and not control.is_member
    agent.say(epoch(3, "join", "b", "c"), epoch(4, "fail", "b"))
    newer = control.newer_than(1)
    assert newer is not None and newer.number == 2


def test_a_joiner_is_no_member_before_its_epoch_is_settled(agent: Agent) -> None:
    """If the join is cancelled, the joiner is not expelled: it waits for the next one."""
    control = agent.control
    agent.say(epoch(2, "join", "b", "a"), epoch(3, "fail", "b"), go(3))
    assert not control.is_member
    agent.say(epoch(4, "join", "b", "a"), go(4))
    assert control.is_member


def test_a_sibling_s_epoch_makes_no_member(agent: Agent) -> None:
    """An agent sends messages that concern one of its workers to all of them."""
    agent.say(epoch(1, "init", "b"), go(1))
    assert not agent.control.is_member and agent.control.latest is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_no_malformed_message(loss: float) -> None:
    """A malformed message would cost the worker its connection, and thus its life."""
    said = wire.encode(wire.Progress(worker="w", step=1, metrics={"loss": loss}))
    for decode in (wire.decode_from_worker, wire.decode_from_agent):
        received = decode(said)
        assert isinstance(received, wire.Progress) and received.metrics == {"loss": None}


def test_members_go_at_once_when_the_task_is_cancelled(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(control_module, "_leave", left.append)
    agent.say(epoch(1, "init", "a", "b"), go(1), wire.TaskOver(succeeded=True))
    assert left == [], "a member ends by itself"
    agent.say(wire.TaskOver(succeeded=False))
    assert left == [1]


WAITS = """
import signal, sys
from unicron_lightning.worker.control.thread import Control
signal.signal(signal.SIGTERM, lambda *_: None)
control = Control(sys.argv[1], "a", 0, lambda epoch: None)
control.hello(1)
control.wait_welcome()
"""


def test_a_worker_that_waits_to_be_welcomed_ends_at_sigterm(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path / "socket")]) as process:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                while not isinstance(wire.decode_from_worker(next(lines)), wire.WorkerHello):
                    pass
                assert isinstance(wire.decode_from_worker(next(lines)), wire.Heartbeat), "it goes on to say it lives"
                while process.poll() is None:  # the first signal may arrive before the wait
                    process.terminate()
                    time.sleep(0.05)
                assert process.returncode == -signal.SIGTERM


def test_who_ends_by_an_error_is_not_ended_before_it_has_said_all(agent):
    agent.control.is_member = True
    agent.control.progress(7, {})
    for cause in ("the error", "what followed from it"):
        agent.control.report("cuda_error", cause, phase="compute", step=7, details={}, ends=True)
    agent.say(epoch(2, "fail", "b"), wire.TaskOver(succeeded=False))
    said = [wire.decode_from_worker(line) for line in agent._connection.recv(1 << 16).splitlines()]
    told = [message for message in said if not isinstance(message, wire.Heartbeat)]
    assert [type(message) for message in told] == [wire.Progress, wire.ErrorReport]
    assert (told[1].cause, told[1].ends) == ("the error", True)
