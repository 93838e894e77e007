"""Digests of checkpoints: equal to those of sha256sum, while writing and afterwards."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import IO, cast

import pytest
import torch

from unicron_lightning.checkpoints.files import HashingFile, OpenCheckpoint, digest_of, total

LARGE = torch.arange(3_000_000, dtype=torch.float64)
"""24 MB: written in large pieces."""


def sha256sum(path: Path) -> str:
    return subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]


def test_the_digest_of_what_torch_writes_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with path.open("wb") as file:
        hashing = HashingFile(file)
        torch.save({"large": LARGE, "small": torch.ones(3), "text": "x"}, cast("IO[bytes]", hashing))
    assert hashing.digest == sha256sum(path) == digest_of(str(path)) == digest_of(f"file://{path}")
    assert torch.equal(torch.load(path)["large"], LARGE)


def test_a_failed_write_is_not_hidden() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        HashingFile(file).write(bytes(1 << 21))


def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    (path / "in").mkdir(parents=True)
    for name in ("b", "a", "in/c"):
        (path / name).write_text(name)
    return path


def test_the_digest_of_a_folder_is_that_of_its_manifest(tmp_path: Path) -> None:
    path = folder(tmp_path)
    said = subprocess.run(["sha256sum", "a", "b", "in/c"], cwd=path, capture_output=True, check=True).stdout
    assert digest_of(str(path)) == hashlib.sha256(said).hexdigest()
    opened = OpenCheckpoint(str(path))
    parts = [opened.digests(part, 2) for part in range(2)]
    opened.close()
    assert [len(part) for part in parts] == [2, 1] and total(parts[0] | parts[1]) == digest_of(str(path))


@pytest.mark.parametrize("change", ["content", "name", "more", "less", "link"])
def test_each_change_of_a_folder_changes_its_digest(change: str, tmp_path: Path) -> None:
    path = folder(tmp_path)
    before = digest_of(str(path))
    match change:
        case "content":
            (path / "in/c").write_text("d")
        case "name":
            (path / "a").rename(path / "z")
        case "more":
            (path / "new").touch()
        case "less":
            (path / "b").unlink()
        case "link":
            (path / "l").symlink_to("a")
    assert digest_of(str(path)) != before


def test_what_was_opened_is_read_whatever_is_moved_to_its_path(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_text("x")
    other.write_text("y")
    opened = OpenCheckpoint(str(path))
    other.replace(path)
    assert Path(opened.path).read_text() == "x" and opened.digests() == {"": hashlib.sha256(b"x").hexdigest()}
    opened.close()
    opened.close()
