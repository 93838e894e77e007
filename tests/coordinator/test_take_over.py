"""Several coordinator processes on one etcd: one leads, another takes over, and nothing confirmed is lost."""

from __future__ import annotations

import asyncio
import datetime
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator.fake_etcd import MISSING, EtcdMembers, certificate_of_a_member, installed, three_members
from coordinator.shell import Coordinator, connected

from unicron_lightning import wire
from unicron_lightning.cli.certs import write_certificates
from unicron_lightning.cli.client import fetch
from unicron_lightning.coordinator.etcd import Etcd, coded
from unicron_lightning.coordinator.server.timers import GIVES_WAY_SECONDS
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.local_cluster.cluster import Proxy
from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.chaos, pytest.mark.faults, pytest.mark.skipif(not installed(), reason=MISSING)]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdMembers]:
    with three_members(tmp_path / "etcd") as started:
        yield started


def spawned(members: EtcdMembers, folder: Path) -> Coordinator:
    made = Coordinator(folder, "store=etcd", f"store.endpoints=[{','.join(members.urls)}]")
    made.spawn()
    return made


def ended(*made: Coordinator | None) -> None:
    for each in made:
        if each is not None and each.process is not None:
            assert each.process.stderr is not None
            if each.process.poll() is None:
                each.kill()
            each.process.stderr.close()


def leads(made: Coordinator) -> bool:
    try:
        fetch(f"127.0.0.1:{made.port}", "/v1/status")
    except CoordinatorUnavailable:
        return False
    return True


def job(name: str) -> dict[str, object]:
    return {"name": name, "command": ["true"], "min_nodes": 1, "max_nodes": 1}


def submit(made: Coordinator, name: str) -> None:
    fetch(f"127.0.0.1:{made.port}", "/v1/jobs", method="POST", body=job(name))


def jobs(made: Coordinator) -> list[str]:
    return [each["name"] for each in fetch(f"127.0.0.1:{made.port}", "/v1/jobs")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_stand_by_takes_over(members: EtcdMembers, tmp_path: Path, number: signal.Signals) -> None:
    first = spawned(members, tmp_path / "a")
    second = None
    try:
        until("the first leads", lambda: leads(first), seconds=30)
        second = spawned(members, tmp_path / "b")
        submit(first, "one")
        time.sleep(2)
        assert not leads(second)
        assert first.process is not None
        began = time.monotonic()
        first.process.send_signal(number)
        until("the second leads", lambda: second is not None and leads(second), seconds=30)
        took = time.monotonic() - began
        print(f"{number.name}: the next leader answers after {took:.2f} s")
        assert jobs(second) == ["one"]
        submit(second, "two")
        if number is signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            with pytest.raises(UnicronError):
                submit(first, "three")
            until("the first steps down", lambda: not leads(first), seconds=10)
            assert jobs(second) == ["one", "two"]
            second.kill()
            until("the first leads", lambda: leads(first), seconds=30)
            assert jobs(first) == ["one", "two"]
    finally:
        ended(first, second)


def test_a_leader_that_hears_no_agent_gives_way(members: EtcdMembers, tmp_path: Path) -> None:
    """Once: the next one, which has heard none itself, keeps the leadership."""
    first, link = spawned(members, tmp_path / "a"), None
    second = None

    async def beat() -> None:
        async with connected(f"http://127.0.0.1:{link.port}", "n0", forwarded=True) as (agent,):
            await agent.register()
            for _ in range(20):
                await agent.say(wire.Beat())
                await asyncio.sleep(0.1)
            assert leads(first) and not leads(second)
            link.cut()
            deadline = time.monotonic() + 30
            while not await asyncio.to_thread(leads, second):
                assert time.monotonic() < deadline, "nobody has taken over"
                await agent.say(wire.Beat())
                await asyncio.sleep(0.1)

    try:
        until("the first leads", lambda: leads(first), seconds=30)
        link = Proxy(first.port)
        second = spawned(members, tmp_path / "b")
        asyncio.run(beat())
        time.sleep(2 * GIVES_WAY_SECONDS)
        assert leads(second) and not leads(first)
        second.kill()
        until("the first leads", lambda: leads(first), seconds=30)
    finally:
        if link is not None:
            link.close()
        ended(first, second)


def test_members_of_etcd_die(members: EtcdMembers, tmp_path: Path) -> None:
    first = spawned(members, tmp_path / "a")
    try:
        until("the first leads", lambda: leads(first), seconds=30)
        members.kill(0)
        submit(first, "one")
        members.kill(1)
        with pytest.raises(UnicronError):
            submit(first, "lost")
        until("the first steps down", lambda: not leads(first), seconds=10)
        members.start(0)
        until("the first leads", lambda: leads(first), seconds=30)
        assert "one" in jobs(first)
    finally:
        ended(first)


PERMITTED = {"permType": "READWRITE", "key": coded("unicron/"), "range_end": coded("unicron0")}
ACCESS: list[tuple[str, dict[str, Any]]] = [
    *(("user/add", {"name": name, "password": f"{name}-secret"}) for name in ("root", "unicron")),
    *(("role/add", {"name": name}) for name in ("root", "unicron")),
    *(("user/grant", {"user": name, "role": name}) for name in ("root", "unicron")),
    ("role/grant", {"name": "unicron", "perm": PERMITTED}),
    ("enable", {}),
]


def test_etcd_asks_for_a_certificate_and_a_password(tmp_path: Path) -> None:
    """With access to the keys below the prefix only."""
    certificates = tmp_path / "certificates"
    write_certificates(certificates, ["127.0.0.1"], ["me"], datetime.timedelta(days=1))
    (certificates / "member.pem").write_bytes(certificate_of_a_member(certificates).pem)
    given = (f"store.ca={certificates}/ca.pem", f"store.cert={certificates}/member.pem", "store.user=unicron")

    def made(name: str, password: str, *options: str) -> Coordinator:
        options = ("store=etcd", f"store.endpoints=[{','.join(members.urls)}]", *options)
        coordinator = Coordinator(tmp_path / name, *options, env={"UNICRON_ETCD_PASSWORD": password})
        coordinator.spawn()
        return coordinator

    async def ask_for_access() -> None:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        context.load_cert_chain(str(certificates / "member.pem"))
        client = Etcd(members.urls, context)
        try:
            for path, body in ACCESS:
                await client.call(f"auth/{path}", body)
        finally:
            await client.close()

    with three_members(tmp_path / "etcd", 1, certificates) as members:
        asyncio.run(ask_for_access())
        first = made("a", "unicron-secret", *given)
        try:
            until("the first leads", lambda: leads(first), seconds=30)
            submit(first, "one")
            refused = made("b", "another", *given)
            assert "store.user=unicron: etcd at https://127.0.0.1" in refused.output()
            assert refused.process is not None and refused.process.returncode == 2
            without = made("c", "unicron-secret", given[0], given[2])
            time.sleep(5)
            assert jobs(first) == ["one"], "the lease is renewed with the same token"
            without.kill()
        finally:
            ended(first)
