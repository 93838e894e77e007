"""A client of etcd for the coordinator, over etcd's JSON gateway: keys, transactions and leases, by aiohttp.

A call goes to one member after the other until one answers, beginning with the last one that did. Calls may therefore
be carried out more than once: callers use only those for which this makes no difference.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from unicron_lightning.errors import ConfigError, UnicronError

_FIRST_SECONDS: Final = 1.0
_MOST_SECONDS: Final = 4.0
"""Time for an answer: the first, doubled each time that no member has answered."""
_UNAUTHENTICATED: Final = 16
_TRANSIENT: Final = (1, 2, 4, 8, 10, 13, 14)
"""gRPC's codes of errors that may pass: cancelled, unknown, too late, exhausted, aborted, internal, unavailable."""
_FATAL_TEXTS: Final = ("request is too large", "too many operations")
LEASE_NOT_FOUND: Final = "lease not found"
_PAGE: Final = 500
NEWEST: Final = 1 << 62
"""Stands for the revision of a key that is not written yet."""


class EtcdUnavailable(UnicronError):
    """No member of etcd answers, or none can write; the message has each member's reason."""


class EtcdRefused(UnicronError):
    """A call that etcd will not carry out, however often it is repeated; the message has its reason."""


@dataclass(frozen=True, kw_only=True)
class KeyValue:
    """A key of etcd with its value; ``created`` is the revision that created it."""

    key: str
    value: bytes
    created: int


def coded(data: str | bytes) -> str:
    """Encode a key or a value as the gateway wants it."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def after(prefix: str) -> str:
    """Return the first key beyond all that begin with a prefix, which ends in an ASCII character."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def put(key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
    """Return the operation that writes a key; with a lease it ends with that."""
    return {"request_put": {"key": coded(key), "value": coded(value), "lease": str(lease)}}


def delete(key: str, end: str | None = None) -> dict[str, Any]:
    """Return the operation that deletes a key, or all from it to before ``end``."""
    return {"request_delete_range": {"key": coded(key), **({} if end is None else {"range_end": coded(end)})}}


def was_created(key: str, revision: int) -> dict[str, Any]:
    """Return the condition that a revision created a key; 0: that it does not exist."""
    return {"key": coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def has_value(key: str, value: bytes) -> dict[str, Any]:
    """Return the condition that a key has a value."""
    return {"key": coded(key), "target": "VALUE", "result": "EQUAL", "value": coded(value)}


class Etcd:
    """The members of one etcd.

    Args:
        endpoints: URLs of the members.
        context: for https.
        user: name and password; None where etcd asks for none.
    """

    def __init__(
        self, endpoints: Sequence[str], context: ssl.SSLContext | None = None, user: tuple[str, str] | None = None
    ) -> None:
        self._endpoints, self._user = list(endpoints), user
        self._secure: dict[str, Any] = {} if context is None else {"ssl": context}
        self._http: aiohttp.ClientSession | None = None
        self._token: str | None = None
        self._seconds = _FIRST_SECONDS
        self.revision = 0
        """The newest revision of the store that an answer had."""

    async def close(self) -> None:
        """End the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def get(self, key: str) -> KeyValue | None:
        """Return a key as it is now, None if it does not exist."""
        found = await self.call("kv/range", {"key": coded(key)})
        return next(iter(_pairs(found)), None)

    async def all(self, prefix: str) -> list[KeyValue]:
        """Return all keys that begin with a prefix, in their order, as of one moment."""
        found: list[KeyValue] = []
        start, revision = prefix, 0
        while True:
            query = {"key": coded(start), "range_end": coded(after(prefix)), "limit": str(_PAGE)}
            answer = await self.call("kv/range", {**query, "revision": str(revision)})
            found += _pairs(answer)
            if not answer.get("more"):
                return found
            revision = revision or int(answer["header"]["revision"])
            start = found[-1].key + "\0"

    async def transact(
        self, key: str, created: int, operations: list[dict[str, Any]], *also: dict[str, Any]
    ) -> int | None:
        """Carry out operations if a revision created a key (0: it does not exist), and further conditions hold.

        Returns:
            The store's revision after that, or None if a condition does not hold.
        """
        answer = await self.call("kv/txn", {"compare": [was_created(key, created), *also], "success": operations})
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    async def grant(self, seconds: int) -> int:
        """Return a new lease of this many seconds."""
        return int((await self.call("lease/grant", {"TTL": str(seconds)}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease; return whether it still was there."""
        return int((await self.call("lease/keepalive", {"ID": str(lease)}))["result"].get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, with the keys that depend on it."""
        await self.call("lease/revoke", {"ID": str(lease)})

    async def compact(self, revision: int) -> None:
        """Have etcd forget what keys were before a revision."""
        await self.call("kv/compaction", {"revision": str(revision)})

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a call to one member after the other until one answers.

        Raises:
            EtcdUnavailable: none did.
            EtcdRefused: one did, and will not carry it out.
        """
        reasons = []
        for endpoint in tuple(self._endpoints):
            try:
                answer = await self._call(endpoint, path, body)
            except EtcdUnavailable as error:
                reasons.append(str(error))
                if self._endpoints[0] == endpoint:  # else another call has failed there as well
                    self._endpoints.append(self._endpoints.pop(0))
                continue
            self._seconds = _FIRST_SECONDS
            self.revision = max(self.revision, int(answer.get("header", {}).get("revision", 0)))
            return answer
        self._seconds = min(2 * self._seconds, _MOST_SECONDS)
        raise EtcdUnavailable("; ".join(reasons))

    async def _call(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._user is not None and self._token is None:
            name, password = self._user
            answer = await self._post(endpoint, "auth/authenticate", {"name": name, "password": password})
            self._token = str(answer["token"])
        return await self._post(endpoint, path, body)

    async def _post(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=False)
        headers = {} if self._token is None else {"Authorization": self._token}
        timeout = aiohttp.ClientTimeout(total=self._seconds)
        try:
            async with self._http.post(
                f"{endpoint}/v3/{path}", json=body, headers=headers, timeout=timeout, allow_redirects=False,
                **self._secure,
            ) as response:  # fmt: skip
                status, content = response.status, await response.read()
        except asyncio.TimeoutError:
            raise EtcdUnavailable(f"{endpoint}: no answer within {self._seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EtcdUnavailable(f"{endpoint}: {error}") from None
        answer: Any = None
        with contextlib.suppress(ValueError):
            answer = json.loads(content)
        if not isinstance(answer, dict):
            said = content[:200].decode(errors="replace").strip()
            raise EtcdUnavailable(f"{endpoint}: answers HTTP {status}, and not as etcd does: {said!r}")
        if status != HTTPStatus.OK or "error" in answer:
            self._refuse(endpoint, path, status, answer)
        return answer

    def _refuse(self, endpoint: str, path: str, status: int, answer: dict[str, Any]) -> None:
        given = answer.get("error")
        about = given if isinstance(given, dict) else answer
        said = str(about.get("message") or given or f"HTTP {status}")
        code = about.get("code", about.get("grpc_code", 2))
        if path == "auth/authenticate" and code not in _TRANSIENT:
            raise ConfigError(f"store.user={self._user[0] if self._user else ''}: etcd at {endpoint} answers: {said}")
        if code == _UNAUTHENTICATED and self._user is not None and self._token is not None:
            self._token = None  # it has expired: the next try gets another
            raise EtcdUnavailable(f"{endpoint}: {said}")
        if code in _TRANSIENT and not any(text in said for text in _FATAL_TEXTS):
            raise EtcdUnavailable(f"{endpoint}: {said}")
        raise EtcdRefused(f"etcd at {endpoint} answers: {said}")


def _pairs(answer: dict[str, Any]) -> list[KeyValue]:
    return [
        KeyValue(
            key=base64.b64decode(each["key"]).decode(),
            value=base64.b64decode(each.get("value", "")),
            created=int(each["create_revision"]),
        )
        for each in answer.get("kvs", ())
    ]
