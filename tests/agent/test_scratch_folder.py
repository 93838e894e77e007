"""The agent's scratch folder: a path that is too long for its socket."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from unicron_lightning.agent.agent import ScratchFolder
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import user_path


@pytest.mark.parametrize("excess", [0, 1])
def test_the_longest_folder_for_temporary_files(excess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="long-") as folder:
        here = len(str(user_path())) - len(str(user_path().parent))
        name = "x" * (107 - len("/agent-12345678/socket") - here - len(folder) - 1 + excess)
        long = Path(folder) / name
        long.mkdir(mode=0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        if excess:
            with pytest.raises(
                ConfigError, match=f"TMPDIR={long}: too long.*expected at most {len(str(long)) - 1} bytes"
            ):
                ScratchFolder()
            return
        scratch = ScratchFolder()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(scratch.path / "socket"))
        scratch.close()
