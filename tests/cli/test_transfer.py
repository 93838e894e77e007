"""`unicron state`: from SQLite to etcd and back, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest
from coordinator.fake_etcd import fake_etcd

from unicron_lightning.cli.commands import _run
from unicron_lightning.coordinator import state
from unicron_lightning.coordinator.events import Emit
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.storage import Store


def filled(folder: Path) -> Path:
    folder.mkdir()
    tasks = [
        state.Task(id=name, min_nodes=1, max_nodes=1, created_at=1.0, lifecycle=Lifecycle()) for name in ("a/x", "b")
    ]
    events = [(float(at), Emit(name="e", task="b", incident=None, fields={"at": at})) for at in range(3)]
    with closing(Store(folder)) as store:
        store.write(save=tasks, forget=[], events=events, lasting=state.Lasting(drained=["n1"]))
        store.set_aside("b", "a test")
        store.write(save=[tasks[1]], forget=[], events=[])
    return folder


def moved(verb: str, file: Path, *overrides: str) -> int | str | None:
    return _run(["state", verb, str(file), *overrides])


async def test_a_state_moves_to_etcd_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = filled(tmp_path / "first")
    one, two, three = (tmp_path / name for name in ("one.json", "two.json", "three.json"))
    assert moved("export", one, f"store.state_dir={first}") == 0
    assert one.stat().st_mode & 0o777 == 0o600
    async with fake_etcd() as fake:
        place = ["store=etcd", f"store.endpoints=[{fake.url}]"]
        assert await asyncio.to_thread(moved, "import", one, *place) == 0
        assert "unicron/leader" not in fake.keys, "it has let go"
        assert await asyncio.to_thread(moved, "export", two, *place) == 0
        assert json.loads(two.read_text()) == json.loads(one.read_text())
        assert await asyncio.to_thread(moved, "import", one, *place) == 2
        assert "this one has state already" in capsys.readouterr().err
        fake.keys["unicron/leader"] = {"value": "e30=", "created": 1, "lease": 0}
        assert await asyncio.to_thread(moved, "import", one, *place) == 2
        assert "expected no coordinator" in capsys.readouterr().err
    assert moved("import", two, f"store.state_dir={tmp_path / 'second'}") == 0
    assert moved("export", three, f"store.state_dir={tmp_path / 'second'}") == 0
    assert json.loads(three.read_text()) == json.loads(one.read_text())
    with closing(Store(tmp_path / "second")) as store:
        assert list(store.load().tasks) == ["a/x", "b"]
        store.write(save=[], forget=[], events=[(9.0, Emit(name="next", task=None, incident=None, fields={}))])
        assert store.events()[-1]["seq"] == len(json.loads(one.read_text())["events"]) + 1


def test_what_is_no_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = filled(tmp_path / "first")
    assert moved("export", tmp_path / "one.json", f"store.state_dir={first}") == 0
    assert moved("export", tmp_path / "one.json", f"store.state_dir={first}") == 2
    assert "expected a new file" in capsys.readouterr().err
    good = json.loads((tmp_path / "one.json").read_text())
    for number, wrong in enumerate(
        [[], {}, {**good, "format": "x"}, {**good, "tasks": [["b", {"id": 3}]]}, {**good, "events": [[1, 2]]},
         {**good, "tasks": [["c", good["tasks"][0][1]]]}, {**good, "unreadable": 3}]
    ):  # fmt: skip
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        target = tmp_path / f"target{number}"
        assert moved("import", tmp_path / "wrong.json", f"store.state_dir={target}") == 2
        assert "expected a file of `unicron state export`" in capsys.readouterr().err
        assert not target.exists()
    assert moved("export", tmp_path / "x.json", f"store.state_dir={tmp_path / 'none'}") == 2
    assert moved("export", tmp_path / "x.json", "store=etcd") == 2
    assert "store.endpoints=[]: expected URLs" in capsys.readouterr().err
    assert moved("export", tmp_path / "x.json", "store.user=me") == 2
    assert "expected store=etcd" in capsys.readouterr().err
    assert moved("export", tmp_path / "x.json", "store=etcd", "store.endpoints=[http://10.0.0.1:2379]") == 2
    assert "expected https beyond loopback" in capsys.readouterr().err
