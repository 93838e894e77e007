"""Measure what a worker's start consists of: the imports of torch, of Lightning, and of this package.

    python benchmarks/start_up.py [--runs 5] [--rejoins 3]

Prints, for fresh interpreters:

    modules   processor time [s] to import torch, then Lightning, then the strategy; and after torch, what a loop of
              `unicron_lightning.Run` imports: the smallest of ``--runs``, which is that of the least disturbed
              interpreter
    packages  the packages with the largest share of it (``-X importtime``)
    memory    of a process that has imported everything and has forked a worker: what both share, and what the
              process keeps for itself beyond that
    fork      time [s] from the request until the worker has begun: the smallest of ``--runs``

and for a task of two workers, with ordinary starts (`--rdzv-conf prepare=false`) and with prepared ones:

    first step   time [s] from the start of the agents until a worker has ended a step
    rejoin       time [s] from the SIGKILL of a worker until its replacement has ended a step, ``--rejoins`` times
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

STAGES: Final = {
    "torch": "import torch",
    "Lightning": "import lightning.pytorch",
    "this package": "import unicron_lightning.strategies.unicron",
}
LOOP: Final = "import torch._dynamo", "import unicron_lightning.loop.run"
"""Imports of a loop after that of torch; an optimizer imports the first one."""
_TIMED: Final = "import time; start = time.process_time(); {code}; print(time.process_time() - start)"
_LINE: Final = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +([\w]+)")
_SHOWN: Final = 8
_MOST_SECONDS: Final = 180.0
_PREPARE_SECONDS: Final = 10.0
"""Before the first kill: time for the imports of the agents' prepared processes."""
_FORK: Final = """
import gc, json, os, time
{imports}
gc.collect()
gc.freeze()
least = 1e9
for _ in range({runs}):
    reader, writer = os.pipe()
    stay, leave = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(leave)
        os.write(writer, b".")
        os.read(stay, 1)  # the end of the file
        os._exit(0)
    os.read(reader, 1)
    least = min(least, time.monotonic() - began)
    sizes = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    for each in (reader, writer, stay, leave):
        os.close(each)
    os.waitpid(pid, 0)
private, shared = (
    sum(int(sizes[f"{{kind}}_{{state}}"].split()[0]) for state in ("Clean", "Dirty")) / 1024
    for kind in ("Private", "Shared")
)
print(least, private, shared)
"""


def output(code: str, *options: str) -> tuple[str, str]:
    """Run code in a fresh interpreter; return its output and what it has written to stderr."""
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def stage_seconds(before: Sequence[str], code: str, runs: int) -> float:
    """Return the processor time of an import after others: the smallest of some interpreters."""
    first = "; ".join([*before, "pass"])
    return min(float(output(f"{first}\n{_TIMED.format(code=code)}")[0].split()[-1]) for _ in range(runs))


def packages(code: str) -> list[tuple[str, float]]:
    """Return the seconds of each top-level package in one interpreter, largest first."""
    seconds: Counter[str] = Counter()
    for line in output(code, "-X", "importtime")[1].splitlines():
        if (found := _LINE.match(line)) is not None:
            seconds[found[2]] += int(found[1]) / 1e6  # type: ignore[assignment] # Counter's values may be floats
    return seconds.most_common(_SHOWN)  # type: ignore[return-value]


def steps(folder: Path) -> list[tuple[int, float]]:
    """Return the steps that workers have noted, oldest first: process and time."""
    path = folder / "steps"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [(int(pid), float(at)) for pid, at in map(str.split, lines)]


def task_seconds(prepare: bool, rejoins: int) -> tuple[float, list[float]]:
    """Return the seconds to a task's first step, and from each kill to the replacement's first one."""
    began = time.time()
    script = Path(__file__).with_name("job_start.py")
    folder = Path(tempfile.mkdtemp())
    cluster = LocalCluster([script, folder], nodes=2, conf={"prepare": prepare}, folder=folder, stop_seconds=5.0)
    with cluster:
        first = until("a step", lambda: steps(folder), _MOST_SECONDS)[0][1] - began
        seconds = []
        time.sleep(_PREPARE_SECONDS)
        for _ in range(rejoins):
            workers = until(
                "steps of both nodes",
                lambda: (
                    found
                    if {each[0] for each in steps(folder)[-8:]} >= (found := _workers(cluster)) and len(found) == 2
                    else None
                ),
                _MOST_SECONDS,
            )
            known = {pid for pid, _ in steps(folder)}
            at, victim = time.time(), max(workers)
            os.kill(victim, signal.SIGKILL)
            joined = until(
                "the replacement's step",
                lambda known=known: [t for pid, t in steps(folder) if pid not in known],
                _MOST_SECONDS,
            )
            seconds.append(joined[0] - at)
        (folder / "stop").touch()
        cluster.wait_exit(60)
    return first, seconds


def _workers(cluster: LocalCluster) -> set[int]:
    return {pid for node in cluster.agents for pid in cluster.workers(node).values()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="interpreters of each kind (default: %(default)s)")
    parser.add_argument("--rejoins", type=int, default=3, help="kills in each task (default: %(default)s)")
    options = parser.parse_args()
    runs = options.runs
    codes = list(STAGES.values())
    for place, (name, code) in enumerate(STAGES.items()):
        print(f"{name:14} {stage_seconds(codes[:place], code, runs):6.2f} s of a processor", flush=True)
    for place, code in enumerate(LOOP):
        seconds = stage_seconds([codes[0], *LOOP[:place]], code, runs)
        print(f"a loop: {code.removeprefix('import '):26} {seconds:6.2f} s of a processor", flush=True)
    shares = ", ".join(f"{name} {seconds:.2f}" for name, seconds in packages("; ".join(codes)))
    print(f"by package, one interpreter with -X importtime: {shares}", flush=True)
    fork, private, shared = map(float, output(_FORK.format(imports="; ".join(codes), runs=runs))[0].split()[-3:])
    print(f"fork of a worker {1e3 * fork:.0f} ms; memory {shared:.0f} MB shared, {private:.0f} MB of the process alone")
    for prepare in (False, True):
        first, seconds = task_seconds(prepare, options.rejoins)
        rejoins = " ".join(f"{each:.2f}" for each in seconds)
        kind = "prepared" if prepare else "ordinary"
        print(
            f"{kind} starts: first step {first:.1f} s, rejoin {rejoins} s (load {os.getloadavg()[0]:.1f})", flush=True
        )


if __name__ == "__main__":
    main()
