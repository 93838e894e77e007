"""The rendezvous handler for ``torchrun --rdzv-backend unicron``: torchelastic's side of the agent.

torchelastic calls `next_rendezvous` before each start of its workers and `num_nodes_waiting` ten times a second
while they run. Failures of workers elsewhere do not concern it, so `num_nodes_waiting` is 0 unless the coordinator
orders a stop.

A TCPStore server is opened for every round. Keys of an earlier round would make torch's ``env://`` rendezvous hang, and
a peer that still uses an earlier round's store must not meet the present one.

**Environment.** NCCL and torch's process group need some variables for workers that recover, each with its reason.
The agent sets them, whatever the user has set: with other values survivors of a failure are killed or hang. A user's
contrary value is named in a warning. Sources: torch's ProcessGroupNCCL, NCCL 2.28.9.

**Console.** Workers may show progress bars on the agent's console. A bar leaves the cursor at the end of its line,
which a warning of the agent, such as ``agent_departs``, would continue.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, Final, TextIO

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from typing_extensions import override

from unicron_lightning import environ, wire
from unicron_lightning.agent import options as agent_options
from unicron_lightning.agent.agent import AgentThread
from unicron_lightning.agent.options import LeaveNotices
from unicron_lightning.agent.round_view import RoundView
from unicron_lightning.agent.signals import Departure, SignalWatch, clean_exit_on_sigterm, held_signals
from unicron_lightning.agent.workers.forked import PreparedStarts
from unicron_lightning.agent.workers.slot_lock import SlotLock
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError

logger = logging.getLogger(__name__)


class _FreshLines(logging.StreamHandler[TextIO]):
    """Prints warnings to standard error, each on a line of its own.

    On a terminal the bar's line is erased; the bar writes it again. In a file the bar's line ends before the warning.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.WARNING)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, with what ends the line before it."""
        return f"{_begin(self.stream)}{super().format(record)}"


def install_fresh_lines() -> None:
    """Make `_FreshLines` print what no handler of the user's does. Idempotent."""
    if environ.LOGS not in os.environ and not isinstance(logging.lastResort, _FreshLines):  # workers print elsewhere
        logging.lastResort = _FreshLines()


def _begin(stream: TextIO) -> str:
    return "\r\x1b[K" if stream.isatty() else "\n"


REQUIRED: Final[Mapping[str, tuple[str, str]]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        "0",
        "torch's watchdog would end the survivors of a failure",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (
        "0",
        "a wait would block in the library until its time-out, out of an abort's reach",
    ),
    "TORCH_NCCL_ENABLE_MONITORING": (
        "0",
        "torch's monitor ends a process minutes after another one has noted an error in the shared store",
    ),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": (
        "0",
        "a watchdog that sees an error would note it in the shared store, for the monitors of joiners to read",
    ),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": (
        "1",
        "groups made lazily, such as Megatron's, could not be aborted while they are being connected",
    ),
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": (
        "60",
        "[s] bounds how long a thread waits for a connection to a dead peer; torch's default is 30 minutes",
    ),
    "NCCL_RUNTIME_CONNECT": (
        "0",
        "an epoch's first large collective would connect its peers on the training thread, and fail if one is late",
    ),
    "NCCL_NVLS_ENABLE": (
        "0",
        "NVLink SHARP's multicast memory is shared by the ranks of a machine and does not survive one rank's abort",
    ),
}
"""Value and reason, by name."""

REFUSED: Final[Mapping[str, tuple[str, str | None, str]]] = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "INFO", "DETAIL turns torch's error handling on again"),
    "NCCL_COMM_BLOCKING": ("1", None, "a connection to a dead peer could not be aborted"),
    "NCCL_CUMEM_ENABLE": (
        "0",
        None,
        "NCCL's older way to share memory frees it only when all kernels of the device end",
    ),
    "CUDA_LAUNCH_BLOCKING": ("1", None, "the start of a reduction would wait for all workers, out of an abort's reach"),
    "TORCH_DIST_USE_NCCL2": ("1", None, "recovery has been written for torch's first ProcessGroupNCCL only"),
}
"""Refused value, its replacement (None: the variable is removed) and the reason, by name."""

LIMITS: Final = frozenset({"TORCH_NCCL_NONBLOCKING_TIMEOUT"})
"""Of the required variables those with a limit, of which a user may set a greater one."""


def settle(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables.

    Args:
        environment: environment of the agent, which its workers inherit; changed in place.

    Returns:
        A sentence for each value of the user's that was replaced.
    """
    replaced = []
    for name, (value, reason) in REQUIRED.items():
        given = environment.get(name)
        if name in LIMITS and given is not None and given.isdecimal() and int(given) > int(value):
            continue
        if given not in (None, value):
            replaced.append(f"{name}={given}: set to {value}, since {reason}")
        environment[name] = value
    for name, (refused, other, reason) in REFUSED.items():
        given = environment.get(name, "")
        if given.upper() != refused:
            continue
        if other is None:
            del environment[name]
        else:
            environment[name] = other
        replaced.append(f"{name}={given}: {'removed' if other is None else f'set to {other}'}, since {reason}")
    return replaced


_BACKLOG: Final = 4096


class _RoundStore:
    """A store server of this process, open until `close`.

    Args:
        host: address of this machine for other workers; the only one that is listened on, if possible.
        timeout: time limit of blocking operations.
    """

    def __init__(self, host: str, timeout: timedelta = timedelta(seconds=300)) -> None:
        listener = listen(host)
        port = int(listener.getsockname()[1])
        # The store takes over the descriptor and closes it with the server.
        self._store: dist.TCPStore | None = dist.TCPStore(
            host_name=listener.getsockname()[0] if listener.getsockname()[0] not in ("0.0.0.0", "::") else host,
            port=port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
        self.address = wire.Address(host=host, port=port)

    def num_keys(self) -> int:
        """Return the number of keys in the store; 0 if it is closed."""
        store = self._store
        return 0 if store is None else int(store.num_keys())

    def num_clients(self) -> int:
        """Return the number of connections from other processes to the server."""
        if self._store is None:
            return 0
        connections = psutil.Process().net_connections("tcp")
        own = {_plain(each.laddr) for each in connections}
        served = [each for each in connections if each.status == psutil.CONN_ESTABLISHED]
        return sum(each.laddr.port == self.address.port and _plain(each.raddr) not in own for each in served)

    def close(self) -> None:
        """Close the server; its port is free when this returns."""
        self._store = None


def _plain(address: Any) -> tuple[str, int]:
    """Return an address with IPv4 written the same way on sockets of both families."""
    return str(address.ip).removeprefix("::ffff:"), int(address.port)


def listen(host: str) -> socket.socket:
    """Listen on a free port of ``host``, or on all addresses if it does not belong to this machine (NAT)."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    logger.warning("listens_everywhere host=%s reason='not an address of this machine'", host)
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen(_BACKLOG)
    return listener


BACKEND: Final = "unicron"
_SLOT_POLL_SECONDS: Final = 0.05


class RendezvousFailed(RendezvousConnectionError, UnicronError):
    """The agent can't take part; the message gives the reason."""


class UnicronRendezvousHandler(RendezvousHandler):
    """Rendezvous by the coordinator's decision alone: no agent waits for another.

    Args:
        parameters: torchrun's options.

    Raises:
        ConfigError: one of the options is wrong.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._backend = parameters.backend
        self._options = agent_options.from_parameters(parameters)
        self._agent: AgentThread | None = None
        self._signals: SignalWatch | None = None
        self._departure: Departure | None = None
        self._notices: LeaveNotices | None = None
        self._store: _RoundStore | None = None
        slot = self._options.slot
        self._lock = None if slot is None else SlotLock(self._options.node, slot)
        self._closed = False
        self._hidden: str | None = None
        self._prepared: PreparedStarts | None = None

    @override
    def get_backend(self) -> str:
        return self._backend

    @override
    def get_run_id(self) -> str:
        return self._options.task

    @property
    @override
    def use_agent_store(self) -> bool:
        """True: ``env://`` makes every worker a client of the round's store, which is always fresh."""
        return True

    @override
    def is_closed(self) -> bool:
        return self._closed

    @override
    def set_closed(self) -> None:
        self._closed = True

    @override
    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers must stop and rendezvous again, else 0. Never blocks.

        Once workers train, later starts are prepared.

        Raises:
            SignalException: torchelastic's, if the workers of an agent that got SIGTERM have not left in time.
        """
        agent = self._agent
        if agent is None:
            return 0
        if self._departure is not None:
            self._departure.review()
        view = agent.view
        if self._options.prepare and self._prepared is None and view.set_by_script is not None and view.over is None:
            self._prepare(agent)
        return int(view.stop is not None or view.fatal is not None)

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the coordinator grants this agent's slot, or has its workers started warm without one.

        Raises:
            RendezvousFailed: the coordinator refuses this agent or can't be reached.
            SystemExit: the task has ended (code 0: successfully), or this agent was asked to end (code 0: its workers
                have left, and the others continue).
        """
        if self._departure is not None and self._departure.begun:
            assert self._agent is not None
            stop = self._agent.view.stop
            raise SystemExit(0 if stop is not None and not stop.needed else 128 + self._departure.begun)
        with clean_exit_on_sigterm():
            agent = self._agent or self._start()
            number, grant = self._begin_round(agent)
            while not (grant.warm or self._slot_is_ours(agent)):
                number, grant = self._begin_round(agent)
        logger.info("granted task=%s round=%d group_rank=%d of %d warm=%s", self._options.task, number,
                    grant.group_rank, grant.group_world, grant.warm)  # fmt: skip
        self._prepare_environment(agent, number)
        return RendezvousInfo(
            store=self._rank_store(agent, grant),  # type: ignore[arg-type] # every method that torchelastic calls exists
            rank=grant.group_rank,
            world_size=grant.group_world,
            bootstrap_store_info=RendezvousStoreInfo(master_addr=grant.master.host, master_port=grant.master.port),
        )

    @override
    def shutdown(self) -> bool:
        """End the agent and remove all its resources. Also runs at the interpreter's exit, as torchelastic may
        skip it.
        """
        if self._notices is not None:
            self._notices.close()
            self._notices = None
        departs = False
        if self._departure is not None:  # before signals are held, which restores the handlers that it finds
            departs = bool(self._departure.begun)
            self._departure.close()
            self._departure = None
        with held_signals():
            self._shut_down(departs=departs)
        return True

    def _shut_down(self, *, departs: bool) -> None:
        atexit.unregister(self.shutdown)
        self._closed = True
        agent, self._agent = self._agent, None
        if agent is not None:
            if agent.failed and not departs:  # else its workers were stopped on order
                logger.warning(
                    "agent_ends reason='a worker failed and torchrun --max-restarts allows no more restarts'"
                )
            agent.leaving()
            agent.say_bye(succeeded=False)  # a success was reported when the last worker had ended
            agent.close()
        if self._signals is not None:
            self._signals.close()
            self._signals = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None
        if self._lock is not None:
            self._lock.release()
        if self._hidden is not None:
            os.environ[environ.TOKEN], self._hidden = self._hidden, None

    def _start(self) -> AgentThread:
        install_fresh_lines()
        atexit.register(self.shutdown)  # first: a signal may end the process from here on
        agent = self._agent = AgentThread(self._options, self._num_keys, self._lock)
        self._departure = Departure(lambda: agent.may_depart, agent.depart, agent.leaving, self._options.leave_timeout)
        self._signals = SignalWatch(agent.leaving, self._departure)
        self._notices = LeaveNotices(self._options.leave_signal, self._options.notice_file)
        agent.start()
        logger.info("agent_started agent=%s task=%s endpoint=%s", self._options.agent, self._options.task,
                    self._options.endpoint)  # fmt: skip
        return agent

    def _prepare(self, agent: AgentThread) -> None:
        """Prepare later starts: workers' variables do not change any more."""
        environment = {name: value for name, value in os.environ.items() if name != environ.TOKEN}
        _settle(environment)
        self._prepared = PreparedStarts(
            environment, lambda: agent.view.set_by_script or (), lightning=agent.view.lightning
        )
        self._prepared.start()

    def _num_keys(self) -> int:
        store = self._store
        return 0 if store is None else store.num_keys()

    def _wait_for_grant(self, agent: AgentThread) -> wire.Grant:
        def decided(view: RoundView) -> wire.Grant | wire.TaskOver | CoordinatorUnavailable | None:
            if (away := agent.away_seconds()) > self._options.timeout:
                return CoordinatorUnavailable(
                    f"the coordinator at {self._options.endpoint} has been away for {away:.0f} s "
                    f"(--rdzv-conf timeout={self._options.timeout:g})"
                )
            return view.over or view.grant

        try:
            decision: Any = agent.wait(decided)
        except UnicronError as error:
            raise RendezvousFailed(str(error)) from None
        if isinstance(decision, wire.TaskOver):
            # The graceful exit that torchelastic offers ends in an AttributeError in its launcher.
            level = logging.INFO if decision.succeeded else logging.WARNING
            reason, *traceback = decision.reason.splitlines() or [""]
            logger.log(level, "%s", "\n".join([
                f"task_over task={self._options.task} succeeded={decision.succeeded} reason={reason!r}", *traceback
            ]))  # fmt: skip
            raise SystemExit(0 if decision.succeeded else 1)
        if isinstance(decision, CoordinatorUnavailable):
            raise RendezvousFailed(str(decision))
        assert isinstance(decision, wire.Grant)
        return decision

    def _begin_round(self, agent: AgentThread) -> tuple[int, wire.Grant]:
        old_store = self._store
        self._store = _RoundStore(self._options.host)
        number = agent.begin_round(self._store.address)
        if old_store is not None:
            old_store.close()
        return number, self._wait_for_grant(agent)

    def _slot_is_ours(self, agent: AgentThread) -> bool:
        """Wait until no other agent on this machine has workers in the slot; False if the grant is taken back first."""
        waits = False
        while self._lock is not None and not self._lock.acquire():
            if not waits:
                waits = True
                logger.warning("slot_in_use slot=%s pid=%s", self._options.slot, self._lock.holder())
            if agent.wait(lambda view: view.stop or view.over or view.fatal, _SLOT_POLL_SECONDS):
                return False
        return True

    def _prepare_environment(self, agent: AgentThread, number: int) -> None:
        """Set the environment that the workers inherit from this process."""
        options = self._options
        # Scripts do not need the token, and their children and output must not contain it.
        self._hidden = os.environ.pop(environ.TOKEN, self._hidden)
        os.environ.update(
            {
                environ.AGENT_SOCKET: str(agent.socket_path),
                environ.AGENT: options.agent,
                environ.AGENT_PID: str(os.getpid()),
                environ.ROUND: str(number),
                environ.TASK: options.task,
                environ.NODE: options.node,
                environ.MAX_NODES: str(options.max_nodes),
                environ.HOST: options.host,
                # With it torchelastic would compute ranks from equal local world sizes and not ask.
                "TORCH_ELASTIC_WORKER_IDENTICAL": "0",
            }
        )
        for replaced in _settle(os.environ):
            logger.warning("environment_replaced %s", replaced)

    def _rank_store(self, agent: AgentThread, grant: wire.Grant) -> RankStore:
        def ranks_of(local_world: int) -> tuple[int, int]:
            agent.announce_local_world(local_world)
            answer: Any = None
            if not grant.warm:
                answer = agent.wait(lambda view: view.ranks or view.stop or view.over, self._options.timeout)
            if isinstance(answer, wire.Ranks):
                base, world = answer.base, answer.world
            else:  # stopped workers take any ranks; warm ones get theirs later
                base, world = grant.group_rank * local_world, grant.group_world * local_world
            os.environ[environ.BASE_RANK] = str(base)
            return base, world

        def finish(seconds: float) -> None:
            agent.leaving()
            agent.say_bye(succeeded=True)
            # Other agents' workers may use this agent's store until they exit.
            agent.wait(lambda view: view.over or view.fatal or self._store_unused(), seconds)

        return RankStore(grant.group_rank, ranks_of, finish)

    def _store_unused(self) -> bool | None:
        return None if self._store is not None and self._store.num_clients() else True


def _settle(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables that all workers need; return a sentence for each value of the user's that was replaced."""
    replaced = settle(environment)
    if not torch.accelerator.is_available():
        for name in environ.KEEP_FREED:
            environment.setdefault(name, environ.MALLOC_THRESHOLD)
    return replaced


_ROLE_INFO: Final = "torchelastic/role_info/"
_ASSIGNED_RANKS: Final = "torchelastic/assigned_ranks/"
EXIT_BARRIER: Final = "torchelastic/agent/terminal_state"


class RankStore:
    """The store that torchelastic's agent gets from the rendezvous: answers the requests of one round.

    torchelastic makes all agents meet over this store to agree on ranks, and again at the end. Here both are the
    coordinator's decision, and no agent ever waits for another one. The store is an object of this process that answers
    the few keys that torchelastic uses. It relies on these calls (torch 2.11 to 2.13, ``elastic/agent/server/api.py``):

    * ``set("torchelastic/role_info/<group rank>")`` with the local world size, then
      ``get("torchelastic/assigned_ranks/<group rank>")``, answered ``[base global rank, world size, base role rank,
      role world size]``; in group rank 0, between the two, a ``multi_get`` of all role infos and a ``multi_set`` of all
      assigned ranks;
    * ``add("torchelastic/agent/terminal_state/num_members", 1)`` and ``wait`` as the barrier at the end, only entered
      when all local workers have succeeded.

    Args:
        group_rank: rank of this agent.
        ranks_of: given the local world size, returns (first global rank, world size); may block.
        finish: called when all local workers have succeeded; returns when the agent may exit.
    """

    def __init__(
        self, group_rank: int, ranks_of: Callable[[int], tuple[int, int]], finish: Callable[[float], None]
    ) -> None:
        self.timeout = timedelta(seconds=300)
        self._group_rank = group_rank
        self._ranks_of = ranks_of
        self._finish = finish
        self._role_info: bytes | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of `wait`."""
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        """Record the role info of this agent."""
        if key == f"{_ROLE_INFO}{self._group_rank}":
            self._role_info = value if isinstance(value, bytes) else str(value).encode()
        elif not key.startswith(EXIT_BARRIER):
            raise _unknown("set", key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return this agent's role info for each key: the ranks that group rank 0 computes from them are not used."""
        for key in keys:
            if not key.startswith(_ROLE_INFO) or self._role_info is None:
                raise _unknown("multi_get", key)
        assert self._role_info is not None or not keys
        return [self._role_info or b""] * len(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Ignore the ranks that group rank 0 assigned."""
        for key in keys:
            if not key.startswith(_ASSIGNED_RANKS):
                raise _unknown("multi_set", key)

    def get(self, key: str) -> bytes:
        """Return the coordinator's ranks."""
        if key != f"{_ASSIGNED_RANKS}{self._group_rank}" or self._role_info is None:
            raise _unknown("get", key)
        base, world = self._ranks_of(int(json.loads(self._role_info)["local_world_size"]))
        return json.dumps([base, world, base, world]).encode()

    def add(self, key: str, amount: int) -> int:
        """Enter the barrier at the end; never as its last member, so that `wait` is called."""
        if not key.startswith(EXIT_BARRIER):
            raise _unknown("add", key)
        return 0

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait in the barrier at the end."""
        for key in keys:
            if not key.startswith(EXIT_BARRIER):
                raise _unknown("wait", key)
        self._finish((timeout or self.timeout).total_seconds())


def _unknown(method: str, key: str) -> UnicronError:
    return UnicronError(
        f"torchelastic called store.{method} with the unknown key {key!r}: this version of torch is not supported"
    )
