"""Runs cases in worlds of forked processes, and alone, and compares what their trainings have at the end."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conformance.worlds import ENVIRONMENT, HERE
from cross.cases import Case, smaller
from joins.running import Site

from unicron_lightning.local_cluster.processes import Processes

SECONDS: Final = 60.0
"""Most time of a case."""
RELATIVE, ABSOLUTE = 1e-7, 1e-9
"""Differences by the order of additions in float64, over some dozen steps."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a case.

    Attributes:
        case: as it was run.
        faults: what is wrong; empty: nothing.
        died: number of workers that died.
        joined: number of results by replacements.
        seconds: that it took.
        log: the end of the workers' output.
    """

    case: Case
    faults: tuple[str, ...]
    died: int
    joined: int
    seconds: float
    log: str


def run(site: Site, name: str, case: Case) -> Verdict:
    """Run a case in a world and alone, and judge it."""
    began, folder = time.monotonic(), site.folder / name
    folder.mkdir()
    (folder / "case.json").write_text(case.text())
    started = Processes(folder / "agents", {**site.cluster.processes.environment, **ENVIRONMENT})
    stub = [sys.executable, "-I", "-S", str(HERE / "stub.py"), str(site.socket)]
    alone = Processes(folder / "single", ENVIRONMENT)
    workers = case.script.workers
    where = ["--rdzv-backend", "unicron", "--rdzv-endpoint", site.cluster.endpoint, "--rdzv-id", f"cross-{name}"]
    shape = ["--nnodes", f"{case.least}:{workers}", "--nproc-per-node", "1", "--max-restarts", "20"]
    script = ["--monitor-interval", "0.02", "--no-python", *stub, "cross.worker", str(folder), name]
    try:
        alone.start("alone", [*stub, "cross.worker", str(folder / "alone"), "alone"])
        for place in range(workers):
            conf = f"node={name}-{place},state_dir={site.cluster.state_dir}"
            started.start(f"agent{place}", [*stub, "agent", *where, "--rdzv-conf", conf, *shape, *script])
        codes = {"alone": _codes(alone, began), "world": _codes(started, began)}
    finally:
        started.stop(0.0)
        alone.stop(0.0)
    faults = [f"{who} ended with {found}" for who, found in codes.items() if any(found)]
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]
    died = len(list(folder.glob("died-*")))
    if not faults and not workers - died <= len(results) <= workers:  # the last to die may find the task at its end
        faults.append(f"{len(results)} results of {workers} workers, {died} deaths")
    if codes["alone"] != [0]:
        faults = ["alone: " + _last_error(folder / "single" / "alone.log")]
    if not any(codes["alone"]):
        expected = json.loads((folder / "alone" / "result.json").read_text())
        for place, result in enumerate(results):
            faults += [f"result {place}: {each}" for each in differences(result, expected)][:4]
    logs = [*(folder / "agents").glob("*.log"), *(folder / "single").glob("*.log")]
    log = "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in logs)
    joined = len(set(re.findall(r"(\S+ is back)", log)))
    seconds = time.monotonic() - began
    return Verdict(case=case, faults=tuple(faults), died=died, joined=joined, seconds=seconds, log=log)


def _last_error(path: Path) -> str:
    errors = [line for line in path.read_text(errors="replace").splitlines() if re.match(r"[\w.]+: ", line)]
    return errors[-1] if errors else "no result"


def _codes(started: Processes, began: float) -> list[int | None]:
    """Wait for the processes, and return their exit codes; None for one that has not ended in time."""
    while any(each.poll() is None for each in started.started.values()) and time.monotonic() - began < SECONDS:
        time.sleep(0.05)
    codes = [each.poll() for each in started.started.values()]
    return [-1 if code is None else code for code in codes]


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the places at which two results differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif isinstance(one, float) and isinstance(other, float):
        if not math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE) and not (one != one and other != other):
            yield f"{path}: {one!r} in the world, {other!r} alone"
    elif one != other:
        yield f"{path}: {one!r} in the world, {other!r} alone"


def shrink(site: Site, verdict: Verdict, most: int = 25) -> Verdict:
    """Return a smaller case that fails, too."""
    tried = 0
    while True:
        for case in smaller(verdict.case):
            if tried >= most:
                return verdict
            tried += 1
            found = run(site, f"shrunk-{time.monotonic_ns()}", case)
            if found.faults:
                verdict = found
                break
        else:
            return verdict
