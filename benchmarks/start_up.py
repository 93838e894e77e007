"""Measure what a worker's start consists of: the imports of torch, of Lightning, and of this package.

    python benchmarks/start_up.py [--runs 5]

Prints, for fresh interpreters:

    modules   processor time [s] to import torch, then Lightning, then the strategy: the smallest of ``--runs``, which
              is that of the least disturbed interpreter
    packages  the packages with the largest share of it (``-X importtime``)
    memory    of a process that has imported everything and has forked a worker: what both share, and what the
              process keeps for itself beyond that
    fork      time [s] from the request until the worker has begun: the smallest of ``--runs``
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Final

STAGES: Final = {
    "torch": "import torch",
    "Lightning": "import lightning.pytorch",
    "this package": "import unicron_lightning.strategies.unicron",
}
_TIMED: Final = "import time; start = time.process_time(); {code}; print(time.process_time() - start)"
_LINE: Final = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +([\w]+)")
_SHOWN: Final = 8
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="interpreters of each kind (default: %(default)s)")
    runs = parser.parse_args().runs
    codes = list(STAGES.values())
    for place, (name, code) in enumerate(STAGES.items()):
        print(f"{name:14} {stage_seconds(codes[:place], code, runs):6.2f} s of a processor", flush=True)
    shares = ", ".join(f"{name} {seconds:.2f}" for name, seconds in packages("; ".join(codes)))
    print(f"by package, one interpreter with -X importtime: {shares}", flush=True)
    fork, private, shared = map(float, output(_FORK.format(imports="; ".join(codes), runs=runs))[0].split()[-3:])
    print(f"fork of a worker {1e3 * fork:.0f} ms; memory {shared:.0f} MB shared, {private:.0f} MB of the process alone")


if __name__ == "__main__":
    main()
