"""Diagnosis of a real process that does not answer: stopped, holding the interpreter's lock, or without a CPU."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unicron_lightning import stacks, wire
from unicron_lightning.agent.workers import inspection
from unicron_lightning.agent.workers.inspection import Frozen, frozen, look

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs the kernel's schedule counts")

THREADED = """
import ctypes, sys, threading, time

def ticks():
    while True:
        time.sleep(0.01)

threading.Thread(target=ticks, daemon=True).start()
print(1, flush=True)
"""
HOLDS = "\nwhile True:\n    ctypes.PyDLL(None).usleep(4_000_000_000)"
COMPUTES = "\nwhile True:\n    pow(3, 1 << 30)"
SLEEPS = "\ntime.sleep(600)"


def judged(pid: int, *expected: Frozen | None) -> bool:
    """Return whether the process is judged so within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = look(pid)
        time.sleep(0.3)
        if frozen(before, look(pid)) in expected:
            return True
    return False


@pytest.mark.parametrize(
    ("code", "expected"),
    [(HOLDS, ("holds",)), (COMPUTES, ("computes", None))],  # None: a busy machine keeps it from the CPU
)
def test_a_call_that_holds_the_lock(code: str, expected: tuple[Frozen | None, ...]) -> None:
    with subprocess.Popen([sys.executable, "-c", THREADED + code], stdout=-1) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"1\n"
            assert judged(process.pid, *expected)
        finally:
            process.kill()


def test_a_stopped_process_until_it_is_continued() -> None:
    with subprocess.Popen([sys.executable, "-c", THREADED + SLEEPS], stdout=-1) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"1\n"
            process.send_signal(signal.SIGSTOP)
            assert judged(process.pid, "stopped")
            process.send_signal(signal.SIGCONT)
            assert judged(process.pid, "holds"), "it sleeps: only a silent one is asked about"
        finally:
            process.kill()


async def test_a_process_that_others_keep_from_the_cpu_is_slow_only():
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(1, flush=True)\nwhile True:\n    pass"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=-1) for _ in range(5)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"1\n"
        assert judged(processes[0].pid, None)
    finally:
        for process in processes:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("stops", "gentle", "hangs"), [(True, True, True), (False, True, False), (False, False, True)])
async def test_gently_only_a_stopped_process_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool, gentle: bool, hangs: bool
) -> None:
    """A checkpoint may be written by a call that sleeps with the interpreter's lock."""

    async def captured(*about: object) -> str:
        return "File train.py"

    monkeypatch.setattr(inspection, "capture", captured)
    code = THREADED + (SLEEPS if stops else HOLDS)
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1) as process:  # noqa: ASYNC220
        supervisor = SimpleNamespace(find=lambda worker: SimpleNamespace(pid=process.pid, pidfd=-1))
        sent: list[wire.Message] = []
        inspector = inspection.Inspector(tmp_path, supervisor, sent.append)  # type: ignore[arg-type]
        about: dict[str, Any] = {"worker": "w", "cause": "silent", "phase": "checkpoint", "step": 7, "details": {}}
        try:
            assert process.stdout is not None and process.stdout.readline() == b"1\n"
            if stops:
                process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            deadline = time.monotonic() + (60 if hangs else 2)
            while not sent and time.monotonic() < deadline:
                inspector.asked(["w"])
                inspector.begin(wire.Inspect(**about, silent=True, gentle=gentle))
                await asyncio.sleep(0.4)
            assert bool(sent) is hangs
        finally:
            inspector.close()
            process.kill()


WITH_STACKS = """
import ctypes, pathlib, sys, threading
from unicron_lightning.stacks import StackFile

def busy():
    while True:
        [pathlib.Path("a") / str(number) for number in range(20)]

file = StackFile(pathlib.Path(sys.argv[1]))
threading.Thread(target=busy if sys.argv[2] == "busy" else time.sleep, args=sys.argv[3:], daemon=True).start()
print(1, flush=True)
"""
BUSY = "\nbusy()"


def recording(folder: Path, code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a process with a stack file, and wait until it has one."""
    command = [sys.executable, "-c", "import time" + WITH_STACKS + code, str(folder), *arguments]
    process = subprocess.Popen(command, stdout=-1)
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    return process


async def test_a_process_that_executes_python_gives_its_stacks_and_lives(tmp_path: Path) -> None:
    """The signal's handler ended such a process by SIGSEGV after five to eleven dumps."""
    with recording(tmp_path, BUSY, "busy") as process:
        try:
            for _ in range(100):
                assert "in busy" in await stacks.ask(tmp_path, process.pid)
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize("code", [HOLDS, COMPUTES])
async def test_a_process_whose_lock_is_held_gives_its_stacks_by_the_signal(tmp_path: Path, code: str) -> None:
    with recording(tmp_path, code, "sleeps", "600") as process:
        supervisor = SimpleNamespace(find=lambda worker: SimpleNamespace(pid=process.pid, pidfd=pidfd))
        sent: list[Any] = []
        inspector = inspection.Inspector(tmp_path, supervisor, sent.append)  # type: ignore[arg-type]
        pidfd = os.pidfd_open(process.pid)
        try:
            about: dict[str, Any] = {"worker": "w", "cause": "slow", "phase": "compute", "step": 7, "details": {}}
            deadline = time.monotonic() + 60
            while not (sent and sent[-1].details["stacks"]) and time.monotonic() < deadline:
                inspector.begin(wire.Inspect(**about))
                await asyncio.sleep(0.2)
            assert "in <module>" in sent[-1].details["stacks"]
        finally:
            inspector.close()
            os.close(pidfd)
            process.kill()


async def test_a_stack_file_that_is_closed_gives_nothing(tmp_path: Path) -> None:
    file = stacks.StackFile(tmp_path)
    assert "in _answer" in await stacks.ask(tmp_path, os.getpid())
    file.close()
    file.close()
    assert not os.listdir(tmp_path)
    assert await stacks.ask(tmp_path, os.getpid()) == ""


def test_of_a_process_that_is_gone_nothing_is_said() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        before = look(process.pid)
        process.kill()
        process.wait()
        assert frozen(before, look(process.pid)) is None
