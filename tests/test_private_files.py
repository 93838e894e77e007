"""This user's folder in one that all can write to: another user's earlier folder or file is refused."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from unicron_lightning.agent.agent import ScratchFolder
from unicron_lightning.agent.workers.slot_lock import SlotLock
from unicron_lightning.coordinator.storage import prepare_state_dir
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import default_state_dir, make_private, user_path

STRANGER = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_all_of_it_is_private(temporary: Path) -> None:
    folder = make_private(user_path() / "a" / "b")
    assert folder == temporary / f"unicron-{os.getuid()}" / "a" / "b"
    assert [mode(each) for each in (user_path(), user_path() / "a", folder)] == [0o700] * 3
    (user_path() / "a").chmod(0o755)
    make_private(folder)
    assert mode(user_path() / "a") == 0o700


def test_a_folder_that_others_can_write_to_is_refused() -> None:
    user_path().mkdir()
    user_path().chmod(0o777)
    with pytest.raises(ConfigError, match=r"unicron-\d+ has mode 0777, others can write to it: expected 0700"):
        make_private(user_path() / "state")
    assert not (user_path() / "state").exists()


def test_a_symbolic_link_is_refused(temporary: Path) -> None:
    (temporary / "elsewhere").mkdir(mode=0o700)
    user_path().symlink_to(temporary / "elsewhere")
    with pytest.raises(ConfigError, match="is a symbolic link: expected a folder of yours"):
        make_private(user_path())
    user_path().unlink()
    make_private(user_path())
    (user_path() / "slots").symlink_to(temporary / "elsewhere")
    with pytest.raises(ConfigError, match="slots is a symbolic link"):
        SlotLock("n", "0").acquire()


@as_root
def test_another_users_folder_is_refused() -> None:
    user_path().mkdir(mode=0o700)
    os.chown(user_path(), STRANGER, STRANGER)
    for use in (
        lambda: prepare_state_dir(default_state_dir("127.0.0.1", 1)),
        lambda: SlotLock("n", "0").acquire(),
        ScratchFolder,
    ):
        with pytest.raises(ConfigError, match=rf"belongs to user {STRANGER}, not to you \({os.getuid()}\)"):
            use()


@as_root
def test_a_folder_that_others_own_or_can_rename_in_is_refused(temporary: Path) -> None:
    temporary.chmod(0o777)
    with pytest.raises(ConfigError, match="has mode 0777, any user can replace its contents: expected 1777"):
        make_private(user_path())
    temporary.chmod(0o755)
    os.chown(temporary, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}: expected root or you"):
        make_private(user_path())


def test_a_link_in_the_place_of_a_lock_is_not_followed(temporary: Path) -> None:
    victim = temporary / "victim"
    victim.write_text("precious")
    lock = SlotLock("n", "0")
    make_private(user_path() / "slots")
    (user_path() / "slots" / "n%2F0.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        lock.acquire()
    assert victim.read_text() == "precious"


def test_a_named_folder_must_be_the_users(tmp_path: Path) -> None:
    named = make_private(tmp_path / "named" / "deep")
    assert named.is_dir()
    if os.getuid() == 0:
        os.chown(named, STRANGER, STRANGER)
        with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}"):
            make_private(named)
