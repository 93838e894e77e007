"""A checkpoint is reported with the digest of the written file, and loaded only if it still has that digest."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from unicron_lightning import wire
from unicron_lightning.checkpoints.files import digest_of, located
from unicron_lightning.checkpoints.reported import CheckpointsChanged, _agreed, _Seen, newest
from unicron_lightning.strategies.state.checkpointing import write_checkpoint
from unicron_lightning.worker.engine import Engine

CONTENT = {"state_dict": {"x": torch.arange(300_000.0)}, "global_step": 3}


def engine() -> Engine:
    return Engine(None, None, lambda world: None, False)  # type: ignore[arg-type]


def known(path: Path, step: int, digest: str | None = None) -> wire.Checkpoint:
    return wire.Checkpoint(path=str(path), step=step, digest=digest or digest_of(str(path)), life=1)


def chosen(*checkpoints: wire.Checkpoint, divided: bool = False) -> str:
    with newest(engine(), checkpoints, divided=divided) as (opened, _):
        return Path(opened.path).read_text() if Path(opened.path).is_file() else opened.name


def texts(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).write_text(name)
    return [folder / name for name in names]


def test_the_newest_that_is_as_it_was_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    c, b, a = (known(path, step) for step, path in zip((7, 5, 3), texts(tmp_path, "c", "b", "a"), strict=True))
    assert chosen(c, b, a) == "c"
    Path(c.path).write_text("changed")
    assert chosen(c, b, a) == "b"
    Path(b.path).unlink()
    with caplog.at_level(logging.ERROR):
        assert chosen(c, b, a) == "a"
    assert f"checkpoint_rejected path={c.path} step=7 expected={c.digest} found={digest_of(c.path)}" in caplog.text
    assert f"path={b.path} step=5 expected={b.digest} found=rank 0: [Errno 2] No such" in caplog.text


def test_without_one_an_error_names_paths_and_digests(tmp_path: Path) -> None:
    path, gone = texts(tmp_path, "x", "gone")
    before, other = known(path, 7), known(gone, 5)
    path.write_text("y")
    gone.unlink()
    with pytest.raises(CheckpointsChanged) as caught:
        chosen(before, other)
    assert f"{path} has {digest_of(str(path))}, expected {before.digest} (and 1 older" in str(caught.value)
    with pytest.raises(CheckpointsChanged, match=r"gone has rank 0: \[Errno 2\] No such file or directory"):
        chosen(other)


def test_a_folder_that_is_read_in_parts(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    texts(folder, "a", "b", "c")
    one = known(folder, 1)
    assert chosen(one, divided=True) == chosen(one) == str(folder)
    texts(folder, "d")
    with pytest.raises(CheckpointsChanged, match=r"folder has [0-9a-f]{64}, expected"):
        chosen(one, divided=True)


def test_ranks_must_agree() -> None:
    x, y = _Seen(digests={"": "x"}), _Seen(digests={"": "y"})
    assert _agreed([x, x], divided=False) == "x"
    assert _agreed([y, x], divided=False) == "x and y on different ranks"
    assert _agreed([x, _Seen(error="gone")], divided=False) == "rank 1: gone"
    assert _agreed([x, y], divided=True) == "x and y on different ranks", "each has read all of a file"
    assert _agreed([x, x], divided=True) == "x"


def test_a_pipe_at_the_path_does_not_stop_the_task(tmp_path: Path) -> None:
    """Opening a pipe waits for its other end."""
    path = tmp_path / "x"
    os.mkfifo(path)
    with pytest.raises(CheckpointsChanged, match="no regular file or folder"):
        chosen(known(path, 1, "0" * 64))


class Folder(CheckpointIO):
    """Writes a checkpoint as a folder, or not at all."""

    writes = True

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if self.writes:
            Path(path).mkdir()
            (Path(path) / "part").write_text("x")

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def remove_checkpoint(self, path: Any) -> None: ...


@pytest.mark.parametrize("plugin", [TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())])
def test_the_default_plugin_and_that_in_the_background(plugin: CheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.ckpt"
    digest = write_checkpoint(plugin, CONTENT, str(path), None)
    assert digest == digest_of(str(path)) and torch.load(path)["global_step"] == 3
    assert [file.name for file in path.parent.iterdir()] == ["x.ckpt"]
    with pytest.raises(AttributeError):
        write_checkpoint(plugin, {"local": lambda: 0}, str(path), None)
    assert [file.name for file in path.parent.iterdir()] == ["x.ckpt"] and digest == digest_of(str(path))


def test_other_plugins_are_read_back(tmp_path: Path) -> None:
    plugin = Folder()
    assert write_checkpoint(plugin, CONTENT, str(tmp_path / "x"), None) == digest_of(str(tmp_path / "x"))
    plugin.writes = False
    assert write_checkpoint(plugin, CONTENT, str(tmp_path / "y"), None) == ""


def test_a_url_stays_a_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/x.ckpt"
    assert located(url) == url and located("x") == str(Path.cwd() / "x")
    digest = write_checkpoint(TorchCheckpointIO(), CONTENT, url, None)
    assert digest == digest_of(str(tmp_path / "x.ckpt"))
    with newest(engine(), [wire.Checkpoint(path=url, step=3, digest=digest, life=1)], divided=False) as (opened, _):
        assert opened.path == url


def test_the_file_is_readable_as_the_umask_says(tmp_path: Path) -> None:
    write_checkpoint(TorchCheckpointIO(), CONTENT, str(tmp_path / "x"), None)
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode
