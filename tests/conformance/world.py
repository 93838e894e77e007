"""One of the processes of a world, which run scenarios together. They are forked by a prepared one, under torchrun.

``plan-WORLD.json`` in the folder, for which the process waits, has the strategy and the names of scenarios, by number.
A process writes the record of each as ``NUMBER.RANK.json``. It ends after the last scenario; and, with ``unicron``,
after one in which an error has ended a run, as the coordinator then removes the worker from its task.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import torch.distributed as dist
from conformance.lab import Lab
from conformance.net import processes
from conformance.running import record_of
from conformance.table import Scenario, scenarios

WAIT_SECONDS: Final = 15.0
"""Most that a process waits for the others: in a collective of ddp, and after a scenario."""
FAILED_SECONDS: Final = 2.0
"""Most that a process whose run is ended by an error waits for those of the others: not all have one."""
DDP: Final = "ddp_find_unused_parameters_true"
"""Of ddp's trainers; without it, modules with several optimizers are refused."""
BROKEN_OFF: Final = "broken_off"
"""Entry of a record: whether an error has ended a run of a trainer."""


def meeting(folder: Path, name: str, seconds: float) -> Callable[[], bool]:
    """Return a function that waits until all processes have called it as often; it returns whether they have."""
    times, rank = itertools.count(), os.environ["RANK"]

    def meet() -> bool:
        place = f"{name}{next(times)}"
        (folder / f"{place}.{rank}").touch()
        limit = time.monotonic() + seconds
        while not (met := all((folder / f"{place}.{each}").exists() for each in range(processes()))):
            if time.monotonic() > limit:
                break
            time.sleep(0.002)
        return met

    return meet


def prepare() -> None:
    """Import the scenarios, in a process that is to be forked."""
    scenarios()


def must(meet: Callable[[], bool]) -> None:
    """Meet, or end this process."""
    if not meet():
        sys.exit(f"not all processes have come within {WAIT_SECONDS} s")


def run_one(number: str, scenario: Scenario, strategy: str, out: Path) -> bool:
    """Run a scenario, and write its record; return whether a run was broken off in any process."""
    rank = int(os.environ["RANK"])
    meet, folder = partial(must, meeting(out, f"{number}.met", WAIT_SECONDS)), out / f"{number}.files"
    failed = meeting(out, f"{number}.failed", FAILED_SECONDS)
    folder.mkdir(exist_ok=True)
    lab = Lab(DDP if strategy == "ddp" else strategy, folder, processes(), meet, failed)
    if strategy == "ddp":
        store, seconds = f"file://{out}/{number}.store", timedelta(seconds=WAIT_SECONDS)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes(), timeout=seconds)
    record_of(scenario, lab)
    lab.record[BROKEN_OFF] = lab.broken_off
    (out / f"{number}.{rank}.part").write_text(json.dumps(lab.record))
    (out / f"{number}.{rank}.part").rename(out / f"{number}.{rank}.json")
    meet()
    if strategy == "ddp":
        dist.destroy_process_group()
    return any(json.loads((out / f"{number}.{each}.json").read_text())[BROKEN_OFF] for each in range(processes()))


def main(out: Path, name: str) -> None:
    """Run the scenarios of a plan.

    Args:
        out: folder of plans and records.
        name: of the world.
    """
    # Each process is a node of its own: under ddp, which has one agent, too.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"])
    logging.getLogger("lightning").setLevel(logging.INFO)
    table = scenarios()
    while not (out / f"plan-{name}.json").exists():
        time.sleep(0.02)
    plan = json.loads((out / f"plan-{name}.json").read_text())
    try:
        for number, scenario in plan["names"].items():
            if run_one(number, table[scenario], plan["strategy"], out) and plan["strategy"] != "ddp":
                break
    finally:
        (out / f"over-{name}.{os.environ['RANK']}").touch()
