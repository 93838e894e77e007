"""Pure functions from the logged events of faults to detection times and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from measure import Event, Figures


@dataclass(frozen=True, kw_only=True)
class Target:
    """Aimed detection time in seconds, plus ``steps`` mean step times."""

    knows: float
    told: float | None = None
    steps: float = 0.0

    def text(self) -> str:
        """The target for a table cell."""
        parts = [f"{self.steps:g} steps" if self.steps else "", f"{in_words(self.knows)}"]
        told = f", notified < {in_words(self.told)}" if self.told else ""
        return f"< {' + '.join(part for part in parts if part)}{told}"


TARGETS = {
    "kill": Target(knows=0.05, told=0.1),
    "exception": Target(knows=0.05),
    "agent": Target(knows=0.1),
    "cut": Target(knows=5.0),
    "cut, quiet network": Target(knows=2.0),
    "hang": Target(knows=0.5, steps=3.0),
    "stop": Target(knows=0.5, steps=3.0),
    "lock": Target(knows=0.5, steps=3.0),
}


def detected(at: float, victim: str, log: Sequence[Event], workers: Sequence[Event]) -> Figures:
    """Detection times of a fault that struck at wall time ``at``.

    Args:
        at: time of the fault.
        victim: slot that was struck.
        log: the coordinator's events since shortly before the fault.
        workers: the workers' events since then.

    Returns:
        ``knows_s`` (first event of the incident), ``told_s`` (first notification of another worker), ``all_told_s``
        (last notification), and ``name``, ``cause`` and ``worker`` of the first event; empty if no event was logged.
    """
    of_incident = [e for e in log if e["incident"] is not None and e["at"] > at and e["name"] != "incident_closed"]
    if not of_incident:
        return {}
    first = min(of_incident, key=lambda e: (e["at"], e["seq"]))
    fields = first["fields"]
    figures: Figures = {"knows_s": first["at"] - at, "incident": first["incident"], "name": first["name"]}
    figures |= {"cause": fields.get("kind") or fields.get("cause"), "worker": fields.get("worker")}
    told: dict[str, float] = {}
    for e in workers:
        if e["event"] == "told" and e["incident"] == first["incident"] and e["slot"] != victim:
            told.setdefault(e["slot"], e["t"] - at)
    if told:
        figures |= {"told_s": min(told.values()), "all_told_s": max(told.values())}
    return figures


def in_words(seconds: float) -> str:
    """The duration as ``12 ms``, ``3.4 ms`` or ``1.25 s``."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s".replace(".00 s", " s")
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile by nearest rank: of 20 values the 99th percentile is the largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def cell(values: Sequence[float]) -> str:
    """Median and 99th percentile."""
    if not values:
        return "-"
    return f"{in_words(statistics.median(values))} / {in_words(percentile(values, 0.99))}"


def table(results: Sequence[Figures]) -> str:
    """Medians and 99th percentiles by system and fault, as Markdown."""
    titles = [
        "system",
        "fault",
        "runs",
        "coordinator knows",
        "first other worker notified",
        "all notified",
        "target",
        "met",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for system, fault in dict.fromkeys((r["system"], r["fault"]) for r in results):
        group = [r for r in results if (r["system"], r["fault"]) == (system, fault)]
        columns = [[r[name] for r in group if name in r] for name in ("knows_s", "told_s", "all_told_s")]
        target = TARGETS.get(fault) if system == "unicron" else None
        met = "" if target is None else "yes" if reaches(target, group) else "NO"
        cells = [system, fault, str(len(group)), *map(cell, columns), target.text() if target else "", met]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reaches(target: Target, group: Sequence[Figures]) -> bool:
    """Whether the 99th percentiles reach the target, and each event that names a worker names the struck one."""
    if not all("knows_s" in r and r.get("named", True) for r in group):
        return False
    bound = target.knows + target.steps * statistics.median(r["step_s"] for r in group)
    told = [r.get("all_told_s", math.inf) for r in group]
    in_time = target.told is None or percentile(told, 0.99) < target.told
    return percentile([r["knows_s"] for r in group], 0.99) < bound and in_time
