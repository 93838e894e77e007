"""The user's own token: made once, closed to others, found by every process that needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unicron_lightning.credentials import Token, find_token, token_for
from unicron_lightning.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "unicron" / "token"


def test_it_is_made_once_and_closed_to_others(path: Path) -> None:
    before = os.umask(0)
    try:
        made = token_for("127.0.0.1", None)
    finally:
        os.umask(before)
    assert len(bytes.fromhex(made.secret)) == 32
    assert made.origin == str(path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert find_token(None, make=False) == made
    assert list(path.parent.iterdir()) == [path], "nothing is left of its making"
    assert made.secret not in repr(made)


def test_many_processes_at_once_agree(path: Path) -> None:
    code = "from unicron_lightning.credentials import token_for; print(token_for('localhost', None).secret)"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1


def test_a_named_file_comes_before_the_variable_and_that_before_the_users_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_for("::1", None)
    monkeypatch.setenv("UNICRON_TOKEN", "of the variable")
    assert find_token(None, make=True) == Token(secret="of the variable", origin="UNICRON_TOKEN")
    named = tmp_path / "named"
    named.write_text("of the file\n")
    assert find_token(str(named), make=True) == Token(secret="of the file", origin=str(named))


def test_beyond_loopback_none_is_made_but_one_that_is_there_is_used(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"copy the coordinator's token file to .*unicron/token; it must be the same"):
        token_for("192.0.2.1", None)
    assert not path.parent.exists()
    made = token_for("127.0.0.1", None)
    assert token_for("192.0.2.1", None) == made


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.chmod(0o640), "token has mode 0640, open to other users: expected 0600"),
        (lambda path: path.parent.chmod(0o755), "unicron has mode 0755, open to other users: expected 0700"),
        (lambda path: path.write_text("\n"), "is empty"),
        (_link, "symbolic links"),
        (lambda path: _link(path.parent), "Not a directory|symbolic links"),
        (_pipe, "no regular file"),
    ],
)
def test_what_others_could_have_changed_is_refused(spoil: Callable[[Path], None], words: str, path: Path) -> None:
    token_for("127.0.0.1", None)
    spoil(path)
    with pytest.raises(ConfigError, match=words) as caught:
        token_for("127.0.0.1", None)
    assert "or set UNICRON_TOKEN" in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("folder", [False, True])
def test_another_users_file_is_refused(folder: bool, path: Path) -> None:
    token_for("127.0.0.1", None)
    os.chown(path.parent if folder else path, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534, not to you"):
        token_for("127.0.0.1", None)
