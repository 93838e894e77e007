"""Counts the differences between ``ddp`` and ``unicron`` over the matrix of Lightning's features (``tests/matrix``).

    python benchmarks/parity.py [--out FOLDER] [CASE...]

Each case is trained under ddp in a world of two, and under unicron, with the same declared world, in worlds of two and
of one. Compared are parameters, hooks (order, count, types of arguments), logged rows, metrics, samples of each step,
counters and checkpoints. The exit status is 1 if anything differs that README's table does not name.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from matrix.compare import differences, load
from matrix.features import cases
from matrix.running import run

RUNS = (("ddp", 2), ("unicron", 2), ("unicron", 1))
CHUNK = 12
"""Cases of one process."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the records; default: a temporary one")
    parser.add_argument("cases", nargs="*", help="default: all")
    options = parser.parse_args()
    out = Path(options.out or tempfile.mkdtemp(prefix="parity-")).resolve()
    chosen = {name: case for name, case in cases() if not options.cases or name in options.cases}
    names = list(chosen)
    for strategy, workers in RUNS:
        for first in range(0, len(names), CHUNK):
            status = run(strategy, workers, names[first : first + CHUNK], out / f"{strategy}-{workers}")
            print(
                f"{strategy}, {workers} workers, cases {first} to {first + CHUNK - 1}: exit status {status}", flush=True
            )
    total = 0
    for strategy, workers in RUNS[1:]:
        for name, case in chosen.items():
            found = differences(case, load(out / f"{strategy}-{workers}", name), load(out / "ddp-2", name))
            total += len(found)
            for what, said in found.items():
                print(f"{name}, {workers} workers: {what}{said}")
    print(f"{total} differences in {len(chosen)} cases x {len(RUNS) - 1} worlds")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
