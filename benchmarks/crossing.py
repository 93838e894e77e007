"""Crosses random scripts with random histories of deaths, and compares each with the same script in one process.

    python benchmarks/crossing.py [--minutes M] [--seed S] [--exact] [--shrink] [--plant FAULT] [--case JSON]

Each case runs in a world of two to four workers under real torchrun agents, with deaths at random places of hooks,
forwards, backwards and of the product's functions, and once in one process without any. One case in four is of
megatron-core, if that is installed: these run in a world of their own, as they patch torch. Parameters, buffers,
optimizers, schedulers, metrics and counters must agree; with ``--exact`` in all bits, in the reproducible mode and in
worlds of up to six workers. A case that fails is printed as a line for `KEPT` in
`tests/cross/test_cross.py`. The exit status is 1 if any has failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cross.cases import Case, draw
from cross.planted import FAULTS
from cross.running import Verdict, run, shrink
from joins.running import Site, site

AT_ONCE = 3
"""Cases that run beside each other."""
MEGATRON = "unicron_megatron"


class Places:
    """Where cases run.

    Args:
        folder: for outputs.
        stack: ends what is started.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._sites: dict[str, Site] = {}
        self._lock = threading.Lock()

    def of(self, case: Case) -> Site:
        """Return the site of a case, which is started if it is the first one of its kind."""
        modules = ("cross.megatron",) if case.script.strategy == MEGATRON else ()
        name = "-".join(("site", *modules))
        with self._lock:
            if name not in self._sites:
                self._sites[name] = self._stack.enter_context(site(self._folder / name, *modules))
            return self._sites[name]

    def run(self, name: str, case: Case) -> Verdict:
        """Run a case."""
        return run(self.of(case), name, case)


def drawn(seed: int, planted: str, *, exact: bool = False) -> Case:
    """Draw the case of a seed."""
    if exact:
        return replace(draw(seed, exact=True), planted=planted)
    megatron = not planted and find_spec("megatron.core") is not None and seed % 4 == 3
    return replace(draw(seed, megatron=megatron), planted=planted)


def kinds(verdict: Verdict) -> list[str]:
    """Return the kinds by which cases are counted."""
    script = verdict.case.script
    deaths = [f"deaths: {verdict.died}", f"joined: {min(verdict.joined, 4)}"]
    orders = [f"order: {each}" for each in verdict.given]
    against = f"against: {'Lightning alone' if verdict.case.plain else 'the strategy in one process'}"
    strategy = " ".join(filter(None, (script.strategy, f"S={script.shard_size}", script.layout)))
    names = ("norm", "dropout", "mixed", "scaler", "clip", "zero")
    parts = [f"with: {name}" for name in names if getattr(script, name)]
    parts += [f"with: {name}" for name in ("ema", "swa") if name in script.hooks]
    parts += [f"with: {each}" for each in ["manual"] if script.optimizer == each]
    parts += [f"with: witness, {'manual' if script.optimizer == 'manual' else script.data}"] if script.witness else []
    parts.append(f"workers: {script.workers}")
    data = [f"data: {script.data}", f"saves: {script.saves or 'nothing'}"]
    return [strategy, *data, *deaths, *orders, *parts, against]


def report(verdict: Verdict) -> None:
    """Print what came of a case."""
    print(
        f"{'FAILED' if verdict.faults else 'passed'} {verdict.case.text()} died {verdict.died} joined {verdict.joined}"
    )
    for fault in verdict.faults:
        print(f"   fault: {fault[:400]}")
    print(verdict.log, flush=True)


def hunt(places: Places, first: int, minutes: float, *, shrinks: bool, planted: str, exact: bool) -> int:
    """Run cases, some at a time, from a seed on; return the number that failed: one if a fault is planted."""
    limit, found, failed, seconds, cases = time.monotonic() + 60 * minutes, Counter[str](), 0, 0.0, 0
    seeds, lock = count(first), threading.Lock()

    def work() -> None:
        nonlocal failed, seconds, cases
        while time.monotonic() < limit and not (planted and failed):
            with lock:
                seed = next(seeds)
            verdict = places.run(f"seed{seed}", drawn(seed, planted, exact=exact))
            with lock:
                cases, seconds, failed = cases + 1, seconds + verdict.seconds, failed + bool(verdict.faults)
                found.update(kinds(verdict))
            if verdict.faults:
                smallest = shrink(places.of(verdict.case), verdict) if shrinks else verdict
                with lock:
                    print(f"seed {seed}:", end=" ")
                    report(smallest)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(work) for _ in range(AT_ONCE)]:
            done.result()
    print(f"{cases} cases, {failed} failed, {seconds / max(1, cases):.1f} s each")
    for kind, number in sorted(found.items()):
        print(f"   {kind}: {number}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="in the reproducible mode: the same bits")
    parser.add_argument("--shrink", action="store_true", help="reduce a case that fails to a smaller one")
    parser.add_argument("--plant", choices=sorted(FAULTS), default="", help="a former fault that the product has again")
    parser.add_argument("--case", help="run this one: a line of a former run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cross-") as folder, ExitStack() as stack:
        places = Places(Path(folder), stack)
        if arguments.case:
            verdict = places.run("case", Case.from_text(arguments.case))
            report(verdict)
            return int(bool(verdict.faults))
        options = {"shrinks": arguments.shrink, "planted": arguments.plant, "exact": arguments.exact}
        return int(hunt(places, arguments.seed, arguments.minutes, **options) > 0)


if __name__ == "__main__":
    sys.exit(main())
