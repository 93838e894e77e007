"""A worker that ends before it is found is reported with its status and its output."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from unicron_lightning import environ
from unicron_lightning.agent.workers.supervisor import Exit, LastOutput, Supervisor

TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ModuleNotFoundError: x"]


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_only_a_rounds_own_lines_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    append(path, "of an earlier worker")
    output = LastOutput(own=path)
    output.begin(1)
    assert output.lines(0) == ()
    append(path, *TRACEBACK, "", "E1125 06:20:33.662000 1936 torch/distributed/x.py:1002] failed", "task_over task=t x")
    assert output.lines(0) == tuple(TRACEBACK)
    output.begin(1)
    assert output.lines(0) == ()


def test_long_output_is_cut_and_control_characters_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    output = LastOutput(own=path)
    output.begin(1)
    append(path, *(f"line {n} " + "x" * 1000 for n in range(500)), "\x1b[31mred\u202e\x07")
    lines = output.lines(0)
    assert len(lines) == 6 and lines[-1] == "[31mred" and max(map(len, lines)) == 200
    assert lines[-2].startswith("line 499")


def test_the_log_files_of_a_daemon_are_read_for_each_worker_also_if_rotated(tmp_path: Path) -> None:
    for rank in range(2):
        append(tmp_path / f"rank{rank}.log", "x" * 100)
    output = LastOutput(tmp_path)
    output.begin(2)
    append(tmp_path / "rank0.log", "zero", "---- 2026-11-25 06:00:00 torchrun ended with status 1")
    (tmp_path / "rank1.log").write_text("one\n")
    assert output.lines(0) == ("zero",) and output.lines(1) == ("one",)


def test_a_pipe_a_terminal_and_a_missing_file_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing"):
        output = LastOutput(own=tmp_path / name)
        output.begin(1)
        assert output.lines(0) == ()


def begin(*command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE)


def wait_without_reaping(process: subprocess.Popen[bytes]) -> None:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("command", "how"), [("exit 3", Exit(cause="exit", code=3)), ("kill -9 $$", Exit(cause="signal", code=9))]
)
async def test_a_child_that_ended_before_it_was_identified_has_its_own_status(command: str, how: Exit) -> None:
    supervisor = Supervisor("a", lambda process: None, lambda worker, how: None)
    with begin("sh", "-c", command) as process:
        wait_without_reaping(process)
        supervisor.expect(1, 1)
        ends = supervisor.end_round(Exit(cause="exit", code=1))
        assert {rank: (end.cause, end.code, end.pid) for rank, end in ends.items()} == {
            0: (how.cause, how.code, process.pid)
        }
        assert supervisor.end_round(how) == {}


async def test_a_child_that_was_reaped_has_the_assumed_status() -> None:
    supervisor = Supervisor("a", lambda process: None, lambda worker, how: None)
    supervisor.expect(1, 2)
    assumed = Exit(cause="exit", code=1)
    assert supervisor.end_round(assumed) == {0: assumed, 1: assumed}


async def test_a_worker_behind_a_wrapper_is_not_watched_but_its_wrapper() -> None:
    """The worker reports its own process, whose status its agent cannot read: a success looked like a failure."""
    found: list[int] = []
    end: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
    supervisor = Supervisor("a", lambda process: found.append(process.pid), lambda worker, how: end.set_result(how))
    identity = {**dict.fromkeys(environ.FROM_AGENT, "x"), environ.AGENT: "a", environ.AGENT_PID: str(os.getpid())}
    numbers = {environ.ROUND: "1", environ.BASE_RANK: "0", "RANK": "0"}
    command = ("sh", "-c", "sleep 300 & echo $!; wait; exit 0")
    with begin(*command, env={**os.environ, **identity, **numbers}) as wrapper:
        assert wrapper.stdout is not None
        worker = int(wrapper.stdout.readline())
        supervisor.expect(1, 1)
        supervisor.look_at(worker)
        os.kill(worker, signal.SIGKILL)
        assert found == [wrapper.pid]
        assert await asyncio.wait_for(end, 10) == Exit(cause="exit", code=0, pid=wrapper.pid)
