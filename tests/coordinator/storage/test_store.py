"""The database: a corrupt one is set aside, an unusable one ends in one message."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from coordinator.shell import Coordinator, get

from unicron_lightning.coordinator.events import Emit
from unicron_lightning.coordinator.storage import Store, StoreUnusable


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    with closing(Store(folder)) as store:
        yield store


def fill(folder: Path, number: int = 2000) -> None:
    """Write events that take more than a few pages."""
    with opened(folder) as store:
        store.write(save=(), forget=(), events=[event(f"e{n}") for n in range(number)])


def event(name: str) -> tuple[float, Emit]:
    return 1.0, Emit(name=name, task=None, incident=None, fields={"text": "x" * 50})


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def broken_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 40_000)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [garbage, broken_pages, cut_short])
def test_a_corrupt_database_is_set_aside(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    fill(tmp_path)
    damage(tmp_path / "coordinator.sqlite")
    damaged = (tmp_path / "coordinator.sqlite").read_bytes()
    with opened(tmp_path) as store:
        assert store.corrupt is not None
        assert store.corrupt.name.startswith("coordinator.sqlite.corrupt-")
        assert store.corrupt.read_bytes() == damaged
        assert store.events() == [] and not store.load().tasks
        store.write(save=(), forget=(), events=[event("new")])
    assert [record.message.split()[0] for record in caplog.records] == ["store_set_aside"]
    with opened(tmp_path) as store:
        assert store.corrupt is None
        assert [entry["name"] for entry in store.events()] == ["new"]


def test_what_belongs_to_a_corrupt_database_goes_with_it(tmp_path: Path):
    fill(tmp_path)
    garbage(tmp_path / "coordinator.sqlite")
    (tmp_path / "coordinator.sqlite-wal").write_bytes(b"old log")
    names = set()
    for _ in range(2):
        with opened(tmp_path) as store:
            assert store.corrupt is not None
            names.add(store.corrupt.name)
            assert store.corrupt.exists()
        garbage(tmp_path / "coordinator.sqlite")
    assert len(names) == 2, "one does not replace the other"
    kept = [path.read_bytes() for path in tmp_path.glob("coordinator.sqlite.corrupt-*-wal")]
    assert b"old log" in kept


def test_a_sound_database_of_which_a_write_is_not_finished_is_kept(tmp_path: Path):
    with opened(tmp_path) as store:
        store.write(save=(), forget=(), events=[event("a")])
        held = tmp_path / "copy"
        held.mkdir()
        for name in ("coordinator.sqlite", "coordinator.sqlite-wal"):
            (held / name).write_bytes((tmp_path / name).read_bytes())
    with (held / "coordinator.sqlite-wal").open("ab") as log:
        log.write(b"half a frame")
    with opened(held) as store:
        assert store.corrupt is None
        assert [entry["name"] for entry in store.events()] == ["a"]


def test_a_database_that_cannot_be_opened_is_not_set_aside(tmp_path: Path):
    (tmp_path / "coordinator.sqlite").mkdir()
    with pytest.raises(StoreUnusable, match=r"can't use .*coordinator.sqlite: unable to open database file; expected"):
        Store(tmp_path)
    (tmp_path / "coordinator.sqlite").rmdir()
    with opened(tmp_path) as store:  # the lock was released
        assert store.corrupt is None


def test_a_full_disk_is_not_a_corrupt_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path)

    def full(*_: object, **__: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with pytest.raises(StoreUnusable, match="database or disk is full"):
            Store(tmp_path)
    with opened(tmp_path) as store:
        assert len(store.events()) == 2000


def test_a_state_folder_that_cannot_be_used_is_one_message(tmp_path: Path):
    (tmp_path / "file").touch()
    for folder, wrong in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "below", "Not a directory")):
        coordinator = Coordinator(folder)
        coordinator.spawn()
        output = coordinator.output()
        assert coordinator.process is not None and coordinator.process.returncode == 2
        assert f"store.state_dir={folder}: {wrong}" in output
        assert output.count(" ERROR ") == 1 and "Traceback" not in output


def test_a_coordinator_starts_beside_a_corrupt_database(tmp_path: Path):
    (tmp_path / "coordinator.sqlite").write_bytes(b"no database " * 1000)
    with Coordinator(tmp_path) as coordinator:
        events = asyncio.run(get(f"{coordinator.url}/v1/events"))
        assert [entry["name"] for entry in events] == ["store_set_aside", "coordinator_started"]
    (aside,) = tmp_path.glob("coordinator.sqlite.corrupt-*[0-9]")
    assert events[0]["fields"] == {"path": str(aside)} and aside.read_bytes().startswith(b"no database")


def test_state_is_for_its_owner_only(tmp_path: Path):
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for name in ("lock", "coordinator.sqlite"):  # as an older version left them
        (folder / name).touch(mode=0o644)
        (folder / name).chmod(0o644)
    with Coordinator(folder) as coordinator:
        assert asyncio.run(get(f"{coordinator.url}/v1/events"))
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert modes.keys() >= {"lock", "coordinator.json", "coordinator.sqlite", "coordinator.sqlite-wal"}
    assert set(modes.values()) == {"0o600"}, modes


def test_a_symlink_is_not_followed(tmp_path: Path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnusable, match=r"store.state_dir=.*: Too many levels of symbolic links"):
        Store(tmp_path / "state")
    assert not (tmp_path / "elsewhere").exists()
