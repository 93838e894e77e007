"""Several coordinator processes on one etcd: one leads, another takes over, and nothing confirmed is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator.fake_etcd import MISSING, EtcdMembers, installed, three_members
from coordinator.shell import Coordinator

from unicron_lightning.cli.client import fetch
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
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
