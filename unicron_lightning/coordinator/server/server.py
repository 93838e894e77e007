"""The coordinator's shell: sockets, timers and the store around the pure `Machine`.

One asyncio loop, no threads. The machine decides, the store commits, then messages are sent: no process ever acts on a
decision that a restarted coordinator would not know. Inputs that arrive together form one transaction. While the store
cannot be written, recovery continues, orders are not confirmed, and decisions are kept and written later (`saving`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from aiohttp import WSCloseCode, WSMsgType, web

from unicron_lightning import __version__, wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.access import (
    BACKLOG,
    Guard,
    TlsDoor,
    UnprovenConnections,
    Visitors,
    bind,
    encryption_of,
    misplaced,
    resolve,
)
from unicron_lightning.coordinator.allocation.answers import Knowledge, Planning, keep
from unicron_lightning.coordinator.allocation.plans import standing
from unicron_lightning.coordinator.api.dashboard import Dashboard
from unicron_lightning.coordinator.api.routes import Api, Scrape
from unicron_lightning.coordinator.config import CoordinatorConfig
from unicron_lightning.coordinator.events import Question
from unicron_lightning.coordinator.machine import Machine, inputs_at_start
from unicron_lightning.coordinator.membership.daemons import key_of
from unicron_lightning.coordinator.membership.registration import registered
from unicron_lightning.coordinator.server import peers
from unicron_lightning.coordinator.server.batch import Batch, Hook, Saving
from unicron_lightning.coordinator.server.peers import (
    DirectWebSocket,
    FullCollections,
    PeerConnection,
    Presence,
    frame_of,
    request_logger,
)
from unicron_lightning.coordinator.server.timers import ANSWER, Liveness, SteadyClock, Timers
from unicron_lightning.coordinator.storage import Database, Store, StoreUnusable, prepare_state_dir
from unicron_lightning.credentials import Token, is_loopback
from unicron_lightning.jobs import problem
from unicron_lightning.private_files import RECORD, default_state_dir, open_private
from unicron_lightning.wire.daemon import Launch, NodeHello, NodeRun, NodeTask, decode_from_node
from unicron_lightning.wire.fields import shortened

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_AHEAD_SECONDS = 3.0
_MOST_REST_SECONDS = 0.02


class Server:
    """One coordinator.

    Args:
        config: the whole configuration; the state directory is created.
        token: the token that clients must prove.
        store: where its state lasts, closed at the end; None: the database in the state directory.

    Attributes:
        deposed: reason why another coordinator leads, once one may; None before.
        gave_way: whether the reason is that no agent was heard.

    Raises:
        ConfigError: unusable address or state directory.
        StoreUnusable: the state directory or its database cannot be used, e.g. the disk is full.
        PortInUse: the address is taken.
    """

    _rests_until = 0.0
    """Loop time before which arrivals are not written, see `_take`."""

    def __init__(self, config: CoordinatorConfig, token: Token, store: Database | None = None) -> None:
        self._config = config
        host, port = config.coordinator.host, config.coordinator.port
        address = resolve(host, port)
        loopback = is_loopback(str(address[4][0]))
        self._encryption = encryption_of(config.coordinator, loopback=loopback)
        certificate = None if self._encryption is None else self._encryption.fingerprint
        # The port decides which of several coordinators runs: bind before touching the state.
        self._socket = bind(address)
        try:
            self.port: int = self._socket.getsockname()[1]
            self._guard = Guard(token, host if loopback else None, certificate, Visitors(f"unicron-{self.port}"))
            self.state_dir = (
                Path(config.store.state_dir) if config.store.state_dir else default_state_dir(host, self.port)
            )
            prepare_state_dir(self.state_dir)
            self.store = store or Store(self.state_dir, events_kept=config.store.events_kept)
        except BaseException:
            self._socket.close()
            raise
        try:
            self._limits = dataclasses.replace(config.limits(), secret=secrets.token_bytes(32))
            self.machine = Machine(self._limits, self.store.load())
        except sqlite3.Error as error:
            raise StoreUnusable(f"can't read {self.state_dir}: {error}") from error
        self._sessions: dict[int, PeerConnection] = {}
        self._timers = Timers(self.apply)
        silence = config.detection.silence()
        self._liveness = Liveness(silence, lambda conn: self._sessions[conn].abort(), self._timers, self._give_way)
        self._presence, self._garbage = Presence(), FullCollections()
        self._conn_ids = itertools.count(1)
        self._planning = Planning()
        self._door: TlsDoor | None = None
        self._look: asyncio.TimerHandle | None = None
        self._ahead: asyncio.TimerHandle | None = None
        self._batch = Batch()
        self._flushing = False
        self._stop = asyncio.Event()
        self._failed = False
        self.deposed: str | None = None
        self.gave_way = False
        self.store.watch(self._depose)
        self._clock = SteadyClock()
        self._hosts: dict[int, str] = {}
        self._node_orders = NodeOrders()
        self.started_at = time.time()
        own = config.coordinator
        self._hook = Hook(own.hook, own.hook_events, own.hook_seconds)
        self._scrape = Scrape(self)
        self._dashboard = Dashboard(self, self._guard.visitors, secure=certificate is not None)
        self._saving = Saving(self.store, lambda: self.machine, self._send_held, self._scrape.wrote)

    async def run(self) -> bool:
        """Serve until stopped by a signal or by having no work left.

        Returns:
            Whether it ended in order; False if the machine broke (a new process can continue from the last committed
            state).
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        app = Api(self, self._guard).app()
        app.router.add_get("/v1/agent", self._serve_agent)
        app.router.add_get("/v1/node", self._serve_node)
        app.router.add_get("/metrics", self._scrape.get)
        self._dashboard.add_routes(app)
        runner = web.AppRunner(
            app, logger=request_logger(), access_log=None, handle_signals=False, shutdown_timeout=1.0
        )
        await runner.setup()
        unproven = UnprovenConnections(runner, self._guard.proven)
        try:
            unproven.start()
            await self._open(runner)
            self._announce()
            self._note_set_aside()
            self._garbage.start()
            self._scrape.start()
            self.apply(ev.Started(about=self.about()))
            awaited = self.machine.cluster.nodes or any(task.restoring for task in self.machine.tasks.values())
            self._liveness.start(awaited=bool(awaited))
            for event in inputs_at_start(self._config, self.machine.cluster):
                self.apply(event)
            self._look_for_ended()
            self._plan_ahead()
            await self._stop.wait()
        finally:
            self._stop.set()
            self._flush()
            await self.store.durable()
            await self._close(runner, unproven)
        return not self._failed

    async def _close(self, runner: web.AppRunner, unproven: UnprovenConnections) -> None:
        loop = asyncio.get_running_loop()
        for part in (self._liveness, self._garbage, self._scrape, unproven):
            part.close()
        self._saving.close(last_try=not self._failed)
        self._timers.close()
        for timer in filter(None, (self._look, self._ahead)):
            timer.cancel()
        for session in list(self._sessions.values()):
            await session.close(WSCloseCode.GOING_AWAY, "the coordinator stops")
        await self._dashboard.close()
        if self._door is not None:
            await self._door.close()
        await runner.cleanup()
        await self._hook.close()
        await self._presence.close()
        await loop.run_in_executor(None, self._planning.close)
        if (
            not self._failed
            and self.deposed is None
            and all(task.over is not None for task in self.machine.tasks.values())
        ):
            # Nothing is unfinished, so that no agent needs to wait for an operator's restart.
            (self.state_dir / RECORD).unlink(missing_ok=True)
        await self.store.release()
        if self.deposed is not None:  # else the process ends, and a further signal must not change its status
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        logger.info("coordinator_ended port=%d", self.port)

    async def _open(self, runner: web.AppRunner) -> None:
        if self._encryption is None:
            # asyncio takes in as many connections at once as its own backlog has: few, which get their answers first.
            await web.SockSite(runner, self._socket).start()
            self._socket.listen(BACKLOG)
            return
        assert runner.server is not None
        self._door = TlsDoor(self._socket, self._encryption.context, runner.server)
        self._door.start()

    # ---- the one path from input to effect -------------------------------------------------------------------------

    def apply(self, event: ev.Input) -> None:
        """Have the machine process an input, and carry out its answer."""
        self._handle(event)
        self._flush()

    async def order(self, event: ev.Input) -> str | None:
        """Have the machine process an operator's order; return None once it is durable, else the reason it is not."""
        if not self._saving.retry():
            return f"not carried out: the coordinator can't save its state: {self.store_error}"
        self.apply(event)
        if self._failed:
            return "not carried out: the coordinator stops because of an error, see its log"
        if self._saving.error is not None:
            return f"carried out, but lost if the coordinator ends now: it can't save its state: {self.store_error}"
        lost = await self.store.durable()
        return None if lost is None else f"perhaps not carried out, ask again: this coordinator stopped leading: {lost}"

    @property
    def store_error(self) -> str | None:
        """Reason why some state is not written; None if all is."""
        return self._saving.error or self.store.error

    def _depose(self, reason: str) -> None:
        """Stop without another decision: another coordinator may lead."""
        logger.error("leadership_lost reason=%s", reason)
        self.deposed = reason
        self._batch = Batch()
        self._stop.set()

    def _give_way(self) -> None:
        """Stop leading, if there may be another coordinator: it may hear the agents."""
        if self.store.defers and not self._stop.is_set():
            self.gave_way = True
            self._depose("no agent is heard")

    def _take(self, event: ev.Input) -> None:
        """Process an input like `apply`, but flush with others that arrive until the store has rested as it worked."""
        self._handle(event)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_at(self._rests_until, self._flush)

    def _handle(self, event: ev.Input) -> None:
        if self._stop.is_set():
            return
        now = self.now()
        try:
            actions = self.machine.handle(event, now)
        except Exception as error:
            # Supervisor boundary. The state in memory may be half changed, the stored state is not: affected tasks
            # continue from the stored one, as after a restart.
            logger.exception("input_failed input=%s", shortened(str(event), 400))
            actions = self._contain(event, error, now)
        for action in actions:
            if isinstance(action, ev.SetTimer):
                self._timers.set(action.key, action.seconds)
            elif isinstance(action, ev.CancelTimer):
                self._timers.cancel(action.key)
        self._batch.add(time.time(), actions)
        self._scrape.observe(event, actions, now)

    def _contain(self, event: ev.Input, error: Exception, now: float) -> list[ev.Action]:
        """Limit the failure of an input to the tasks that it belongs to."""
        if isinstance(event, ev.Started):
            return self._start_without(event, now)
        touched = set(self.machine.touched)
        conns = {conn for conn, (task, _) in self.machine.cluster.conns.items() if task in touched}
        self._batch.withhold(touched, conns)
        self._timers.cancel_tasks(touched)
        try:
            return self.machine.contain(event, error, self.store.task, now)
        except Exception:
            logger.exception("machine_broken")
            self._failed = True
            self._stop.set()
            self._batch = Batch()
            return []

    def _start_without(self, event: ev.Started, now: float) -> list[ev.Action]:
        """Start without the tasks that cannot be restored: they are set aside."""
        while True:
            for task in self.machine.touched:
                self.store.set_aside(task, "the coordinator cannot restore it")
            self.machine = Machine(self._limits, self.store.load())
            try:
                return self.machine.handle(event, now)
            except Exception:
                logger.exception("task_not_restored tasks=%s", self.machine.touched)
                if not self.machine.touched:
                    raise

    def _flush(self) -> None:
        """Write the machine's decisions, then send messages."""
        self._flushing = False
        batch, self._batch = self._batch, Batch()
        began = time.monotonic()
        self._saving.write(batch)  # a full disk must not stop recovery: unwritten decisions are kept
        self._rests_until = time.monotonic() + min(time.monotonic() - began, _MOST_REST_SECONDS)
        if self.store.defers:
            batch.encode()
        self.store.when_durable(lambda: self._carry_out(batch), fenced=batch.acts())

    def _carry_out(self, batch: Batch) -> None:
        """Send the messages of a batch that is written, and do what else it decides."""
        to: dict[int, PeerConnection] = {}
        for action in batch.actions():
            match action:
                case ev.Send(conn=conn, message=message) if conn in self._sessions:
                    if isinstance(message, NodeRun):
                        message = self._node_orders.take(conn, message, durable=self.store_error is None)
                    to[conn] = self._sessions[conn]
                    to[conn].hold(batch.frame(message))
                case ev.Close(conn=conn, reason=reason):
                    if conn in self._sessions:
                        self._sessions[conn].finish(reason)
                case ev.Emit():
                    self._hook.note(action)
                case ev.RequestPlan(question=question):
                    self._ask(question)
                case ev.Strike(signal=number):
                    for session in to.values():
                        session.release()
                    os.kill(os.getpid(), number)
                case ev.StopServer(reason=reason):
                    logger.info("coordinator_stops reason=%s", reason)
                    self._stop.set()
        for session in to.values():
            session.release()

    def _send_held(self) -> None:
        """Send daemons what had to wait until it was written."""
        for conn, order in self._node_orders.due():
            if conn in self._sessions:
                self._sessions[conn].send(frame_of(wire.encode(order)))

    def _ask(self, question: Question) -> None:
        loop = asyncio.get_running_loop()
        if not self._config.planner.enabled:
            loop.call_soon(self.apply, keep(question))
            return
        known = Knowledge.of(self.machine.cluster, self._config.planner)
        self._planning.ask(question, known, lambda answer: _call(loop, self.apply, answer))

    def _plan_ahead(self) -> None:
        """Update the plans for likely next events, every few seconds."""
        question = standing(self.machine.cluster) if self._config.planner.enabled else None
        if question is not None:
            self._planning.plan_ahead(question, Knowledge.of(self.machine.cluster, self._config.planner))
        self._ahead = asyncio.get_running_loop().call_later(_AHEAD_SECONDS, self._plan_ahead)

    def _gone(self, place: tuple[str, str] | None) -> None:
        """Skip the grace period of an agent whose connection has ended and whose process is known to be dead."""
        if place is not None:
            self._timers.expire_now("lost", *place)

    # ---- connections -----------------------------------------------------------------------------------------

    async def _serve_agent(self, request: web.Request) -> web.StreamResponse:
        peer = request.remote or ""

        def take(conn: int, data: str | bytes) -> None:
            message = wire.decode_from_agent(data)
            if isinstance(message, wire.Beat):
                if self._liveness.beat(conn):
                    about = registered(self._limits, self._liveness.connections)
                    self._sessions[conn].hold(frame_of(wire.encode(about)))
                self._sessions[conn].hold(ANSWER)
                self._sessions[conn].release()
                return
            self._liveness.heard(conn)
            if isinstance(message, wire.Register):
                message = wire.sealed(message)
            if isinstance(message, wire.Register | wire.RendezvousBegin):
                host = message.host if isinstance(message, wire.Register) else self._hosts.get(conn, peer)
                self._hosts[conn] = host
                store = message.store
                if store is not None and (reason := misplaced(store.host, host, peer)) is not None:
                    raise peers.Misplaced(reason)
                # Only the connection's own machine is probed for an open port.
                self._presence.record_store(conn, store and wire.Address(host=peer, port=store.port))
            self._take(ev.AgentMessage(conn=conn, message=message, excused=self._timers.excusing()))

        return await self._serve(request, take)

    async def _serve_node(self, request: web.Request) -> web.StreamResponse:
        def take(conn: int, data: str | bytes) -> None:
            message = decode_from_node(data)
            self._liveness.heard(conn)
            if isinstance(message, NodeHello):
                self._node_orders.met(conn, message.tasks)
            self._take(ev.DaemonMessage(conn=conn, message=message))

        return await self._serve(request, take)

    async def _serve(self, request: web.Request, take: Take) -> web.WebSocketResponse:
        socket_ = DirectWebSocket(
            heartbeat=self._config.detection.heartbeat,
            max_msg_size=self._config.coordinator.max_message_bytes,
            compress=False,
            timeout=1.0,
        )
        await socket_.prepare(request)
        if request.transport is None:  # closed meanwhile
            return socket_
        raw = request.transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        conn = next(self._conn_ids)
        session = self._sessions[conn] = PeerConnection(socket_, request.transport)
        try:
            await _read(conn, socket_, take, session, self._config.detection.register_timeout)
        finally:
            socket_.take_back()
            del self._sessions[conn]
            self._garbage.ended(len(self._sessions))
            self._hosts.pop(conn, None)
            self._node_orders.forget(conn)
            place = self.machine.cluster.conns.get(conn)
            self._presence.ended(conn, lambda: self._gone(place))
            self._take(ev.Disconnected(conn=conn, silent=self._liveness.forget(conn)))
            await session.stop()
        return socket_

    # ---- about itself ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the machine's time."""
        return self._clock.now()

    def about(self) -> dict[str, Any]:
        """Describe this process: pid, version, address, encryption, whether an agent started it."""
        own = self._config.coordinator
        process = {"pid": os.getpid(), "version": __version__, "host": own.host, "port": self.port}
        return {**process, "started_by_agent": own.started_by_agent, "encrypted": self._encryption is not None}

    def goodput(self, task: str) -> float | None:
        """Return the productive share of a task's time; None if unknown."""
        return self._scrape.goodput(task)

    def _announce(self) -> None:
        path = self.state_dir / RECORD
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "w", encoding="utf-8", opener=open_private) as file:
                file.write(json.dumps(self.about()))
            partial.replace(path)
        except OSError as error:
            raise StoreUnusable(f"can't write {path}: {error.strerror or error}") from error
        host = self._config.coordinator.host
        logger.info("coordinator_listens host=%s port=%d state_dir=%s", host, self.port, self.state_dir)
        if self._encryption is not None:
            logger.info("links_encrypted certificate=sha256:%s", self._encryption.fingerprint)

    def _note_set_aside(self) -> None:
        if self.store.corrupt is not None:
            fields = {"path": str(self.store.corrupt)}
            self._batch.add(time.time(), [ev.Emit(name="store_set_aside", task=None, incident=None, fields=fields)])

    def _look_for_ended(self) -> None:
        """Report restored agents of this machine whose processes are gone, while agents are awaited.

        Only for a coordinator started by an agent, which is known to share the agents' process ids.
        """
        if not self._config.coordinator.exit_when_idle:
            return
        here = {"127.0.0.1", "::1", "localhost", socket.gethostname()}
        awaited = [agent for task in self.machine.tasks.values() if task.restoring for agent in task.agents.values()]
        ended = tuple(a.id for a in awaited if a.conn is None and a.host in here and not psutil.pid_exists(a.pid))
        if ended:
            self.apply(ev.AgentsEnded(agents=ended))
        if any(task.restoring for task in self.machine.tasks.values()) and not self._stop.is_set():
            self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_for_ended)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[ev.Planned], None], answer: ev.Planned) -> None:
    """Call a function in the loop from another thread; do nothing if the loop has ended meanwhile."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, answer)


class NodeOrders:
    """The newest orders of each daemon's connection, and orders to daemons while the store cannot be written.

    A daemon forgets an agent that has ended once the agent is no longer in its orders. If the coordinator then ended
    before it could write that the job is over, its successor would run the job again. Until the decision is written,
    removed agents therefore stay in the orders as ``ending``: the daemon does not start them again, and continues to
    report their ends.
    """

    def __init__(self) -> None:
        self._sent: dict[int, list[Launch]] = {}
        self._held: dict[int, NodeRun] = {}

    def met(self, conn: int, tasks: Sequence[NodeTask]) -> None:
        """Record the agents that a daemon reports when it connects: an earlier connection's orders."""
        self._sent[conn] = [Launch(job=each.job, slot=each.slot) for each in tasks if problem(each.job) is None]

    def take(self, conn: int, order: NodeRun, *, durable: bool) -> NodeRun:
        """Return what is to be sent now in place of an order.

        Args:
            conn: number of the connection.
            order: the machine's.
            durable: whether all decisions are written.
        """
        self._held.pop(conn, None)
        if not durable:
            wanted = {key_of(launch) for launch in order.launches}
            gone = [
                Launch(job=launch.job, slot=launch.slot, ending=True)
                for launch in self._sent.get(conn, [])
                if key_of(launch) not in wanted
            ]
            if gone:
                self._held[conn] = order
                order = NodeRun(launches=[*order.launches, *gone])
        self._sent[conn] = order.launches
        return order

    def due(self) -> Iterator[tuple[int, NodeRun]]:
        """Iterate over the orders that were held back, after all decisions are written."""
        for conn, order in list(self._held.items()):
            yield conn, self.take(conn, order, durable=True)

    def forget(self, conn: int) -> None:
        """Handle the end of a connection."""
        self._sent.pop(conn, None)
        self._held.pop(conn, None)


Take = Callable[[int, "str | bytes"], None]
"""Decodes a message of a connection, given its number, and passes it to the machine."""


async def _read(
    conn: int, socket: DirectWebSocket, take: Take, session: PeerConnection, register_timeout: float
) -> None:
    """Read until the connection ends or its peer sends a malformed message.

    Args:
        conn: number of the connection.
        socket: the connection; later messages are handled as they arrive, without this coroutine.
        take: raises one of `peers.UNREADABLE`.
        session: the sending side.
        register_timeout: seconds for the first message.
    """

    def direct(payload: bytes) -> bool:
        if session.finishing:
            return True
        try:
            take(conn, payload)
        except peers.UNREADABLE:
            return False  # received below, which finds the same
        return True

    timeout: float | None = register_timeout
    handed_over = False
    while True:
        try:
            frame = await socket.receive(timeout=timeout)
        except asyncio.TimeoutError:
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"no register message in time")
            return
        if frame.type is not WSMsgType.TEXT:
            if frame.type is WSMsgType.BINARY:
                await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"expected text frames")
            return
        try:
            take(conn, frame.data)
        except peers.UNREADABLE as error:
            reason = peers.described(frame.data, error)
            logger.warning("message_malformed conn=%d error=%s", conn, reason)
            if timeout is not None and peers.is_first(frame.data):
                await socket.send_str(wire.encode(wire.Refused(reason=reason)).decode())
            reason = f"malformed message: {reason}"
            await socket.close(code=WSCloseCode.INVALID_TEXT, message=reason.encode()[:120])
            return
        timeout = None
        handed_over = handed_over or socket.hand_over(direct)
