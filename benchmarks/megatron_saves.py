"""Measure how long a save of a Megatron model holds the training thread: `UnicronCheckpoint` and `ModelCheckpoint`.

    python benchmarks/megatron_saves.py [--layers 6] [--hidden 384] [--saves 5] [--zero1]

Two replicas of one worker each save the toy GPT every six steps; the first two saves, whose memory is new, do not
count. The figures are medians of one save: wall time, with the waits for its copy, and the thread's processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "megatron")]

SKIPPED = 2
EVERY = 6


def timed(function: Callable[..., Any], kind: str, log: Any) -> Callable[..., Any]:
    """Log wall and processor time of each call."""

    def run(*arguments: Any, **named: Any) -> Any:
        wall, used = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            times = [kind, time.perf_counter() - wall, time.thread_time() - used]
            log.write(json.dumps(times) + "\n")

    return run


def work(folder: Path) -> None:
    """Train, in one worker."""
    import os

    import train  # type: ignore[import-not-found]  # tests/megatron
    from lightning.pytorch.callbacks import ModelCheckpoint

    from unicron_lightning.callbacks import UnicronCheckpoint
    from unicron_lightning.strategies.state.checkpointing import Persisting

    log = (folder / f"times-{os.getpid()}.jsonl").open("w", buffering=1)
    beside = json.loads((folder / "settings.json").read_text())["beside"]
    saver: Any = UnicronCheckpoint if beside else ModelCheckpoint
    saver._save_checkpoint = timed(saver._save_checkpoint, "save", log)
    waits: Any = Persisting
    waits.settle = timed(Persisting.settle, "wait", log)
    train.main()


def measure(arguments: argparse.Namespace, *, beside: bool) -> tuple[float, float]:
    """Return the median milliseconds of a save: wall and processor time."""
    from system.cluster import Cluster
    from system.megatron import MODEL, ZERO1

    toy = {"layers": arguments.layers, "hidden": arguments.hidden, "heads": 6, "length": 32}
    steps = EVERY * (arguments.saves + SKIPPED)
    settings = {**MODEL, **(ZERO1 if arguments.zero1 else {}), "toy": toy, "steps": steps}
    settings |= {"save_every": EVERY, "beside": beside}
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        folder = Path(name)
        with Cluster(folder, script=Path(__file__), agents=2, nodes="2:2", settings=settings) as cluster:
            cluster.wait_exit(1000)
            cluster.wait_end()
        walls, used = [], []
        for path in folder.glob("times-*"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            saves = [number for number, line in enumerate(lines) if line[0] == "save"]
            for first, end in pairwise([*saves[SKIPPED:], len(lines)]):
                group = lines[first:end]  # the save, and the waits until the next one
                walls.append(sum(line[1] for line in group))
                used.append(sum(line[2] for line in group))
    return statistics.median(walls) * 1e3, statistics.median(used) * 1e3


def main() -> None:
    """Run both kinds and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("hidden", 384), ("saves", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--zero1", action="store_true", help="Megatron's distributed optimizer")
    arguments = parser.parse_args()
    found = {beside: measure(arguments, beside=beside) for beside in (False, True)}
    for beside, (wall, used) in found.items():
        print(f"{'UnicronCheckpoint' if beside else 'ModelCheckpoint'}: {wall:.1f} ms, {used:.1f} ms of the processor")
    print(f"ratio {found[True][0] / found[False][0]:.3f}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        work(Path(sys.argv[1]))
    else:
        main()
