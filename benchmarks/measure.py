"""Pure functions from the events of a run to its figures. All times are seconds after the kill."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workload
from event_logs import Event

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill of the worker ``pid`` in ``slot`` at wall time ``at``, in ``step``."""

    at: float
    slot: str
    pid: int
    step: int


def recovery(events: Sequence[Event], kill: Kill) -> Figures:
    """Detection, resumption, progress, rejoin and losses; a figure without its event is absent."""
    before = [e for e in events if e["t"] <= kill.at]
    after = [e for e in events if e["t"] > kill.at]
    survivors = {e["slot"]: e["pid"] for e in before if e["event"] == "step" and e["slot"] != kill.slot}
    figures: Figures = {"step_s": typical_step(before, survivors)}

    def first(name: str, found: Iterable[Event]) -> None:
        times = [e["t"] - kill.at for e in found]
        if times:
            figures[name] = min(times)

    first("detect_s", (e for e in after if e["event"] in ("started", "reacted", "dropped")))
    steps = [e for e in after if e["event"] == "step" and e["slot"] != kill.slot]
    # A survivor may log the end of a step that was committed before the kill; this is no recovery.
    reset = {e["pid"] for e in after if e["event"] == "restored"}
    own = [e for e in steps if e["pid"] == survivors.get(e["slot"]) and e["pid"] not in reset]
    resumed = [e for e in steps if e not in own or e["step"] >= kill.step]
    first("resume_s", resumed)
    first("progress_s", (e for e in steps if e["step"] >= kill.step))
    rejoined = [e for e in after if e["event"] == "step" and e["slot"] == kill.slot and e["pid"] != kill.pid]
    rejoined = [e for e in rejoined if not e.get("zero")]
    first("rejoin_s", rejoined)
    if resumed:
        figures["lost_steps"] = max(0, kill.step - min(e["step"] for e in resumed))
    end = min((e["t"] for e in rejoined), default=math.inf)
    degraded = [e for e in steps if e["t"] < end]
    figures["worlds_degraded"] = sorted({e["world"] for e in degraded})
    figures["steps_degraded"] = len({e["step"] for e in degraded})
    figures["survivors_kept"] = all(
        any(e["pid"] == pid for e in steps if e["slot"] == slot) for slot, pid in survivors.items()
    ) and all(e["pid"] == survivors.get(e["slot"]) for e in steps)
    figures["largest_gap_s"] = largest_gap(steps, min((e["t"] for e in resumed), default=kill.at), math.inf)
    return figures | _waste(events, kill, goes_on=figures["survivors_kept"] and reset.isdisjoint(survivors.values()))


def _waste(events: Sequence[Event], kill: Kill, *, goes_on: bool) -> Figures:
    """Count finished micro-batches that did not reach the model in their step, and samples that never did.

    A micro-batch has reached the model if its process finished the step and the model was not reset to an older step
    later.
    """
    steps = [e for e in events if e["event"] == "step"]
    restored = [e["step"] for e in events if e["event"] == "restored" and e["t"] > kill.at]
    set_back = math.inf if goes_on else min(restored, default=math.inf)
    done = {(e["pid"], e["step"]) for e in steps if not e.get("zero") and (e["t"] > kill.at or e["step"] < set_back)}
    alive = {e["pid"] for e in steps if e["t"] > kill.at}
    last = min(max(e["step"] for e in steps if e["pid"] == pid) for pid in alive)
    micros = [e for e in events if e["event"] == "micro" and e["step"] <= last]
    kept = [e for e in micros if e["t"] > kill.at or e["step"] < set_back]
    used = [e for e in kept if (e["pid"], e["step"]) in done]
    never = {e["micro"] for e in micros} - {e["micro"] for e in used}
    declared = workload.WORKERS * workload.MICRO_BATCHES
    by_step: dict[int, list[int]] = {}
    for e in used:
        by_step.setdefault(e["step"], []).append(e["micro"])
    taken = [number for numbers in by_step.values() for number in numbers]
    exact = len(set(taken)) == len(taken) and all(len(numbers) == declared for numbers in by_step.values())
    sizes = [len(numbers) * workload.MICRO_SIZE for s, numbers in by_step.items() if s >= kill.step]
    return {
        "lost_micro_batches": len(micros) - len(used),
        "lost_samples": len(never) * workload.MICRO_SIZE,
        "smallest_batch": min(sizes, default=0),
        "every_sample_once": exact and sorted(by_step) == list(range(last + 1)),
    }


def steps_of(events: Iterable[Event]) -> list[float]:
    """Time at which each optimizer step was first finished by any worker, in ascending order."""
    first: dict[int, float] = {}
    for e in events:
        if e["event"] == "step":
            first[e["step"]] = min(e["t"], first.get(e["step"], math.inf))
    return sorted(first.values())


def typical_step(events: Iterable[Event], survivors: dict[str, int], last: int = 10) -> float:
    """Median time between the last ``last`` steps."""
    times = steps_of(e for e in events if e["slot"] in survivors)[-last:]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def largest_gap(events: Iterable[Event], start: float, end: float) -> float:
    """Longest time without a finished step between two moments."""
    times = [start, *(t for t in steps_of(events) if start < t < end)]
    return max((b - a for a, b in itertools.pairwise(times)), default=math.nan)


def summary(values: Sequence[float]) -> str:
    """``median [smallest-largest]``."""
    if not values:
        return "-"
    middle, low, high = statistics.median(values), min(values), max(values)
    if all(isinstance(value, int) for value in values):
        return f"{middle:g}" if low == high else f"{middle:g} [{low}-{high}]"
    return f"{middle:.2f} [{low:.2f}-{high:.2f}]"


def started_at(pid: int) -> float:
    """Start time of a process by this process's clock (``time.time()``), to 10 ms.

    psutil's `create_time` adds the process's age to the kernel's boot time, which is off by up to a second after the
    clock has been set.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
