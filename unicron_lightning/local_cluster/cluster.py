"""`LocalCluster`: nodes of this machine that run a task or wait for jobs, and a coordinator. Guide:
docs/faults.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import selectors
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeVar

import psutil  # type: ignore[import-untyped]

from unicron_lightning import environ
from unicron_lightning.cli.client import fetch, quoted
from unicron_lightning.credentials import Token
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable
from unicron_lightning.local_cluster import processes
from unicron_lightning.local_cluster.processes import ProbedT, Processes, free_port, kill, tied
from unicron_lightning.private_files import RECORD
from unicron_lightning.tls import Access

logger = logging.getLogger(__name__)


class Proxy:
    """Forwards from `port` to another port of this machine, in a thread.

    While it is cut, sent data stays in the sockets, and new connections are accepted but not served: no end is
    notified. Once healed, it delivers all data. It forwards until it is closed.

    Args:
        target: port to forward to.

    Attributes:
        port: listening port.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._cut = False
        self._ends: dict[socket.socket, socket.socket] = {}
        self._unserved: list[socket.socket] = []
        self._break = self._closed = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._thread.join()
        for end in (*self._ends, *self._unserved, self._listener):
            end.close()

    def cut(self) -> None:
        """Stop forwarding."""
        self._cut = True

    def heal(self) -> None:
        """Forward again."""
        self._cut = False

    def reset(self) -> None:
        """Break all connections at once; new ones are served."""
        self._break = True

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed:
                if self._break:
                    self._break = False
                    while self._ends:
                        end = next(iter(self._ends))
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        self._drop(selector, end)
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._listener:
                        self._unserved.append(self._listener.accept()[0])
                    elif not self._cut and key.fileobj in self._ends:
                        self._forward(selector, key.fileobj)
                if not self._cut:
                    self._serve(selector)
                elif self._ends:  # unread data stays readable: avoid spinning
                    threading.Event().wait(0.01)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for near in self._unserved:
            try:
                far = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                self._ends[one] = other
                selector.register(one, selectors.EVENT_READ)
        self._unserved.clear()

    def _forward(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._ends[end].sendall(data)
                return
        except OSError:
            pass
        self._drop(selector, end)

    def _drop(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        other = self._ends.pop(end, None)
        for one in (end, other):
            if one is not None:
                self._ends.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    selector.unregister(one)
                one.close()


C = TypeVar("C", bound="LocalCluster")

_HOST: Final = "127.0.0.1"
_START_SECONDS: Final = 60.0
_COORDINATOR: Final = "coordinator"


class LocalCluster:
    """A coordinator and nodes on this machine, for a ``with`` block or between `start` and `close`.

    With a ``command``, each node is a torchrun agent of one task that runs it. Without one, each node is a daemon, as
    started by ``unicron agent``, and tasks are submitted. All links are on the loopback interface, with a token of the
    cluster's own. Processes end with the thread that started them, by whatever cause.

    Args:
        command: the words that follow torchrun's options: a script, or ``-m`` and a module, and its arguments.
        nodes: number of nodes, called node0, node1, ...; or their labels.
        workers_per_node: workers of each torchrun agent; or, without a command, slots of each node.
        nnodes: as torchrun's option, e.g. ``"2:4"``; default: from 1 to the number of nodes.
        task: its name.
        max_restarts: as torchrun's option.
        coordinator: options of the coordinator, e.g. ``["detection.beat=0.5"]``, which is then a process of its own;
            None: the agents start one and restart it when it dies.
        conf: further keys of ``--rdzv-conf``.
        environment: variables of all processes beside those of this process.
        folder: for logs, the coordinator's state, and jobs' outputs; default: a temporary one, which is removed unless
            the ``with`` block raises.
        state_dir: of the coordinator; default: ``state`` in the folder.
        separable: whether each node reaches the coordinator through a proxy of its own, so that `cut` works.
        beside: a started cluster whose coordinator is used, for a second task.
        stop_seconds: time between SIGTERM and SIGKILL at the end.

    Attributes:
        folder: as above.
        state_dir: as above.
        port: of the coordinator.
        agents: the newest agent or daemon of each node.
    """

    def __init__(
        self,
        command: Sequence[str | Path] | None = None,
        *,
        nodes: int | Sequence[str] = 1,
        workers_per_node: int = 1,
        nnodes: str | None = None,
        task: str = "task",
        max_restarts: int = 1000,
        coordinator: Sequence[str] | None = None,
        conf: Mapping[str, object] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({"OMP_NUM_THREADS": "1"}),
        folder: Path | None = None,
        state_dir: Path | None = None,
        separable: bool = False,
        beside: LocalCluster | None = None,
        stop_seconds: float = 20.0,
    ) -> None:
        if command is not None and (isinstance(command, str) or not command):
            raise ConfigError(f'LocalCluster({command!r}): expected a sequence of words, e.g. ["train.py", "--fast"]')
        if coordinator is None and command is None:
            coordinator = ()
        if separable and coordinator is None:
            raise ConfigError("separable=True: expected coordinator=[...], a coordinator of its own behind the proxies")
        self.task = task
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._command = command
        self._labels = [f"node{place}" for place in range(nodes)] if isinstance(nodes, int) else list(nodes)
        self._workers = workers_per_node
        self._nnodes = nnodes or f"1:{max(1, len(self._labels))}"
        self._max_restarts = max_restarts
        self._overrides, self._beside = coordinator, beside
        self._conf = dict(conf)
        self._proxies: dict[str, Proxy] | None = {} if separable else None
        self._stop_seconds = stop_seconds
        self._made = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="unicron-cluster-")) if folder is None else folder.absolute()
        if beside is None:
            # Folders of agents are below it: a killed one cannot remove its own. A short path, for UNIX sockets.
            self.temporary = Path(tempfile.mkdtemp(prefix="unicron-"))
            self.state_dir = state_dir or self.folder / "state"
            self.port = free_port() if coordinator is None else 0
            self.access = Access(token=Token(secret=secrets.token_hex(32), origin="the local cluster"))
        else:
            self.temporary, self.state_dir = beside.temporary, beside.state_dir
            self.port, self.access = beside.port, beside.access
        own = {environ.TOKEN: self.access.token.secret, "TMPDIR": str(self.temporary)}
        self.processes = Processes(self.folder, {**environment, **own})

    # ---- life

    def __enter__(self: C) -> C:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep=error is not None)

    def start(self: C) -> C:
        """Start the coordinator, if it is a process of its own, and the nodes.

        Raises:
            CoordinatorUnavailable: the coordinator does not start; the message has the end of its log.
        """
        try:
            if self._overrides is not None and self._beside is None:
                self.start_coordinator()
            for node in self._labels:
                self.start_node(node)
        except BaseException:
            self.close(keep=True)
            raise
        return self

    def close(self, *, keep: bool = False) -> None:
        """Stop everything that was started.

        Args:
            keep: whether to keep a folder that was made for this cluster.
        """
        self.processes.stop(self._stop_seconds)
        for proxy in (self._proxies or {}).values():
            proxy.close()
        if self._beside is None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        if self._made and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif self._made:
            logger.warning("local_cluster_kept folder=%s", self.folder)

    def start_coordinator(self) -> None:
        """Start the coordinator; an earlier one has ended. It keeps its port and its state.

        Raises:
            CoordinatorUnavailable: it does not start; the message has the end of its log.
        """
        process = self.processes.start(_COORDINATOR, self._coordinator_command())

        def answers() -> bool:
            if process.poll() is not None:
                end = self.log(_COORDINATOR)[-2000:].strip()
                raise CoordinatorUnavailable(f"the coordinator exited with status {process.returncode}: {end}")
            return self.coordinator() == process.pid

        self.until("the coordinator", answers, _START_SECONDS)
        self.port = int(self._announcement()["port"])

    def start_node(self, node: str, *options: str, port: int | None = None, **environment: str) -> float:
        """Start a node's agent or daemon, an earlier one of which has ended; return the time of it.

        Args:
            node: its label.
            options: further options of torchrun or ``unicron agent``, before which they take precedence.
            port: of a process that forwards to the coordinator.
            environment: further variables.
        """
        if node in self.agents and self.agents[node].poll() is None:
            raise ConfigError(f"start_node({node!r}): expected a node without a running agent")
        if port is None and self._proxies is not None:
            port = self._proxies.setdefault(node, Proxy(self.port)).port
        command = self._daemon_command if self._command is None else self._torchrun_command
        words = command(node, port, options)
        at = time.time()
        self.agents[node] = self.processes.start(f"agent-{node}", words, **environment)
        return at

    def add_node(self) -> str:
        """Start another node; return its label."""
        node = next(name for place in range(len(self.agents) + 1) if (name := f"node{place}") not in self.agents)
        self.start_node(node)
        return node

    def submit(self, name: str, command: Sequence[str | Path], **fields: Any) -> None:
        """Submit a job to the daemons.

        Args:
            name: of its task.
            command: the script and its arguments.
            fields: other fields of a job, as in the file for ``unicron submit``.

        Raises:
            UnicronError: the coordinator refuses it.
        """
        job = {"name": name, "command": [str(word) for word in command], **fields}
        self.fetch("/v1/jobs", method="POST", body=job)

    # ---- faults and orders

    def kill_worker(self, node: str, local_rank: int = 0, number: int = signal.SIGKILL) -> float:
        """Send a signal to a worker, e.g. SIGKILL, or SIGSTOP and later SIGCONT; return the time of it."""
        workers = self.workers(node)
        if local_rank not in workers:
            raise ConfigError(f"kill_worker({node!r}, {local_rank}): expected one of {sorted(workers)}")
        return _sent(workers[local_rank], number)

    def kill_agent(self, node: str, number: int = signal.SIGKILL) -> float:
        """Send a signal to a node's agent or daemon, with which its workers die; return the time of it."""
        at = _sent(self.agents[node].pid, number)
        if number == signal.SIGKILL:
            self.agents[node].wait()
        return at

    def kill_node(self, node: str) -> float:
        """Send SIGKILL to all processes of a node, as a power failure would; return the time of it."""
        at, agent, spared = time.time(), self.agents[node], self.coordinator()
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(agent.pid)
            first.suspend()
            # An agent that started the coordinator is its parent.
            below = [process.pid for process in first.children(recursive=True) if process.pid != spared]
            # Stopped first: at the first death the kernel sends SIGTERM to others, which would leave in order.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in (agent.pid, *below):
                    kill(pid, number)
        agent.wait()
        return at

    def kill_coordinator(self, number: int = signal.SIGKILL) -> float:
        """Send a signal to the coordinator; return the time of it."""
        pid = self.coordinator()
        if pid is None:
            raise CoordinatorUnavailable("no coordinator runs")
        at = _sent(pid, number)
        own = self.processes.started.get(_COORDINATOR)
        if number == signal.SIGKILL and own is not None:
            own.wait()
        return at

    def cut(self, node: str) -> None:
        """Stop forwarding between a node and the coordinator; no end is notified."""
        self._proxy(node).cut()

    def heal(self, node: str) -> None:
        """Forward again, also everything sent meanwhile."""
        self._proxy(node).heal()

    def reset(self, node: str) -> None:
        """Break a node's connections to the coordinator; new ones are served."""
        self._proxy(node).reset()

    def inject(self, fault: str) -> None:
        """Inject a fault into the task, e.g. ``kill node=node1 step=20``: see docs/faults.md."""
        self.fetch(f"/v1/tasks/{quoted(self.task)}/inject", method="POST", body={"fault": fault})

    def drain(self, node: str) -> None:
        """Remove a node's workers at the next step boundary."""
        self.fetch(f"/v1/nodes/{quoted(node)}/drain", method="POST")

    def undrain(self, node: str) -> None:
        """Allow workers on a node again."""
        self.fetch(f"/v1/nodes/{quoted(node)}/undrain", method="POST")

    def unicron(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command ``unicron`` against this cluster."""
        command = tied("unicron_lightning.cli", *words, "--endpoint", self.endpoint)
        return subprocess.run(
            command, env=self.processes.environment, capture_output=True, text=True, timeout=60, check=False
        )

    # ---- observations

    @property
    def endpoint(self) -> str:
        """``HOST:PORT`` of the coordinator."""
        return f"{_HOST}:{self.port}"

    def fetch(self, path: str, **options: Any) -> Any:
        """Send a query or an order to the coordinator, as `unicron_lightning.cli.client.fetch` does."""
        return fetch(self.endpoint, path, self.access, **options)

    def status(self) -> dict[str, Any]:
        """Return the coordinator's answer to ``/v1/status``."""
        return dict(self.fetch("/v1/status"))

    def task_status(self, task: str | None = None) -> dict[str, Any]:
        """Return a task's part of the status; empty if the coordinator is away or does not know the task."""
        try:
            return dict(self.status()["tasks"].get(task or self.task, {}))
        except CoordinatorUnavailable:
            return {}

    def workers(self, node: str) -> dict[int, int]:
        """Return the processes of a node's workers by local rank."""
        found: dict[int, int] = {}
        inside = {process.pid: process for process in self.processes.alive()}
        for process in inside.values():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                parent = inside.get(process.ppid())
                if variables.get(environ.NODE) != node or (parent and environ.NODE in parent.environ()):
                    continue  # another node's, or a child of a worker
                found[int(variables["LOCAL_RANK"])] = process.pid
        return dict(sorted(found.items()))

    def coordinator(self) -> int | None:
        """Return the coordinator's process, None if it does not run."""
        pid = self._announcement().get("pid")
        return pid if pid is not None and processes.lives(pid) else None

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the event log, also without a running coordinator, as dicts of at, name, task, incident and fields.

        With a command, only events of this task and of no task.
        """
        only = None if self._command is None else self.task
        path = self.state_dir / "coordinator.sqlite"
        if not path.exists():
            return []
        query = "SELECT at, name, task, incident, fields FROM events WHERE ? IS NULL OR coalesce(task, ?) = ?"
        with contextlib.closing(sqlite3.connect(path, timeout=10)) as database:
            if not database.execute("SELECT name FROM sqlite_master WHERE name = 'events'").fetchall():
                return []  # a coordinator that starts has made the file, and no table yet
            rows = database.execute(f"{query} ORDER BY seq", [only] * 3).fetchall()
        keys = ("at", "name", "task", "incident")
        return [
            {**dict(zip(keys, row[:-1], strict=True)), "fields": json.loads(row[-1])}
            for row in rows
            if name in (None, row[1])
        ]

    def log(self, node: str) -> str:
        """Return the output of a node's agent and, with a command, of its workers; or of the ``coordinator``."""
        paths = [self.processes.log(node if node == _COORDINATOR else f"agent-{node}")]
        if node == _COORDINATOR:
            paths.append(self.state_dir / "coordinator.log")
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    # ---- waits

    def until(self, what: str, probe: Callable[[], ProbedT | None], seconds: float = 120.0) -> ProbedT:
        """Wait until ``probe`` returns a true value, and return it.

        Raises:
            TimeoutError: it did not within ``seconds``; the message has ``what`` and the folder of the logs.
        """
        return processes.until(f"{what}; logs are in {self.folder}", probe, seconds)

    def wait_step(self, step: int, seconds: float = 120.0, task: str | None = None) -> int:
        """Wait until a task has finished a step; return the number of its newest one."""

        def reached() -> int | None:
            progress = self.task_status(task).get("progress")
            return int(progress["step"]) if progress and progress["step"] >= step else None

        return self.until(f"step {step}", reached, seconds)

    def wait_workers(self, number: int, seconds: float = 120.0, task: str | None = None) -> list[str]:
        """Wait until a task trains with a number of workers; return their nodes by rank."""

        def there() -> list[str] | None:
            status = self.task_status(task)
            members = status.get("members", [])
            right = status.get("state") == "running" and len(members) == number
            return [member["node"] for member in members] if right else None

        return self.until(f"a world of {number}", there, seconds)

    def wait_state(self, state: str, seconds: float = 120.0, task: str | None = None) -> None:
        """Wait until a task has a state as in ``unicron status``, or a submitted job one as in ``unicron jobs``."""

        def reached() -> bool:
            if self._command is not None:
                return self.task_status(task).get("state") == state
            with contextlib.suppress(CoordinatorUnavailable):
                return any(
                    job["name"] == (task or self.task) and job["state"] == state for job in self.fetch("/v1/jobs")
                )
            return False

        self.until(f"{task or self.task}: {state}", reached, seconds)

    def wait_exit(self, seconds: float = 300.0) -> dict[str, int]:
        """Wait for the end of all agents; return their exit statuses by node."""
        self.until("the end of all agents", lambda: all(a.poll() is not None for a in self.agents.values()), seconds)
        return {node: agent.returncode for node, agent in self.agents.items()}

    # ---- commands

    def _coordinator_command(self) -> list[str]:
        fixed = ["coordinator.allow_injection=true", f"coordinator.port={self.port}"]
        own = [*fixed, f"store.state_dir={self.state_dir}", *(self._overrides or ())]
        return tied("unicron_lightning.coordinator", *own)

    def _torchrun_command(self, node: str, port: int | None, options: Sequence[str]) -> list[str]:
        assert self._command is not None
        conf = {"node": node, "state_dir": self.state_dir, "allow_injection": "true", **self._conf}
        if port is not None:
            conf["forwarded"] = "true"
        return tied(
            "torch.distributed.run",
            *("--rdzv-backend", "unicron", "--rdzv-endpoint", self._endpoint_of(port), "--rdzv-id", self.task),
            *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())),
            *("--nnodes", self._nnodes, "--nproc-per-node", str(self._workers)),
            *("--max-restarts", str(self._max_restarts), *options),
            *(str(word) for word in self._command),
        )

    def _daemon_command(self, node: str, port: int | None, options: Sequence[str]) -> list[str]:
        words = ["agent", "--endpoint", self._endpoint_of(port), "--node", node, "--slots", str(self._workers)]
        forwarded = [] if port is None else ["--forwarded"]
        return tied(
            "unicron_lightning.cli", *words, *forwarded, "--logs", str(self.processes.folder / "logs"), *options
        )

    def _endpoint_of(self, port: int | None) -> str:
        return self.endpoint if port is None else f"{_HOST}:{port}"

    def _announcement(self) -> dict[str, Any]:
        """Return the content of the coordinator's file about itself; empty if there is none yet."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads((self.state_dir / RECORD).read_text(encoding="utf-8")))
        return {}

    def _proxy(self, node: str) -> Proxy:
        if self._proxies is None:
            raise ConfigError(f"a link of {node!r} can't be cut: expected LocalCluster(..., separable=True)")
        return self._proxies[node]


def _sent(pid: int, number: int) -> float:
    at = time.time()
    kill(pid, number)
    return at
