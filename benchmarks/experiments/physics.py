"""What the simulator left out before, switched on one by one: its effect on the systems' WAF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from experiment_cases import SimulationCase, cases_of

from unicron_lightning.simulate.output import WafCurve

POLICIES: Final = ("unicron", "megatron", "torchft", "inprocess")
BEFORE: Final = "as before"


def _source(name: str, mtbf_hours: float, cause: str, repair: str = "", component: str = "node") -> str:
    repaired = f",repair:{repair}" if repair else ""
    causes = f"{{it:{{{cause},count:1}}}}"
    body = f"component:{component},mtbf_hours:{mtbf_hours},origin:guess,causes:{causes}{repaired}"
    return f"+trace.sources.{name}={{{body}}}"


_SILENT: Final = _source("silent", 2000, "kind:parameters_differ", "{distribution:fixed,hours:8}")

VARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    BEFORE: (),
    "slow nodes: 20 % for 6 h, every 500 node-hours": (
        _source("slow", 500, "kind:node_degraded,slowdown:0.2", "{distribution:fixed,hours:6}"),
    ),
    "slow links: 10 % for 1 h, every 200 node-hours": (
        _source("links", 200, "kind:link_degraded,slowdown:0.1", "{distribution:fixed,hours:1}"),
    ),
    "a NaN every 1,000 node-hours": (_source("nan", 1000, "kind:nan_loss"),),
    "silent corruption every 2,000 node-hours, found after 8 h": (_SILENT,),
    "the same; Unicron finds it by a witness within 100 steps, at 0.5 % of compute": (
        _SILENT,
        "+costs.unicron.extra.witness_steps=100",
        "costs.unicron.step_overhead=0.005",
    ),
    "a bug that strikes all every 500 node-hours": (_source("bugs", 500, "kind:other_software_error,strikes:task"),),
    "a tenth of the nodes fails 10 times as often": ("+trace.sources.nodes.offenders=0.1",),
    "checkpoints and state by size: storage 2 GB/s, peers 5 GB/s": (
        "cluster.storage_gigabytes_per_second=2",
        "cluster.peer_gigabytes_per_second=5",
    ),
    "the same, and training waits while checkpoints are written": (
        "cluster.storage_gigabytes_per_second=2",
        "cluster.peer_gigabytes_per_second=5",
        *(f"+costs.{policy}.extra.checkpoint_blocking=1" for policy in POLICIES),
    ),
    "the coordinator fails every 12 h for 5 min": ("+trace.coordinator={mtbf_hours:12,minutes:5}",),
}


def physics_cases(seeds: int) -> list[SimulationCase]:
    """Create the cases of all variants, on trace `b_quick`."""
    made = []
    for name, overrides in VARIANTS.items():
        made += cases_of(POLICIES, min(seeds, 3), "trace=b_quick", *overrides, variant=name)
    return made


def show_physics(curves: Sequence[WafCurve], _folder: Path) -> str:
    """Tabulate the mean WAF of each variant, and its difference to the first one."""
    found: dict[tuple[str, str], list[float]] = {}
    for curve in curves:
        key = str(curve.row["variant"]), str(curve.row["policy"])
        found.setdefault(key, []).append(100 * float(curve.row["of_ideal"]))
    waf = {key: sum(values) / len(values) for key, values in found.items()}
    lines = [f"| trace b_quick and | {' | '.join(POLICIES)} |", f"|---|{'---:|' * len(POLICIES)}"]
    for name in VARIANTS:
        cells = []
        for policy in POLICIES:
            value, change = waf[name, policy], waf[name, policy] - waf[BEFORE, policy]
            cells.append(f"{value:.1f}" if name == BEFORE else f"{value:.1f} ({change:+.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


PHYSICS_TEXT: Final = """\
WAF in per cent of the ideal on `b_quick`, and the change in points, when one thing is added that the simulator ignored
before. Rates are guesses; a time of 8 h to find silent corruption is one that was published (arXiv 2509.16293, section
2.2). Corrupted state makes every system return to a persistent checkpoint, written before the corruption; nothing
replaces a slow node. A second outage of a node that is down prolongs it: of a log with 99 overlapping outages of one
node, 14,800 s instead of 9,000 s of its absence are counted (`tests/simulate/test_physics.py`)."""
