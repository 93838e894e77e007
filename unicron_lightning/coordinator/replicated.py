"""A coordinator's state in etcd, and which of several coordinators leads.

**The leader** holds a key with a lease. Every write is a transaction that compares the revision which created the key:
etcd refuses the writes of a coordinator that was stopped while another took over, whatever the clocks say. What a
decision leads to (messages, confirmations) follows its write, and decisions without anything to write are compared as
well. A leader that cannot renew the lease in time stops by its own clock, so that agents look for another one; that is
a matter of speed, not of safety.

**Stand-bys** look for the key several times a second. The one that writes it loads the state and opens its port; until
then its port refuses connections, so that clients try their next endpoint.

**Keys**, below a prefix: ``leader``, ``newest``, ``lasting``, ``tasks/ID``, ``unreadable/ID`` and ``events/SEQ``, each
a JSON text, deflated if it is large. ``events/SEQ`` has the events of one write, from SEQ on. A write that is too
large for one transaction is staged: its parts are written below ``staged/``, then ``whole``, then the keys
themselves. A coordinator that finds ``whole`` at its start completes the write, and discards parts without it.

The leader has a copy in memory, as a database like that of `storage.Store`: all is read there.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import json
import logging
import os
import secrets
import socket
import sqlite3
import ssl
import time
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from typing_extensions import override

from unicron_lightning import environ
from unicron_lightning.coordinator import etcd
from unicron_lightning.coordinator.config import CoordinatorConfig, StoreConfig
from unicron_lightning.coordinator.storage import Database, create_tables
from unicron_lightning.credentials import is_loopback
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.link import end_tasks

logger = logging.getLogger(__name__)

MOST_VALUE_BYTES: Final = 1 << 20
"""Limit of one key's value; etcd takes requests of 1.5 MiB."""
_GROUP_BYTES: Final = 512 << 10
_GROUP_KEYS: Final = 100
"""Limits of one transaction, unless a single value is larger; etcd takes 128 operations."""
_DEFLATED_FROM: Final = 64 << 10
EVENTS_KEPT: Final = 20_000
EVENT_BYTES_KEPT: Final = 16 << 20
"""A new leader reads all events, so fewer are kept than in a file."""
_LOOKS_PER_LEASE: Final = 24
_RENEWALS_PER_LEASE: Final = 4
_RETRY_SECONDS: Final = 0.1

Changes = dict[str, "bytes | None"]
"""New values by key; None deletes the key."""


class Deposed(UnicronError):
    """Another coordinator leads, or the lease has ended; the message is the reason."""


class LeaderStore(Database):
    """The state in etcd, for the coordinator that leads.

    Args:
        client: of etcd; closed with the store.
        prefix: of all keys.
        address: of this coordinator, for the others' logs.
        lease_seconds: time after which a leader that is not heard has lost.
        compact_seconds: time between two compactions of etcd; 0: never.
        events_kept: newest events that are kept, at most `EVENTS_KEPT`.

    Attributes:
        failed: whether the reason of the end is one that the next leader would meet as well.
    """

    defers = True

    def __init__(
        self, client: etcd.Etcd, prefix: str, address: str, *, lease_seconds: int = 3, compact_seconds: float = 300.0,
        events_kept: int = EVENTS_KEPT,
    ) -> None:  # fmt: skip
        database = sqlite3.connect(":memory:", isolation_level=None)
        create_tables(database)
        super().__init__(database, min(events_kept, EVENTS_KEPT), event_bytes=EVENT_BYTES_KEPT)
        self._etcd, self._prefix, self._leader = client, prefix, f"{prefix}leader"
        self._lease_seconds, self._compact_seconds = lease_seconds, compact_seconds
        about = {"address": address, "host": socket.gethostname(), "pid": os.getpid(), "id": secrets.token_hex(8)}
        self._about = json.dumps(about).encode()
        self.failed = False
        self._created = self._lease = 0
        self._valid_until = 0.0
        """time.monotonic() at which the lease ends, unless it is renewed."""
        self._newest: bytes | None = None
        """Value of the key ``newest``, see `_transact`."""
        self._lost: str | None = None
        self._told: Callable[[str], None] = lambda _: None
        self._changes: Changes = {}
        self._then: list[Callable[[], None]] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self._more = asyncio.Event()
        self._firsts: list[int] = []
        """First sequence numbers of the keys ``events/SEQ``."""
        self._logged = self._aside = 0
        """Newest event, and newest unreadable row, that a write has."""
        self._tasks: list[asyncio.Task[None]] = []

    # ---- leadership

    async def lead(self) -> None:
        """Wait until this process leads, and load the state.

        Raises:
            EtcdRefused: etcd does not allow it.
            Deposed: the leadership was lost again while the state was loaded.
        """
        shown: str | None = None
        while True:
            try:
                holder = await self._etcd.get(self._leader)
                if holder is None and await self._take():
                    break
                now = "another takes over" if holder is None else f"leader={holder.value.decode(errors='replace')}"
            except etcd.EtcdUnavailable as error:
                now = f"etcd_unavailable {error}"
            if now.split(" ")[0] != (shown or "").split(" ")[0]:
                logger.info("coordinator_stands_by %s", now)
            shown = now
            await asyncio.sleep(self._lease_seconds / _LOOKS_PER_LEASE)
        logger.info("coordinator_leads revision=%d", self._created)
        self._start(self._renew)
        await self._until_lost(self._load())
        self._start(self._commit_all)
        if self._compact_seconds:
            self._start(self._compact)

    async def leader(self) -> str | None:
        """Return how the present leader describes itself; None if none leads.

        Raises:
            EtcdUnavailable: etcd does not answer.
        """
        holder = await self._etcd.get(self._leader)
        return None if holder is None else holder.value.decode(errors="replace")

    async def copy(self) -> sqlite3.Connection:
        """Return all state as of one moment, without leading.

        Raises:
            EtcdUnavailable: etcd does not answer.
        """
        await self._read(settle=False)
        return self._db

    async def _take(self) -> bool:
        began = time.monotonic()
        lease = await self._etcd.grant(self._lease_seconds)
        try:
            created = await self._etcd.transact(self._leader, 0, [etcd.put(self._leader, self._about, lease)])
        except etcd.EtcdUnavailable:
            created = None  # perhaps it was carried out: ending the lease deletes the key
        except etcd.EtcdRefused as error:
            if etcd.LEASE_NOT_FOUND not in str(error):
                raise
            created = None  # etcd was so slow that it has ended
        if created is None:
            with contextlib.suppress(etcd.EtcdUnavailable, etcd.EtcdRefused):
                await self._etcd.revoke(lease)
            return False
        self._created, self._lease, self._valid_until = created, lease, began + self._lease_seconds
        return True

    def _start(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.append(asyncio.create_task(self._supervised(part)))

    async def _supervised(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await part()
        except Deposed as error:
            self._lose(str(error))
        except etcd.EtcdRefused as error:
            self.failed = True
            self._lose(str(error))
        except Exception as error:
            # Supervisor boundary: what cannot be written must not be confirmed.
            logger.exception("store_broken")
            self.failed = True
            self._lose(f"an error in the store: {error}")

    async def _until_lost(self, work: Coroutine[Any, Any, None]) -> None:
        doing = asyncio.ensure_future(work)
        self._waiting.add(doing)
        try:
            await doing
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            raise Deposed(self._lost) from None
        finally:
            self._waiting.discard(doing)

    async def _renew(self) -> None:
        pause = self._lease_seconds / _RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            if began < self._valid_until:
                try:
                    renewal = self._etcd.keep_alive(self._lease)
                    alive = await asyncio.wait_for(renewal, self._valid_until - began)
                except (etcd.EtcdUnavailable, asyncio.TimeoutError) as error:
                    logger.warning("lease_not_renewed error=%s", str(error) or "no answer in time")
                    continue
                if not alive:
                    raise Deposed("its lease has ended")
                self._valid_until = began + self._lease_seconds
            else:
                raise Deposed(f"its lease was not renewed for {self._lease_seconds} s")

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        self._then.clear()
        for waiting in self._waiting:
            waiting.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._told(reason)

    @override
    def watch(self, lost: Callable[[str], None]) -> None:
        """Have a function called, with the reason, if this process does not lead any more."""
        self._told = lost
        if self._lost is not None:
            lost(self._lost)

    @override
    async def release(self) -> None:
        """End the lease, so that a stand-by takes over at once, and close."""
        if self._lost is None and self._lease:
            self._told = lambda _: None
            with contextlib.suppress(etcd.EtcdUnavailable, etcd.EtcdRefused):
                await self._etcd.revoke(self._lease)
            self._lose("it has ended")
        await end_tasks(self._tasks)
        await self._etcd.close()
        self.close()

    # ---- writing

    @override
    def _note(self, tasks: Iterable[str], *, lasting: bool) -> None:
        """Add what was written to the changes, which go in one transaction to etcd once `when_durable` asks for it."""
        kept: list[tuple[str, str, tuple[str, ...]]] = []
        kept += [(self._key("tasks", name), "tasks WHERE id = ?", (name,)) for name in tasks]
        if lasting:
            kept.append((self._key("lasting"), "lasting", ()))
        for key, rows, values in kept:
            row = self._db.execute(f"SELECT state FROM {rows}", values).fetchone()
            self._changes[key] = None if row is None else row[0]
        query = "SELECT rowid, id, at, reason, state FROM unreadable WHERE rowid > ?"
        for row, named, at, reason, blob in self._db.execute(query, (self._aside,)):
            about = {"at": at, "reason": reason, "state": etcd.coded(blob)}
            self._changes[self._key("unreadable", named)] = json.dumps(about).encode()
            self._aside = row
        self._note_events()
        self._more.set()

    def _note_events(self) -> None:
        """Add the events since the last write, and remove keys without an event in the copy."""
        rows = self._db.execute(
            "SELECT seq, at, name, task, incident, fields FROM events WHERE seq > ? ORDER BY seq", (self._logged,)
        ).fetchall()
        for group in _groups(rows, lambda row: len(row[-1]) + 200, _GROUP_BYTES, 1000):
            self._changes[self._event_key(group[0][0])] = json.dumps(group).encode()
            self._firsts.append(group[0][0])
            self._logged = group[-1][0]
        (oldest,) = self._db.execute("SELECT min(seq) FROM events").fetchone()
        outdated = bisect.bisect_right(self._firsts, oldest or 0) - 1
        for first in self._firsts[: max(0, outdated)]:
            self._changes[self._event_key(first)] = None
        del self._firsts[: max(0, outdated)]

    def _key(self, *parts: str) -> str:
        return self._prefix + "/".join(parts)

    def _event_key(self, first: int) -> str:
        return self._key("events", f"{first:016d}")

    @override
    def when_durable(self, then: Callable[[], None], *, fenced: bool = True) -> None:
        """Call a function once all that was written so far is in etcd; never if this process does not lead then."""
        if self._lost is None and (fenced or self._changes):
            self._then.append(then)
            self._more.set()

    @override
    async def durable(self) -> str | None:
        """Wait until all is in etcd; return the reason if this process does not lead any more."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def confirm() -> None:
            if not done.done():
                done.set_result(None)

        if self._lost is None:
            self._waiting.add(done)
            self.when_durable(confirm)
            try:
                await asyncio.wait({done})
            finally:
                self._waiting.discard(done)
        return self._lost

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._more.wait()
            self._more.clear()
            changes, self._changes = self._changes, {}
            then, self._then = self._then, []
            await self._commit(changes)
            for each in then:
                loop.call_soon(self._if_leading, each)

    def _if_leading(self, then: Callable[[], None]) -> None:
        if self._lost is None:
            then()

    async def _commit(self, changes: Changes) -> None:
        """Write all or nothing; can be repeated."""
        packed = {key: None if value is None else _packed(key, value) for key, value in changes.items()}
        groups = list(_groups(packed.items(), lambda each: len(each[1] or b""), _GROUP_BYTES, _GROUP_KEYS)) or [[]]
        if len(groups) > 1:
            for number, group in enumerate(groups):
                plain = [[key, None if value is None else etcd.coded(value)] for key, value in group]
                await self._transact([etcd.put(self._key("staged", f"{number:06d}"), json.dumps(plain).encode())])
            await self._transact([etcd.put(self._key("whole"), b"{}")])
        for group in groups:
            await self._transact([_operation(key, value) for key, value in group])
        if len(groups) > 1:
            await self._discard_staged()

    async def _discard_staged(self) -> None:
        staged = self._key("staged", "")
        await self._transact([etcd.delete(self._key("whole")), etcd.delete(staged, etcd.after(staged))])

    async def _transact(self, operations: list[dict[str, Any]]) -> None:
        """Carry out operations once, in order, as the leader; repeat the call until etcd answers.

        A call without an answer may be carried out late, after newer ones. Each therefore writes the key ``newest``,
        and compares that its predecessor has written that.
        """
        key, tag, conditions = self._key("newest"), f'"{secrets.token_hex(8)}"'.encode(), []
        if operations:
            before = self._newest
            conditions = [etcd.was_created(key, 0) if before is None else etcd.has_value(key, before)]
            operations = [*operations, etcd.put(key, tag)]
        while True:
            try:
                done = await self._etcd.transact(self._leader, self._created, operations, *conditions)
                carried_out = done is not None or bool(operations and await self._is_newest(tag))
                break
            except etcd.EtcdUnavailable as error:
                if self.error is None:
                    logger.error("state_not_saved error=%s", error)
                self.error = str(error)
                await asyncio.sleep(_RETRY_SECONDS)
        if not carried_out:
            raise Deposed("another coordinator has taken over, or the lease has ended")
        self.error = None
        if operations:
            self._newest = tag

    async def _is_newest(self, tag: bytes) -> bool:
        """Whether an earlier try was carried out, and this process still leads."""
        leader, newest = await self._etcd.get(self._leader), await self._etcd.get(self._key("newest"))
        leads = leader is not None and leader.created == self._created
        return leads and newest is not None and newest.value == tag

    async def _compact(self) -> None:
        before = self._etcd.revision
        while True:
            await asyncio.sleep(self._compact_seconds)
            try:
                await self._etcd.compact(before)
            except (etcd.EtcdUnavailable, etcd.EtcdRefused) as error:  # refused: compacted further by another
                logger.info("etcd_not_compacted error=%s", error)
            before = self._etcd.revision

    # ---- reading

    async def _load(self) -> None:
        while True:
            try:
                await self._read()
                return
            except etcd.EtcdUnavailable as error:
                logger.warning("state_not_read error=%s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _read(self, *, settle: bool = True) -> None:
        """Read all keys as of one moment; ``settle``: complete or discard in etcd what a leader has staged."""
        found = {each.key: (each.created, each.value) for each in await self._etcd.all(self._prefix)}
        newest = found.get(self._key("newest"))
        self._newest = None if newest is None else newest[1]
        staged = [found[key][1] for key in sorted(found) if key.startswith(self._key("staged", ""))]
        if self._key("whole") in found:
            for part in staged:
                group = [(key, None if value is None else base64.b64decode(value)) for key, value in json.loads(part)]
                if settle:
                    await self._transact([_operation(key, value) for key, value in group])
                for key, value in group:
                    created = found.pop(key, (etcd.NEWEST, b""))[0]
                    if value is not None:
                        found[key] = created, value
        if settle and (staged or self._key("whole") in found):
            await self._discard_staged()
        self._fill(found)

    def _fill(self, found: dict[str, tuple[int, bytes]]) -> None:
        """Replace the copy by values of keys, with the revisions that created them."""

        def below(table: str) -> list[tuple[str, bytes]]:
            start = self._key(table, "")
            names = sorted((key for key in found if key.startswith(start)), key=lambda key: (found[key][0], key))
            return [(key.removeprefix(start), _unpacked(found[key][1])) for key in names]

        self._db.execute("BEGIN")
        for table in ("tasks", "lasting", "events", "unreadable"):
            self._db.execute(f"DELETE FROM {table}")
        self._db.executemany("INSERT INTO tasks VALUES (?, ?)", below("tasks"))
        if (lasting := found.get(self._key("lasting"))) is not None:
            self._db.execute("INSERT INTO lasting VALUES (1, ?)", (_unpacked(lasting[1]),))
        for name, blob in below("unreadable"):
            about = json.loads(blob)
            row = (name, about["at"], about["reason"], base64.b64decode(about["state"]))
            self._aside = self._db.execute("INSERT INTO unreadable VALUES (?, ?, ?, ?)", row).lastrowid or 0
        self._firsts = sorted(int(first) for first, _ in below("events"))
        for _, blob in sorted(below("events")):
            rows = json.loads(blob)
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._logged = rows[-1][0]
        self._db.execute("COMMIT")
        self._log.recount()


def _operation(key: str, value: bytes | None) -> dict[str, Any]:
    return etcd.delete(key) if value is None else etcd.put(key, value)


def _packed(key: str, value: bytes) -> bytes:
    packed = zlib.compress(value, 1) if len(value) > _DEFLATED_FROM else value
    if len(packed) > MOST_VALUE_BYTES:
        raise etcd.EtcdRefused(
            f"the state {key} has {len(value)} bytes, {len(packed)} deflated: expected at most {MOST_VALUE_BYTES} for "
            "store=etcd; use store=sqlite, or tasks of fewer nodes"
        )
    return packed


def _unpacked(value: bytes) -> bytes:
    return value if value[:1] in (b"{", b"[") else zlib.decompress(value)


def _groups(items: Iterable[Any], size: Callable[[Any], int], most: int, number: int) -> Iterator[list[Any]]:
    """Divide items into groups of at most ``number``, and of at most a total size, or one."""
    group: list[Any] = []
    total = 0
    for item in items:
        if group and (len(group) == number or total + size(item) > most):
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


def leader_store(config: CoordinatorConfig) -> LeaderStore:
    """Return the store that a configuration with ``store=etcd`` describes; it does not lead yet.

    Raises:
        ConfigError: a value is wrong, or a file cannot be used.
    """
    own, given = config.coordinator, config.store
    for url in given.endpoints:
        address = urlsplit(url)
        if address.scheme == "http" and not (own.plaintext or is_loopback(address.hostname or "")):
            raise ConfigError(f"store.endpoints={url}: expected https beyond loopback, or coordinator.plaintext=true")
    context = None
    if any(url.startswith("https:") for url in given.endpoints):
        try:
            context = ssl.create_default_context(cafile=given.ca)
            if given.cert is not None:
                context.load_cert_chain(given.cert, given.cert_key)
        except OSError as error:  # or ssl.SSLError, which is one
            raise ConfigError(f"store.ca={given.ca} store.cert={given.cert}: {error}") from error
    elif given.ca or given.cert:
        raise ConfigError(f"store.ca={given.ca} store.cert={given.cert}: expected https in store.endpoints")
    user = None if given.user is None else (given.user, _password(given))
    return LeaderStore(
        etcd.Etcd([url.rstrip("/") for url in given.endpoints], context, user),
        given.prefix,
        f"{own.host}:{own.port}",
        lease_seconds=given.lease_seconds,
        compact_seconds=given.compact_seconds,
        events_kept=given.events_kept,
    )


def _password(given: StoreConfig) -> str:
    if given.password_file is None:
        found = os.environ.get(environ.ETCD_PASSWORD, "")
    else:
        try:
            found = Path(given.password_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"store.password_file={given.password_file}: {error}") from error
    if not found:
        raise ConfigError(f"store.user={given.user}: expected {environ.ETCD_PASSWORD} or a store.password_file")
    return found
