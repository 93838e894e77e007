"""Counts the differences between ``ddp`` and ``unicron`` over the matrix of Lightning's features (``tests/matrix``).

    python benchmarks/parity.py [--out FOLDER] [--worlds one,two,killed] [CASE...]

Each case is trained under ddp in a world of two, and under unicron, with the same declared world, in a world of one, of
two, and of two with one worker killed by SIGKILL and replaced. Compared are parameters, hooks (order, count,
types of arguments), logged rows, the CSV file, metrics, results of validate and test, counters, checkpoints, the
samples of each batch of training and evaluation, and exit statuses. The exit status is 1 if anything differs that
docs/differences.md does not name, or if a difference that it names has not occurred.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from matrix.compare import Found, Run, compare
from matrix.documented import DOCUMENTED, WORLDS
from matrix.features import Case, cases
from matrix.killing import Kill
from matrix.pairs import pairs_of
from matrix.running import run, run_killed

CHUNK = 12
"""Cases of one process."""


def chunks(chosen: dict[str, Case]) -> Iterator[dict[str, Case]]:
    """Divide the cases among processes."""
    items = iter(chosen.items())
    while chunk := dict(itertools.islice(items, CHUNK)):
        yield chunk


def train(world: str, chosen: dict[str, Case], out: Path) -> Iterator[tuple[str, int]]:
    """Train the cases in a world (or "ddp"); yield what was run, and its exit status."""
    if world == "killed":
        for name, case in chosen.items():
            kill = Kill.of_case(name, case)
            yield f"{name}, {kill.plain()}", run_killed(name, case, kill, out / world / name)
        return
    strategy, workers = {"ddp": ("ddp", 2), "one": ("unicron", 1), "two": ("unicron", 2)}[world]
    for chunk in chunks(chosen):
        yield ", ".join(chunk), run(strategy, workers, chunk, out / world)


def report(world: str, chosen: dict[str, Case], out: Path) -> dict[str, Found]:
    """Compare the records of a world with ddp's, and print what was found."""
    results = {}
    for name, case in chosen.items():
        folder = out / world / name if world == "killed" else out / world
        results[name] = found = compare(case, world, Run.load(folder, name), Run.load(out / "ddp", name))
        for label, said in found.unexplained.items():
            print(f"{name}, {world}: {label}{said}")
    values = sum(each.values for each in results.values())
    different, unexplained = (sum(len(getattr(r, k)) for r in results.values()) for k in ("differences", "unexplained"))
    print(
        f"{world}: {len(chosen)} cases, {values} values, {different} differences, {unexplained} unexplained", flush=True
    )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the records; default: a temporary one")
    parser.add_argument("--worlds", default=",".join(WORLDS), help="default: %(default)s")
    parser.add_argument("--only-compare", action="store_true", help="compare the records that are in the folder")
    parser.add_argument("cases", nargs="*", help="default: all")
    options = parser.parse_args()
    out = Path(options.out or tempfile.mkdtemp(prefix="parity-")).resolve()
    chosen = {name: case for name, case in cases() if not options.cases or name in options.cases}
    worlds = options.worlds.split(",")
    print(f"{len(chosen)} cases, {len(set().union(*map(pairs_of, chosen.values())))} pairs of features; records: {out}")
    found: list[Found] = []
    for world in ("ddp", *worlds):
        begun = time.monotonic()
        for what, status in () if options.only_compare else train(world, chosen, out):
            print(f"{world}, {time.monotonic() - begun:.0f} s: exit status {status}: {what}", flush=True)
        if world != "ddp":
            found += report(world, chosen, out).values()
    missed = {each.name for each in DOCUMENTED}.difference(*(each.occurred for each in found))
    complete = not options.cases and set(worlds) == set(WORLDS)
    print(f"documented differences: {len(DOCUMENTED)}, of which {len(missed)} have not occurred: {sorted(missed)}")
    return int(any(each.unexplained for each in found) or (complete and bool(missed)))


if __name__ == "__main__":
    sys.exit(main())
