"""Workers of one agent wait for each other's hooks after an error."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from unicron_lightning.worker.siblings import EndingSiblings

HOLDER = """
import sys, time
from pathlib import Path
from unicron_lightning.worker.siblings import EndingSiblings
EndingSiblings(Path(sys.argv[1])).begin()
print("begun", flush=True)
time.sleep(60)
"""


def test_three_workers_wait_for_the_one_that_takes_longest(tmp_path: Path) -> None:
    siblings = [EndingSiblings(tmp_path) for _ in range(3)]
    for each in siblings:
        each.begin()
    order: list[str] = []

    def run(number: int) -> None:
        time.sleep(0.2 * number)
        order.append("hooks")
        assert siblings[number].wait(60)
        order.append("leaves")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order == ["hooks"] * 3 + ["leaves"] * 3


def test_a_worker_that_is_killed_in_its_hooks_is_not_waited_for(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"begun\n"
        mine = EndingSiblings(tmp_path)
        mine.begin()
        assert not mine.wait(0.2)
        mine.begin()
        other.send_signal(signal.SIGKILL)
        assert mine.wait(60)


def test_without_an_error_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert EndingSiblings(tmp_path).wait(0)
    assert not (tmp_path / "ending").exists()
