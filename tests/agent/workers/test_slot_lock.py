"""The lock that keeps two agents' workers off the same accelerators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unicron_lightning.agent.workers.slot_lock import SlotLock

HOLD = """
import sys
from pathlib import Path
from unicron_lightning.agent.workers.slot_lock import SlotLock
lock = SlotLock("n", "0", Path(sys.argv[1]))
print(lock.acquire(), flush=True)
sys.stdin.read()
"""


def test_one_holds_it_and_its_death_frees_it(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    assert other.stdout.readline() == "True\n"
    mine = SlotLock("n", "0", tmp_path)
    assert not mine.acquire() and mine.holder() == str(other.pid)
    assert SlotLock("n", "1", tmp_path).acquire(), "another slot"
    other.kill()
    other.communicate()
    assert mine.acquire() and mine.acquire()
    mine.release()
    mine.release()
    assert SlotLock("n", "0", tmp_path).acquire()


def test_labels_make_no_paths(tmp_path: Path) -> None:
    lock = SlotLock("../../x", "a/b", tmp_path)
    assert lock.acquire()
    assert [path.parent for path in tmp_path.rglob("*.lock")] == [tmp_path]
    lock.release()
