"""Compares ``unicron`` with Lightning's own strategies over a table of scenarios (``tests/conformance``).

    python benchmarks/scenarios.py [--list] [--show] [SCENARIO...]

Each scenario is a short script. It runs in this process under Lightning's strategy for one device (or ddp with one
process) and under ``unicron``, and all that was observed is compared: hooks with counters and stages, parameters,
metrics, states, files, warnings, messages, errors. The scenarios were written for this project from Lightning's
documented behaviour; they are not Lightning's own tests. The exit status is 1 if a scenario differs that
``tests/conformance/documented.py`` does not name, if one differs at another place than is named there, or if one that
is named there does not differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conformance.documented import MOST, NAMED
from conformance.running import differences, run
from conformance.table import Scenario, scenarios

SHOWN = 4
"""Places of a record that are printed."""


def judge(name: str, scenario: Scenario) -> list[str]:
    """Run a scenario twice; return what is wrong, in lines."""
    found = list(differences(run(scenario, "unicron"), run(scenario, scenario.reference)))
    named = NAMED.get(name)
    if named is not None and not found:
        return ["   does not differ, but documented.py names it"]
    unexplained = [each for each in found if named is None or not named.explains(each[0])]
    return [
        f"   {place}:\n      unicron   {str(mine)[:200]}\n      reference {str(theirs)[:200]}"
        for place, mine, theirs in unexplained[:SHOWN]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("names", nargs="*", help="beginnings of names; default: all")
    options = parser.parse_args()
    chosen = {
        name: each for name, each in scenarios().items() if not options.names or name.startswith(tuple(options.names))
    }
    if options.list:
        print("\n".join(chosen))
        return 0
    assert len(NAMED) <= MOST and NAMED.keys() <= scenarios().keys(), NAMED.keys() - scenarios().keys()
    logging.getLogger("lightning").setLevel(logging.INFO)
    absent = {name for name, each in chosen.items() if each.needs and importlib.util.find_spec(each.needs) is None}
    begun, wrong = time.monotonic(), 0
    for name in [each for each in chosen if each not in absent]:
        if lines := judge(name, chosen[name]):
            wrong += 1
            print("\n".join([f"== {name}", *lines]), flush=True)
    seconds = time.monotonic() - begun
    named = len(NAMED.keys() & chosen.keys() - absent)
    print(
        f"{len(chosen) - len(absent)} scenarios in {seconds:.0f} s: {len(chosen) - len(absent) - named - wrong} equal, "
        f"{named} differ as documented.py names them, {wrong} unexplained; {len(absent)} left out, which need "
        f"{sorted({str(chosen[name].needs) for name in absent})}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
