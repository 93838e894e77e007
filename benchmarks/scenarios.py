"""Compares ``unicron`` with Lightning's own strategies over a table of scenarios (``tests/conformance``).

    python benchmarks/scenarios.py [--list] [--world N] [SCENARIO...]

Each scenario is a short script. It runs in this process under Lightning's strategy for one device (or ddp with one
process) and under ``unicron``, and all that was observed is compared: hooks with counters and stages, parameters,
metrics, states, files, warnings, messages, errors. The scenarios were written for this project from Lightning's
documented behaviour; they are not Lightning's own tests.

With ``--world 2`` or more, each but those for one worker runs in that many processes, under ddp and under ``unicron``
with a node for each, and the records of all ranks are compared. There are as many samples for each rank as in one
process, and values are logged with ``sync_dist=True``.

The exit status is 1 if a scenario differs that
``tests/conformance/documented.py`` does not name, if one differs at another place than is named there, or if one that
is named there does not differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conformance.documented import MOST, NAMED, PAIRED, TRIPLED
from conformance.running import differences, run
from conformance.table import Scenario, scenarios
from conformance.world import BROKEN_OFF
from conformance.worlds import run_worlds

TABLES = (NAMED, PAIRED, TRIPLED)
"""Scenarios that differ in one process, in two only, in three only; those of smaller worlds may differ, too."""
SHOWN = 4
"""Places of a record that are printed."""
Found = tuple[str, Any, Any]
"""A place of a record, and the values of ``unicron`` and of the reference."""


def judge(name: str, found: list[Found], size: int = 1) -> list[str]:
    """Return what is wrong with a scenario's differences, in lines."""
    known = [table[name] for table in TABLES[:size] if name in table]
    if name in TABLES[min(size, len(TABLES)) - 1] and not found:
        return ["   does not differ, but documented.py names it"]
    unexplained = [each for each in found if not any(named.explains(each[0]) for named in known)]
    return [
        f"   {place}:\n      unicron   {str(mine)[:200]}\n      reference {str(theirs)[:200]}"
        for place, mine, theirs in unexplained[:SHOWN]
    ]


def compared(chosen: dict[str, Scenario]) -> Iterator[tuple[str, list[Found]]]:
    """Run scenarios in this process; yield the differences."""
    for name, scenario in chosen.items():
        yield name, list(differences(run(scenario, "unicron"), run(scenario, scenario.reference)))


def seen(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a record without its entry about the processes: whether others are needed after it."""
    return record and {name: each for name, each in record.items() if name != BROKEN_OFF}


def compared_in_worlds(chosen: dict[str, Scenario], size: int) -> Iterator[tuple[str, list[Found]]]:
    """Run scenarios in worlds of several processes; yield the differences of all ranks."""
    out = Path(tempfile.mkdtemp(prefix="worlds-")).resolve()
    with ThreadPoolExecutor() as pool:  # each mostly waits for its processes
        runs = [pool.submit(run_worlds, each, list(chosen), out / each, size) for each in ("unicron", "ddp")]
        mine, theirs = (each.result() for each in runs)
    for name in chosen:
        ranks = [differences(*map(seen, pair)) for pair in zip(mine[name], theirs[name], strict=True)]
        yield name, [(f"{place}, rank {rank}", a, b) for rank, found in enumerate(ranks) for place, a, b in found]
    shutil.rmtree(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--world", type=int, default=1, metavar="N", help="number of processes")
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    options = parser.parse_args()
    chosen = {
        name: each
        for name, each in scenarios().items()
        if (not options.names or name.startswith(tuple(options.names))) and not (each.alone and options.world > 1)
    }
    if options.list:
        print("\n".join(chosen))
        return 0
    assert len(NAMED) <= MOST and (NAMED | PAIRED | TRIPLED).keys() <= scenarios().keys()
    logging.getLogger("lightning").setLevel(logging.INFO)
    absent = {name for name, each in chosen.items() if each.needs and importlib.util.find_spec(each.needs) is None}
    begun = time.monotonic()
    present = {name: each for name, each in chosen.items() if name not in absent}
    judged = named = wrong = 0
    for name, found in compared_in_worlds(present, options.world) if options.world > 1 else compared(present):
        judged += 1
        named += bool(found)
        if lines := judge(name, found, options.world):
            wrong += 1
            named -= bool(found)
            print("\n".join([f"== {name}", *lines]), flush=True)
    print(
        f"{judged} scenarios in {time.monotonic() - begun:.0f} s: {judged - named - wrong} equal, "
        f"{named} differ as documented.py names them, {wrong} unexplained; {len(absent)} left out, which need "
        f"{sorted({str(chosen[name].needs) for name in absent})}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
