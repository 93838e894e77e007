"""Files and messages of former versions that this one reads: state, checkpoints, and the fields of messages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from former.train import SAVED
from former.write import HERE, STEPS, schema

from unicron_lightning.cli.commands import _run
from unicron_lightning.coordinator.storage import Store

VERSIONS = sorted(path.name for path in (HERE / "files").iterdir())


@pytest.fixture(params=VERSIONS)
def files(request: pytest.FixtureRequest) -> Path:
    return HERE / "files" / str(request.param)


def test_the_state_of_a_coordinator_is_read(files: Path, tmp_path: Path) -> None:
    shutil.copy(files / "coordinator.sqlite", tmp_path)
    kept = json.loads((files / "state.json").read_text())
    with closing(Store(tmp_path)) as store:
        loaded = store.load()
        assert set(loaded.tasks) == {"trained", "later"}
        assert len(loaded.tasks["trained"].workers) == 2 and loaded.tasks["trained"].epoch is not None
        assert len(store.events()) == len(kept["events"])
    assert not kept["unreadable"]


def test_an_exported_state_is_imported(files: Path, tmp_path: Path) -> None:
    assert _run(["state", "import", str(files / "state.json"), f"store.state_dir={tmp_path}"]) == 0
    with closing(Store(tmp_path)) as store:
        assert set(store.load().tasks) == {"trained", "later"}


@pytest.mark.parametrize("kind", ["whole.ckpt", "parts/*.ckpt"])
def test_a_checkpoint_is_continued(kind: str, files: Path, tmp_path: Path) -> None:
    [path] = files.glob(kind)
    words = [sys.executable, str(HERE / "train.py"), str(tmp_path), str(STEPS), str(path)]
    subprocess.run(words, check=True, timeout=120)
    found, expected = (json.loads((folder / "result.json").read_text()) for folder in (tmp_path, files))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert SAVED < STEPS


def test_messages_have_the_fields_of_former_versions(files: Path) -> None:
    """Newer fields have defaults, so that either side may be newer."""
    former, now = json.loads((files / "wire.json").read_text()), schema()
    if former["protocol"] != now["protocol"]:
        pytest.skip(f"protocol {former['protocol']}, and now {now['protocol']}")
    assert _changes(former["messages"], now["messages"]) == []


def _changes(former: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the fields that are gone, have another type, or are new without a default."""
    found = [f"{name} is gone" for name in former.keys() - now.keys()]
    for name in former.keys() & now.keys():
        before, after = former[name], now[name]
        fields, newer = before.get("properties", {}), after.get("properties", {})
        found += [f"{name}.{field}" for field in fields if newer.get(field) != fields[field]]
        found += [
            f"{name}.{field} needs a default" for field in {*after.get("required", ())} - {*before.get("required", ())}
        ]
        if "enum" in before and not {*before["enum"]} <= {*after["enum"]}:
            found.append(f"{name} has fewer values")
    return sorted(found)


def test_a_changed_message_is_found() -> None:
    now = schema()["messages"]
    name, message = next((name, each) for name, each in now.items() if each.get("properties"))
    field = next(iter(message["properties"]))
    other = {**message, "properties": {**message["properties"], field: {"type": "null"}}}
    assert _changes(now, {**now, name: other}) == [f"{name}.{field}"]
    assert _changes({key: each for key, each in now.items() if key != name}, now) == []
    assert _changes(now, {key: each for key, each in now.items() if key != name}) == [f"{name} is gone"]
    assert _changes(now, {**now, name: {**message, "required": [*message.get("required", ()), "x"]}}) == [
        f"{name}.x needs a default"
    ]
