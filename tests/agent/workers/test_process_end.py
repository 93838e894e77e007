"""A process's end is detected by its threads before it can be waited for; a thread's end alone is no process's end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from unicron_lightning.agent.workers.supervisor import Threads, _open, exit_status_of_dying, is_doomed

MEMORY = 400 << 20
PROGRAM = f"""
import os, sys, threading, time
memory = bytearray({MEMORY})
memory[::4096] = bytes(len(memory[::4096]))
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
word = sys.stdin.readline().strip()
if word == "thread":
    short = threading.Thread(target=sys.stdin.readline)
    short.start()
    print("begun", flush=True)
    short.join()
    print("over", flush=True)
    sys.stdin.readline()
else:
    os._exit(int(word))
"""


def supported() -> bool:
    """Whether the kernel reports the end of threads."""
    if (fd := _open(os.getpid())) is None:
        return False
    os.close(fd)
    return True


pytestmark = pytest.mark.skipif(not supported(), reason="needs Linux 6.9")


def begin() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True)


async def told_by_threads(strike: Callable[[subprocess.Popen[str]], None]) -> tuple[int, bool]:
    """Return the reported wait status, and whether waitpid did not return the process yet."""
    told: asyncio.Future[tuple[int, bool]] = asyncio.get_running_loop().create_future()
    with begin() as process:
        pidfd = os.pidfd_open(process.pid)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"

        def early() -> bool:
            return not select.select([pidfd], [], [], 0)[0]

        threads = Threads(process.pid, lambda status: told.set_result((status, early())))
        threads.watch()
        strike(process)
        result = await asyncio.wait_for(told, 30)
        os.close(pidfd)
        process.wait(30)
    return result


async def test_a_killed_process_is_known_before_its_memory_is_freed():
    status, early = await told_by_threads(lambda process: process.kill())
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert early


def test_a_killed_process_that_has_not_been_given_a_cpu_yet_is_doomed():
    """It shares one CPU with this process, and gets the rest of it."""
    busy = "print(1, flush=True)\nwhile True:\n    pass"
    allowed = os.sched_getaffinity(0)

    def seen() -> bool:
        with subprocess.Popen([sys.executable, "-c", busy], stdout=-1) as process:
            assert process.stdout is not None and process.stdout.readline() == b"1\n"
            assert not is_doomed(process.pid)
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            try:
                os.sched_setaffinity(0, {min(allowed)})
                os.sched_setaffinity(process.pid, {min(allowed)})
                process.kill()
                return is_doomed(process.pid)
            finally:
                os.sched_setaffinity(0, allowed)

    assert any(seen() for _ in range(20)), "now and then we are moved off the CPU just then"


async def test_an_exit_status_is_known_too():
    def leave(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("75\n")
        process.stdin.flush()

    status, _ = await told_by_threads(leave)
    assert os.waitstatus_to_exitcode(status) == 75


async def test_the_end_of_a_thread_is_not_that_of_its_process():
    told: list[int] = []
    with begin() as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("thread\n")
        process.stdin.flush()
        assert process.stdout.readline() == "begun\n"
        threads = Threads(process.pid, told.append)
        threads.watch()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "over\n"
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            assert exit_status_of_dying(process.pid) is None
        assert told == []
        threads.close()
        process.kill()
