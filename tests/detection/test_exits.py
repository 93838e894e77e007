"""Meanings of processes' ends; evidence of the OOM killer, on artificial folders and, where possible, real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_lightning import wire
from unicron_lightning.agent.workers.inspection import Deaths
from unicron_lightning.agent.workers.supervisor import Exit
from unicron_lightning.detection.exits import Memory, group_of, meaning, named_in

KILLED = Exit(cause="signal", code=9, pid=4711)


@pytest.mark.parametrize(
    ("cause", "code", "words"),
    [
        ("exit", 1, "exit 1: an uncaught exception, in Python"),
        ("exit", 3, "exit 3"),
        ("exit", 127, "exit 127: the command was not found"),
        ("exit", 137, "exit 137: as a shell reports SIGKILL: killed from outside"),
        ("exit", 143, "exit 143: as a shell reports SIGTERM: asked to end"),
        ("signal", 9, "signal 9 (SIGKILL): killed from outside"),
        ("signal", 11, "signal 11 (SIGSEGV): it touched memory that is not its own"),
        ("signal", 64, "signal 64 (SIGRTMAX)"),
        ("signal", 50, "signal 50"),
    ],
)
def test_statuses_and_signals_are_told_in_words(cause, code: int, words: str) -> None:
    assert meaning(cause, code) == meaning(cause, code, before=Memory(group_kills=1), after=Memory(group_kills=1))
    assert (meaning(cause, code).kind, meaning(cause, code).text) == (None, words)
    assert meaning(cause, code, dumped=True).text == f"{words}, core dumped"


@pytest.mark.parametrize("end", [("signal", 9), ("exit", 137)])
def test_the_oom_killer_is_told_apart_by_its_counters(end) -> None:
    quiet, one = Memory(group_kills=2, machine_kills=7), Memory(group_kills=3, machine_kills=8)
    assert meaning(*end, before=quiet, after=one).kind == "out_of_memory"
    assert meaning(*end, before=quiet, after=Memory(group_kills=2, machine_kills=8)).kind is None, "another group's"
    assert meaning(*end, before=Memory(machine_kills=7), after=one).kind == "out_of_memory"
    assert meaning(*end, named=True).text.endswith("(the kernel's log names it)")
    assert meaning("signal", 15, before=quiet, after=one).kind is None


def test_a_bus_error_with_full_shared_memory() -> None:
    assert meaning("signal", 7, after=Memory(shared_percent=99.6)).kind == "out_of_memory"
    assert meaning("signal", 7, after=Memory(shared_percent=12.0)).kind is None


def test_the_kernel_s_log_names_processes() -> None:
    lines = [
        "3,1234,5678,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:9000kB, anon-rss:1kB",
        "6,1235,5679,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/x,task=python,pid=815,uid=0",
    ]
    assert [named_in(lines, pid) for pid in (4711, 815, 47, 9000)] == [True, True, False, False]


def made_up(root: Path, version: int) -> Path:
    """Create a machine with one memory cgroup; return the file with its counter."""
    (root / "proc/4711").mkdir(parents=True)
    (root / "proc/vmstat").write_text("pgfault 9\noom_kill 7\n")
    if version == 2:
        (root / "proc/4711/cgroup").write_text("0::/job.slice/task\n")
        file = root / "sys/fs/cgroup/job.slice/task/memory.events"
        text = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 0\n"
    else:
        (root / "proc/4711/cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/job\n0::/\n")
        file = root / "sys/fs/cgroup/memory/job/memory.oom_control"
        text = "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("version", [1, 2])
def test_counters_of_both_kinds_of_cgroups_are_read(tmp_path: Path, version: int) -> None:
    file = made_up(tmp_path, version)
    deaths = Deaths(tmp_path)
    deaths.found(4711)
    (tmp_path / "proc/vmstat").write_text("oom_kill 8\n")
    assert deaths.tell("w", KILLED).kind is None, "elsewhere on the machine"
    file.write_text(file.read_text().replace("oom_kill 0", "oom_kill 1"))
    died = deaths.tell("w", KILLED)
    assert (died.kind, died.code) == ("out_of_memory", 9)
    assert "oom_kill of its cgroup: 1" in died.meaning
    assert deaths.tell("w", KILLED).kind is None, "one kill explains one death"
    report = wire.ErrorReport(
        worker="w",
        kind="exited_abnormally",
        cause="x",
        phase="data",
        step=1,
        at=1.0,
        details={"pattern": "data-worker-signal", "message": "DataLoader worker (pid 9) is killed by signal: Killed. "},
    )
    assert deaths.explain(report).kind == "exited_abnormally"
    file.write_text(file.read_text().replace("oom_kill 1", "oom_kill 2"))
    assert deaths.explain(report).kind == "out_of_memory"
    deaths.close()


def test_what_cannot_be_read_is_no_evidence(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path)
    deaths.found(4711)
    assert deaths.now() == Memory()
    assert deaths.tell("w", KILLED).meaning == "signal 9 (SIGKILL): killed from outside"
    assert deaths.tell("w", Exit(cause="exit", code=0)).meaning == ""
    deaths.close()


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Create a real memory cgroup with little memory; skip where that is impossible."""
    own = group_of(Path("/proc/self/cgroup").read_text())
    mount = Path("/sys/fs/cgroup/memory") if "memory" in own else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if "memory" in own else "memory.max"
    folder = mount / own.get("memory", own.get("", "/")).lstrip("/") / f"unicron-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(48 << 20))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_a_real_oom_kill_is_seen(small_group: Path) -> None:
    script = (
        f"import os, sys; open({str(small_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "data = []\nwhile True: data.append(bytearray(os.urandom(1 << 20)))\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        deaths = Deaths()
        deaths.found(process.pid)
        if deaths.now().group_kills is None:
            process.kill()
            pytest.skip("the cgroup's counter of kills cannot be read here")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGKILL
        died = deaths.tell("w", Exit(cause="signal", code=9, pid=process.pid))
        deaths.close()
    assert died.kind == "out_of_memory"
