"""The handler in this process, with a coordinator controlled by the test and child processes as workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agent.fake_coordinator import FakeCoordinator
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from unicron_lightning import environ, wire
from unicron_lightning.agent import embedded
from unicron_lightning.agent.handler import RendezvousFailed, UnicronRendezvousHandler
from unicron_lightning.credentials import token_for
from unicron_lightning.local_cluster.processes import until
from unicron_lightning.wire.epoch_changes import change_of

SLEEPER = "import time; time.sleep(100)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"


def until_told(word: Path) -> str:
    """Beginning of a program that waits for the file."""
    return f"import os, sys, time\nwhile not os.path.exists({str(word)!r}): time.sleep(0.01)\n"


class Bench:
    """One handler, used as torchelastic uses it."""

    def __init__(self, fake: FakeCoordinator) -> None:
        self.fake = fake
        self.children: list[subprocess.Popen[bytes]] = []
        self.handler = self.make()

    def make(self, max_nodes: int = 2, **conf: Any) -> UnicronRendezvousHandler:
        conf = {"node": "n", "embedded": "false", "connect_timeout": "5", **conf}
        endpoint = f"127.0.0.1:{self.fake.port}"
        self.handler = UnicronRendezvousHandler(RendezvousParameters("unicron", endpoint, "task", 1, max_nodes, **conf))
        return self.handler

    def granted(self, fake: FakeCoordinator, **options: Any) -> tuple[Any, int]:
        """Have a new handler's agent granted a slot by this coordinator; return the agent and the port."""
        self.fake = fake
        self.make(**options)
        self.handler.next_rendezvous()
        return self.handler._agent, fake.port

    def rendezvous(self, size: int = 1) -> list[int]:
        """Return base rank and world size."""
        info = self.handler.next_rendezvous()
        store: Any = info.store
        role = {"role": "default", "rank": info.rank, "local_world_size": size}
        store.set(f"torchelastic/role_info/{info.rank}", json.dumps(role))
        base, world, *_ = json.loads(store.get(f"torchelastic/assigned_ranks/{info.rank}"))
        return [base, world]

    def spawn(self, local_rank: int, code: str = SLEEPER) -> str:
        """Start a worker process; return its id."""
        rank = int(os.environ[environ.BASE_RANK]) + local_rank
        variables = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        command = [sys.executable, "-c", code]
        self.children.append(
            subprocess.Popen(command, env=variables, start_new_session=True, stdout=subprocess.DEVNULL)
        )
        name = f"{os.environ[environ.AGENT]}/{local_rank}#{os.environ[environ.ROUND]}"
        agent: Any = self.handler._agent
        until("the worker is found", lambda: name in agent._supervisor._live)
        return name

    def close(self) -> None:
        self.handler.shutdown()
        for child in self.children:
            child.kill()
            child.wait()


class LocalWorker:
    """The worker's end of the UNIX socket."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ[environ.AGENT_SOCKET])
        self.socket.settimeout(10)
        self.lines = self.socket.makefile("rb")

    def __enter__(self) -> LocalWorker:
        self.say(wire.WorkerHello(worker=self.name, local_rank=0, pid=0, capacity=4))
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.socket.close()

    def say(self, message: wire.Message) -> None:
        self.socket.sendall(wire.encode(message) + b"\n")

    def hear(self) -> Any:
        return wire.decode_to_worker(self.lines.readline())


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().serving() as served:
        yield served


@pytest.fixture
def bench(fake: FakeCoordinator) -> Iterator[Bench]:
    before = dict(os.environ)
    made = Bench(fake)
    yield made
    made.close()
    os.environ.clear()
    os.environ.update(before)


def test_life_of_a_round(bench: Bench) -> None:
    assert bench.rendezvous(size=3) == [0, 3]
    assert bench.handler.num_nodes_waiting() == 0
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    # The message that reports the round depends on whether the session existed before the round.
    address = bench.fake.registers[0].store or bench.fake.wait_for(wire.RendezvousBegin).store
    store = dist.TCPStore(address.host, address.port, is_master=False)
    assert store.num_keys() == 0
    bench.handler.shutdown()
    assert bench.fake.wait_for(wire.Bye) == wire.Bye(succeeded=False)


def test_workers_are_started_without_the_token(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = token_for("127.0.0.1", None).secret
    monkeypatch.setenv(environ.TOKEN, secret)
    bench.make()
    bench.rendezvous()
    assert environ.TOKEN not in os.environ, "which workers inherit"
    bench.rendezvous()
    assert environ.TOKEN not in os.environ
    bench.handler.shutdown()
    assert os.environ[environ.TOKEN] == secret, "another agent in this process finds it"


def test_workers_on_the_cpu_keep_freed_memory_unless_the_user_says_otherwise(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    trim, mmap = environ.KEEP_FREED
    monkeypatch.delenv(trim, raising=False)
    monkeypatch.setenv(mmap, "4096")
    bench.rendezvous()
    assert (os.environ[trim], os.environ[mmap]) == (environ.MALLOC_THRESHOLD, "4096")
    bench.handler.shutdown()


def test_workers_with_an_accelerator_have_their_own_malloc(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for name in environ.KEEP_FREED:
        monkeypatch.delenv(name, raising=False)
    bench.rendezvous()
    assert not set(environ.KEEP_FREED) & set(os.environ)
    bench.handler.shutdown()


def test_every_round_has_a_fresh_store(bench: Bench) -> None:
    ports = set()
    for _ in range(3):
        bench.rendezvous()
        store: Any = bench.handler._store
        ports.add(store.address.port)
    assert len(ports) == 3
    assert os.environ[environ.ROUND] == "3"


def test_death_is_told_at_once_with_its_siblings(bench: Bench) -> None:
    bench.rendezvous(size=3)
    names = [bench.spawn(rank) for rank in range(3)]
    at = time.monotonic()
    bench.children[1].kill()
    deaths = [bench.fake.wait_for(wire.WorkerDied, lambda m, n=name: m.worker == n) for name in names]
    assert time.monotonic() - at < 5, "not by its silence"
    assert [(d.cause, d.code) for d in deaths] == [("signal", 9)] * 3
    assert [child.wait(30) for child in bench.children] == [-9, -9, -9]
    assert bench.fake.count(wire.WorkerDied) == 3


def test_clean_end_harms_nobody(bench: Bench, tmp_path: Path) -> None:
    bench.rendezvous(size=2)
    bench.spawn(0)
    name = bench.spawn(1, until_told(tmp_path / "end"))
    (tmp_path / "end").touch()
    death = bench.fake.wait_for(wire.WorkerDied)
    assert (death.worker, death.cause, death.code) == (name, "exit", 0)
    assert bench.children[0].poll() is None


def test_exit_status_is_told(bench: Bench, tmp_path: Path) -> None:
    bench.rendezvous()
    bench.spawn(0, until_told(tmp_path / "end") + "sys.exit(3)")
    (tmp_path / "end").touch()
    death = bench.fake.wait_for(wire.WorkerDied)
    assert (death.cause, death.code) == ("exit", 3)
    assert bench.children[0].wait(30) == 3  # the status was left for its parent


@pytest.mark.parametrize(
    ("end", "cause", "code"), [("", "exit", 0), ("sys.exit(3)", "exit", 3), ("os.kill(os.getpid(), 9)", "signal", 9)]
)
def test_exit_status_that_torchelastic_has_taken(bench: Bench, tmp_path: Path, end: str, cause: str, code: int) -> None:
    """Its poll may come before the agent has checked, and leaves no trace of the process."""
    bench.rendezvous()
    word = tmp_path / "end"
    name = bench.spawn(0, until_told(word) + end)
    agent: Any = bench.handler._agent
    free = threading.Event()
    agent._loop.call_soon_threadsafe(free.wait, 20)
    word.touch()
    bench.children[0].wait(30)
    free.set()
    death = bench.fake.wait_for(wire.WorkerDied)
    assert (death.worker, death.cause, death.code) == (name, cause, code)


def test_stop_lets_workers_end_by_themselves(bench: Bench) -> None:
    bench.make(stop_timeout="3.0")
    bench.rendezvous(size=2)
    bench.spawn(0, DEAF)
    bench.spawn(1)
    bench.fake.send(wire.Stop(reason="test"))
    until("the stop", bench.handler.num_nodes_waiting)
    bench.children[1].terminate()
    bench.fake.wait_for(wire.WorkerDied, lambda m: m.code == signal.SIGTERM)
    assert bench.children[0].poll() is None
    assert bench.children[0].wait(30) == -9
    bench.rendezvous()
    assert bench.handler.num_nodes_waiting() == 0


def test_fence(bench: Bench) -> None:
    bench.rendezvous()
    name = bench.spawn(0)
    bench.fake.send(wire.Fence(worker="stranger-1/0#1", reason="test"))
    bench.fake.send(wire.Fence(worker=name, reason="test"))
    assert bench.fake.wait_for(wire.WorkerDied).worker == name


@pytest.mark.parametrize(
    ("by_user", "by_coordinator"), [("0.6", None), ("0.6", 1000.0), (None, 0.6)], ids=["user", "both", "coordinator"]
)
def test_silent_worker(bench: Bench, by_user: str | None, by_coordinator: float | None) -> None:
    bench.fake.worker_timeout = by_coordinator
    bench.make(**({} if by_user is None else {"worker_timeout": by_user}))
    bench.rendezvous()
    name = bench.spawn(0)
    with LocalWorker(name):
        death = bench.fake.wait_for(wire.WorkerDied)
        assert (death.worker, death.cause) == (name, "silent")
        assert bench.children[0].wait(30) == -9


def epoch(number: int, *members: str) -> wire.Epoch:
    listed = [wire.Member(worker=m, agent=m, node=m, host="h", local_rank=0) for m in members]
    about: dict[str, Any] = {"hold": False, "incident": None, "published_at": 0.0}
    return wire.Epoch(number=number, kind="fail", members=listed, store=wire.Address(host="h", port=1), **about)


def test_messages_find_their_worker(bench: Bench) -> None:
    bench.rendezvous()
    with LocalWorker(bench.spawn(0)) as worker:
        assert isinstance(worker.hear(), wire.Welcome)
        bench.fake.send(wire.Go(epoch=3))
        assert worker.hear() == wire.Go(epoch=3)
        worker.say(wire.Heartbeat())
        worker.say(wire.Lookup(worker=worker.name, key="k"))
        assert worker.hear() == wire.LookupReply(worker=worker.name, key="k", value="kept")
        first, second = epoch(1, worker.name, "b/0#1", "c/0#1"), epoch(2, worker.name, "c/0#1")
        change = change_of(first, second)
        assert change is not None
        bench.fake.send(change)
        assert bench.fake.wait_for(wire.EpochWanted).epoch == 0, "it has no base for the change"
        bench.fake.send(first)
        bench.fake.send(change)
        assert [worker.hear(), worker.hear()] == [first, second], "workers get the whole"


def test_strangers_and_garbage_are_refused(bench: Bench) -> None:
    bench.rendezvous()
    name = bench.spawn(0)
    with LocalWorker("somebody/0#1") as stranger:
        assert stranger.lines.readline() == b""
    with LocalWorker(name) as worker:
        assert isinstance(worker.hear(), wire.Welcome)
        worker.socket.sendall(b"garbage\n")
        assert worker.lines.readline() == b""


def test_what_is_said_while_the_coordinator_is_away(bench: Bench) -> None:
    first = FakeCoordinator()
    with first.serving():
        bench.fake = first
        bench.make()
        bench.rendezvous(size=2)
        doomed, name = bench.spawn(1, "import time; time.sleep(100)"), bench.spawn(0)
        worker = LocalWorker(name)
        with worker:
            assert isinstance(worker.hear(), wire.Welcome)
            first.answers = False
            worker.say(wire.Lookup(worker=name, key="k"))
            first.wait_for(wire.Lookup)
            port = first.port
    # `worker` has left: reconnect as the same worker while no server listens
    with LocalWorker(name) as worker:
        worker.say(wire.WorkerReady(worker=name, epoch=0, state={"step": 0}))
        worker.say(wire.WorkerEvent(worker=name, name="first", at=0.0, fields={}))
        worker.say(wire.Record(key="k", value="v"))
        worker.say(wire.Progress(worker=name, step=1, metrics={}))
        worker.say(wire.WorkerEvent(worker=name, name="second", at=0.0, fields={}))
        second = FakeCoordinator()
        with second.serving(port):
            second.wait_for(wire.WorkerEvent, lambda m: m.name == "second")
            register = second.registers[0]
            assert (register.round, register.granted, register.waiting) == (1, True, False)
            infos = {info.worker: info for info in register.workers}
            assert infos.keys() == {name, doomed}
            assert infos[name].ready == wire.WorkerReady(worker=name, epoch=0, state={"step": 0})
            kept = [m for _, m in second.said if isinstance(m, (wire.WorkerEvent, wire.Record))]
            assert [getattr(m, "name", "record") for m in kept] == ["first", "record", "second"]
            assert second.count(wire.Progress) == 0
            assert worker.hear() == wire.LookupReply(worker=name, key="k", value="kept")
            bench.handler.shutdown()
            second.wait_for(wire.Bye)


@pytest.mark.parametrize("others", [1, 0])
def test_success_without_a_coordinator_is_kept_for_the_next_where_others_may_run(bench: Bench, others: int) -> None:
    """The agent is granted a world of one, as the first of several is."""
    first, second = FakeCoordinator(), FakeCoordinator()
    with first.serving():
        agent, port = bench.granted(first, max_nodes=1 + others)
    until("the session is lost", lambda: agent.away_seconds() > 0.0)
    agent.say_bye(succeeded=True)
    ended = threading.Event()

    def serve_later() -> None:
        if others or not ended.wait(10.0):
            time.sleep(2.0)
            with second.serving(port):
                ended.wait(60.0)

    serving = threading.Thread(target=serve_later)
    serving.start()
    bench.handler.shutdown()
    assert [message for _, message in second.said if isinstance(message, wire.Bye)] == [
        wire.Bye(succeeded=True)
    ] * others
    ended.set()
    serving.join(60.0)


def test_success_reaches_a_coordinator_that_is_busy_after_its_start(bench: Bench) -> None:
    """An agent that closes its connection before its last messages are read loses them."""
    first, second = FakeCoordinator(), FakeCoordinator()
    with first.serving():
        agent, port = bench.granted(first)
    until("the session is lost", lambda: agent.away_seconds() > 0.0)
    agent.say_bye(succeeded=True)
    second.busy_seconds = 0.5
    with second.serving(port):
        bench.handler.shutdown()
        second.wait_for(wire.Bye, seconds=5.0)


def test_success_that_a_coordinator_did_not_answer_is_repeated_for_the_next(bench: Bench) -> None:
    first, second = FakeCoordinator(), FakeCoordinator()
    with first.serving():
        agent, port = bench.granted(first)
        first.answers = False
        agent.say_bye(succeeded=True)
        first.wait_for(wire.Bye)
        first.drop()
    with second.serving(port):
        bench.handler.shutdown()
        second.wait_for(wire.Bye, seconds=5.0)


def test_lookup_lost_with_the_connection_is_asked_again(bench: Bench) -> None:
    bench.rendezvous()
    with LocalWorker(bench.spawn(0)) as worker:
        assert isinstance(worker.hear(), wire.Welcome)
        bench.fake.answers = False
        worker.say(wire.Lookup(worker=worker.name, key="k"))
        bench.fake.wait_for(wire.Lookup)
        bench.fake.answers = True
        bench.fake.drop()
        assert worker.hear() == wire.LookupReply(worker=worker.name, key="k", value="kept")
        assert len(bench.fake.registers) == 2


def test_users_own_coordinator_is_not_replaced(bench: Bench, tmp_path: Path) -> None:
    own = FakeCoordinator()
    with own.serving():
        bench.fake = own
        handler = bench.make(embedded="true", state_dir=str(tmp_path / "state"))
        bench.rendezvous()
    agent: Any = handler._agent
    until("some attempts to reconnect", lambda: agent.away_seconds() > 1.0)
    assert not list((tmp_path / "state").glob("coordinator*"))


def test_store_use_is_told_once(bench: Bench) -> None:
    bench.rendezvous()
    store: Any = bench.handler._store
    client = dist.TCPStore(store.address.host, store.address.port, is_master=False)
    client.set("key", "value")
    assert bench.fake.wait_for(wire.StoreUsed).round == 1
    time.sleep(0.6)  # two more checks
    assert bench.fake.count(wire.StoreUsed) == 1


def test_task_over_while_waiting(bench: Bench) -> None:
    bench.rendezvous()
    bench.fake.answers = False
    bench.fake.send(wire.TaskOver(succeeded=True))
    with pytest.raises(SystemExit) as end:
        bench.handler.next_rendezvous()
    assert end.value.code == 0


def test_refused(bench: Bench) -> None:
    bench.fake.refuse = "no room for task 'task'"
    with pytest.raises(RendezvousFailed, match="no room for task 'task'"):
        bench.handler.next_rendezvous()


def test_refused_later_stops_the_workers(bench: Bench) -> None:
    bench.rendezvous()
    bench.fake.refuse = "forgotten"
    bench.fake.drop()
    until("the workers are to stop", bench.handler.num_nodes_waiting)
    with pytest.raises(RendezvousFailed, match="forgotten"):
        bench.handler.next_rendezvous()


def test_a_coordinator_that_cannot_be_started_again_ends_no_training(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "coordinator.sqlite").mkdir()  # no database can be opened there
    first = FakeCoordinator()
    with first.serving():
        bench.fake = first
        handler = bench.make(embedded="true", state_dir=str(tmp_path / "state"))
        bench.rendezvous()
        name = bench.spawn(0)
        agent: Any = handler._agent
        agent._embedded.met = lambda **_: None  # as if it had been started by an agent
        agent._embedded._foreign = False
        port = first.port
    log = tmp_path / "state" / "coordinator.log"
    until("two failed starts", lambda: log.exists() and log.read_text().count("unable to open database file") >= 2)
    assert "Traceback" not in log.read_text()
    assert handler.num_nodes_waiting() == 0 and agent.view.fatal is None
    assert bench.children[0].poll() is None
    second = FakeCoordinator()
    with second.serving(port):
        until("the agent is back", lambda: second.registers)
        assert [info.worker for info in second.registers[0].workers] == [name]
        started = [process.pid for process in agent._embedded._processes]
        handler.shutdown()
    for pid in started:  # one may still be on its way to its error; an agent's own end would leave it to init
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.mark.parametrize(("seconds", "answers"), [(30.0, []), (0.1, []), (30.0, [False, True])])
def test_a_first_coordinator_that_cannot_be_started_is_an_error_at_once(
    seconds: float, answers: list[bool], bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its process takes longer than expected to come up, on a busy machine, or is seen to listen before it
    fails: it is not started twice.
    """
    monkeypatch.setattr(embedded, "START_SECONDS", seconds)
    first, look = iter(answers), embedded.EmbeddedCoordinator._answers

    async def answering(coordinator: embedded.EmbeddedCoordinator) -> bool:
        known = next(first, None)
        return await look(coordinator) if known is None else known

    monkeypatch.setattr(embedded.EmbeddedCoordinator, "_answers", answering)
    (tmp_path / "coordinator.sqlite").mkdir()
    with FakeCoordinator().serving() as gone:
        bench.fake = gone
    bench.make(embedded="true", state_dir=str(tmp_path), connect_timeout="1000")
    with pytest.raises(RendezvousFailed, match=r"(?s)could be started: .*unable to open database file"):
        bench.rendezvous()
    assert (tmp_path / "coordinator.log").read_text().count("unable to open database file") == 1
