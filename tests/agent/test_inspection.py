"""Whether a worker that does not answer hangs, or gets no CPU to answer on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unicron_lightning.agent.inspection import waits_for_cpu

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs the kernel's schedule counts")


async def test_a_process_that_others_keep_from_the_cpu_waits_for_it():
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(1, flush=True)\nwhile True:\n    pass"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=-1) for _ in range(5)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"1\n"
        deadline = time.monotonic() + 60
        while not await waits_for_cpu(processes[0].pid):
            assert time.monotonic() < deadline
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def test_one_that_sleeps_does_not_nor_does_one_that_is_gone():
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: ASYNC220 - nothing is read from it
        deadline = time.monotonic() + 60
        while await waits_for_cpu(process.pid):  # for its own start
            assert time.monotonic() < deadline
        process.kill()
        process.wait()
        assert not await waits_for_cpu(process.pid)
