"""Signals and files that have the effect of SIGTERM."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from unicron_lightning.agent.options import LeaveNotices, leave_signal
from unicron_lightning.errors import ConfigError
from unicron_lightning.local_cluster.processes import until


def test_names_of_signals() -> None:
    assert leave_signal("usr1", "") == leave_signal("SIGUSR1", "") == signal.SIGUSR1
    assert leave_signal(None, "") is leave_signal("", "") is None
    with pytest.raises(ConfigError, match=r"--leave-signal KILL: expected USR1 or USR2"):
        leave_signal("KILL", "--leave-signal ")


def test_a_signal_and_a_file_become_sigterm_until_they_are_closed(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    usual = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    path = tmp_path / "notice"
    notices = LeaveNotices(signal.SIGUSR2, path)
    try:
        signal.raise_signal(signal.SIGUSR2)
        until("the first", lambda: got == [signal.SIGTERM], 5)
        path.touch()
        until("the second", lambda: got == [signal.SIGTERM] * 2, 5)
        time.sleep(0.6)
        assert len(got) == 2, "a file counts once"
    finally:
        notices.close()
        assert signal.signal(signal.SIGUSR2, usual) == signal.SIG_IGN
        signal.signal(signal.SIGTERM, before)


def test_a_closed_one_ignores_the_file(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    notices = LeaveNotices(None, path)
    notices.close()
    path.touch()
    time.sleep(0.6)  # SIGTERM would end this process
