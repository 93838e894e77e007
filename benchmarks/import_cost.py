"""Measure the import cost of this package, in time and modules, for a process that only imports torch.

Prints the median, over ``--runs`` fresh interpreters, of the time to import and install `unicron_lightning.autoload`
after torch has been imported without it. Bytecode is compiled beforehand, as pip leaves it. The limit is 1 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import torch, sys, time
before = set(sys.modules)
start = time.perf_counter()
from unicron_lightning.autoload import install
install()
elapsed = time.perf_counter() - start
print(elapsed * 1e3, len(set(sys.modules) - before))
"""


def measure(bytecode: str) -> tuple[float, int]:
    """Run one interpreter; return milliseconds and the number of imported modules."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", CODE]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    milliseconds, modules = output.split()
    return float(milliseconds), int(modules)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="interpreters to start (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as bytecode:
        measure(bytecode)  # compiles
        runs = [measure(bytecode) for _ in range(arguments.runs)]
    times = sorted(milliseconds for milliseconds, _ in runs)
    print(
        f"import torch costs {statistics.median(times):.2f} ms more (from {times[0]:.2f} to {times[-1]:.2f}, "
        f"{len(times)} interpreters) and {max(count for _, count in runs)} modules more"
    )


if __name__ == "__main__":
    main()
