"""The part of etcd's gateway that the coordinator uses, in memory; and three real members, where etcd is installed."""

from __future__ import annotations

import asyncio
import base64
import datetime
import itertools
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from unicron_lightning.certificates import Issued, issue, load_ca
from unicron_lightning.local_cluster.processes import free_port

MISSING = "etcd is not installed: three real members cannot be started"


def installed() -> bool:
    return shutil.which("etcd") is not None


class FakeEtcd:
    """Keys with leases; a lease ends `seconds` after its last renewal, or by `expire`."""

    def __init__(self) -> None:
        self.keys: dict[str, dict[str, Any]] = {}
        self.leases: dict[int, tuple[int, float]] = {}
        self.revision = 1
        self.available = True
        self.hold = asyncio.Event()
        """Unset: transactions wait for it before they are carried out."""
        self.hold.set()
        self.lost_answers = 0
        """Transactions that are carried out and answered with an error."""
        self.transactions: list[dict[str, Any]] = []
        self.refusal: dict[str, Any] | None = None
        self._ids = itertools.count(7)
        self.url = ""

    def expire(self) -> None:
        """End all leases."""
        for lease in list(self.leases):
            self._end(lease)

    def _end(self, lease: int) -> None:
        self.leases.pop(lease, None)
        gone = [key for key, kept in self.keys.items() if kept["lease"] == lease]
        for key in gone:
            del self.keys[key]
        self.revision += bool(gone)

    def _header(self) -> dict[str, Any]:
        return {"header": {"revision": str(self.revision)}}

    def _delete(self, key: str, end: str | None) -> None:
        for each in [name for name in self.keys if name == key or (end is not None and key <= name < end)]:
            del self.keys[each]

    async def answer(self, request: web.Request) -> web.Response:
        if not self.available:
            return web.json_response({"error": "etcdserver: no leader", "code": 14}, status=503)
        for lease, (_, until) in list(self.leases.items()):
            if time.monotonic() > until:
                self._end(lease)
        path, body = request.match_info["path"], await request.json()
        if path == "kv/txn":
            await self.hold.wait()
        if self.refusal is not None:
            return web.json_response(self.refusal, status=400)
        answer = getattr(self, "_" + path.replace("/", "_"))(body)
        if path == "kv/txn" and self.lost_answers:
            self.lost_answers -= 1
            return web.json_response({"error": "etcdserver: request timed out", "code": 14}, status=503)
        return web.json_response(answer)

    def _kv_range(self, body: dict[str, Any]) -> dict[str, Any]:
        key, end = _text(body["key"]), _text(body["range_end"]) if "range_end" in body else None
        names = sorted(name for name in self.keys if name == key or (end is not None and key <= name < end))
        most = int(body.get("limit", 0)) or len(names)
        kvs = [
            {"key": _coded(name), "value": self.keys[name]["value"], "create_revision": str(self.keys[name]["created"])}
            for name in names[:most]
        ]
        return {**self._header(), "kvs": kvs, **({"more": True} if len(names) > most else {})}

    def _kv_txn(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["compare"][0]["target"] == "CREATE", "every write compares the leader's key"
        for condition in body["compare"]:
            found = self.keys.get(_text(condition["key"]), {"created": 0, "value": None})
            wanted = condition.get("value", int(condition.get("create_revision", 0)))
            if found["value" if condition["target"] == "VALUE" else "created"] != wanted:
                return {**self._header()}
        assert len(body["success"]) <= 128, "etcd takes no more"
        assert len(json.dumps(body)) < 2_000_000
        self.transactions.append(body)
        self.revision += bool(body["success"])
        for each in body["success"]:
            if "request_put" in each:
                put = each["request_put"]
                key = _text(put["key"])
                created = self.keys.get(key, {"created": self.revision})["created"]
                self.keys[key] = {"value": put["value"], "created": created, "lease": int(put["lease"])}
            else:
                given = each["request_delete_range"]
                self._delete(_text(given["key"]), _text(given["range_end"]) if "range_end" in given else None)
        return {**self._header(), "succeeded": True}

    def _lease_grant(self, body: dict[str, Any]) -> dict[str, Any]:
        lease, seconds = next(self._ids), int(body["TTL"])
        self.leases[lease] = seconds, time.monotonic() + seconds
        return {**self._header(), "ID": str(lease), "TTL": str(seconds)}

    def _lease_keepalive(self, body: dict[str, Any]) -> dict[str, Any]:
        lease = int(body["ID"])
        if lease not in self.leases:
            return {"result": {**self._header(), "ID": str(lease)}}
        seconds = self.leases[lease][0]
        self.leases[lease] = seconds, time.monotonic() + seconds
        return {"result": {**self._header(), "ID": str(lease), "TTL": str(seconds)}}

    def _lease_revoke(self, body: dict[str, Any]) -> dict[str, Any]:
        self._end(int(body["ID"]))
        return self._header()

    def _kv_compaction(self, _body: dict[str, Any]) -> dict[str, Any]:
        return self._header()


def _text(word: str) -> str:
    return base64.b64decode(word).decode()


def _coded(word: str) -> str:
    return base64.b64encode(word.encode()).decode()


@asynccontextmanager
async def fake_etcd() -> AsyncIterator[FakeEtcd]:
    """Serve a fake in this process."""
    fake = FakeEtcd()
    app = web.Application(client_max_size=4 << 20)
    app.router.add_post("/v3/{path:.+}", fake.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        fake.hold.set()
        await runner.cleanup()


class EtcdMembers:
    """Members of one etcd on loopback ports.

    Args:
        folder: for their data.
        number: of members.
        certificates: folder with ``ca.pem`` and ``member.pem``, if they ask their clients for certificates.
    """

    def __init__(self, folder: Path, number: int = 3, certificates: Path | None = None) -> None:
        self.folder, self._certificates = folder, certificates
        self.ports = [(free_port(), free_port()) for _ in range(number)]
        self.urls = [f"http{'s' if certificates else ''}://127.0.0.1:{client}" for client, _ in self.ports]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        """Start a member, also again after its death."""
        client, peer = self.urls[number], f"http://127.0.0.1:{self.ports[number][1]}"
        others = ",".join(f"m{each}=http://127.0.0.1:{ports[1]}" for each, ports in enumerate(self.ports))
        command = ["etcd", "--name", f"m{number}", "--data-dir", str(self.folder / f"m{number}"), "--logger", "zap"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--log-level", "error"]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", others]
        if self._certificates is not None:
            own, ca = str(self._certificates / "member.pem"), str(self._certificates / "ca.pem")
            command += ["--cert-file", own, "--key-file", own, "--client-cert-auth", "--trusted-ca-file", ca]
        self.processes[number] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, number: int) -> None:
        """Kill a member with SIGKILL."""
        process = self.processes.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def healthy(self, number: int) -> bool:
        """Whether a member answers and is part of a quorum."""
        context = None
        if self._certificates is not None:
            context = ssl.create_default_context(cafile=str(self._certificates / "ca.pem"))
            context.load_cert_chain(str(self._certificates / "member.pem"))
        try:
            with urllib.request.urlopen(f"{self.urls[number]}/health", timeout=1, context=context) as answer:
                return bool(json.load(answer).get("health") == "true")
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        for number in list(self.processes):
            with suppress(OSError):
                os.kill(self.processes[number].pid, signal.SIGCONT)
            self.kill(number)


@contextmanager
def three_members(folder: Path, number: int = 3, certificates: Path | None = None) -> Iterator[EtcdMembers]:
    """Start three members, or another number, and wait until they answer."""
    members = EtcdMembers(folder, number, certificates)
    try:
        for each in range(number):
            members.start(each)
        deadline = time.monotonic() + 60
        while not all(members.healthy(each) for each in range(number)):
            assert time.monotonic() < deadline, "etcd does not start"
            time.sleep(0.05)
        yield members
    finally:
        members.close()


def certificate_of_a_member(folder: Path) -> Issued:
    """For servers and clients, as a member's gateway is its client; without a name, which the gateway refuses."""
    ca = load_ca(folder / "ca.pem", folder / "ca.key")
    made = issue("member", datetime.timedelta(days=1), ca=ca, hosts=["127.0.0.1"])
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    found = made.certificate
    builder = x509.CertificateBuilder(
        found.issuer, x509.Name([]), found.public_key(), found.serial_number, found.not_valid_before_utc,
        found.not_valid_after_utc,
        [each for each in found.extensions if each.oid != both.oid] + [x509.Extension(both.oid, False, both)],
    )  # fmt: skip
    return Issued(certificate=builder.sign(ca.key, hashes.SHA256()), key=made.key)
