"""Validation against others' publications: what this simulator predicts for the situation that they describe.

Each `Published` names a number, its source, and the situation as far as it is published; other inputs are marked in
`assumed`. Situations are those of one task that restarts from checkpoints with spare nodes: the policy ``megatron``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from experiment_cases import SimulationCase, cases_of

from unicron_lightning.simulate.output import WafCurve

META_RATE: Final = 6.50e-3
"""Failures of a node of RSC-1 in a day (arXiv 2410.21680)."""
_RESTART: Final = "megatron.change.restart"
_DETECTION: Final = tuple(
    f"megatron.detection.{kind}"
    for kind in (
        "default",
        "lost_connection",
        "nccl_timeout",
        "link_flapping",
        "task_hang",
        "unnamed_software_error",
        "silent",
    )
)


def meta_ettr(nodes: int, rate: float, restart: float, interval: float) -> float:
    """Return Meta's expected ETTR of a task that restarts from checkpoints, without time for writing them.

    E[ETTR] = 1 - N r (u + dt / 2), arXiv 2410.21680.

    Args:
        nodes: N.
        rate: r, failures of a node in a day.
        restart: u, seconds to restart, the queue included.
        interval: dt, seconds between checkpoints.
    """
    return 1.0 - nodes * rate * (restart + interval / 2) / 86400.0


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published number.

    Attributes:
        name, source: for the table.
        said: the number as published, a fraction of the time (ETTR); `least` says that it is a bound.
        nodes, days: the task and the duration.
        rate: failures of a node in a day.
        restart, detection, interval: seconds to restart and to detect, and between checkpoints.
        assumed: inputs that are not published.
        overrides: more overrides of Hydra.
    """

    name: str
    source: str
    said: float
    nodes: int
    rate: float
    restart: float
    interval: float
    detection: float = 1e-3
    days: float = 28.0
    least: bool = False
    assumed: str = ""
    overrides: tuple[str, ...] = ()
    seeds: int = 2

    def cases(self) -> list[SimulationCase]:
        """Create its simulations: one task on 8 GPUs for each node, with 2 % of spare nodes and 16 more."""
        spares = 16 + self.nodes // 50
        overrides = (
            "trace=rsc1",
            f"trace.name={_slug(self.name)}",
            f"trace.days={self.days}",
            f"trace.sources.nodes.mtbf_hours={24 / self.rate:.6g}",
            "trace.sources.nodes.repair.median_hours=2",
            "workload=llama3",
            "cluster.cell=1",
            f"cluster.num_nodes={self.nodes + spares}",
            f"workload.tasks.llama3-405b.max_workers={8 * self.nodes}",
            "workload.tasks.llama3-405b.quantum=8",
            *self.overrides,
        )
        moves = (
            (_RESTART, self.restart),
            ("megatron.checkpoint_interval", self.interval),
            *((key, self.detection) for key in _DETECTION),
        )
        return cases_of(("megatron",), self.seeds, *overrides, variant=self.name, moves=moves)


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())


def _meta(nodes: int) -> Published:
    restart, interval = 300.0, 1800.0
    return Published(
        name=f"Meta's closed form, {8 * nodes:,} GPUs",
        source="arXiv 2410.21680",
        said=meta_ettr(nodes, META_RATE, restart, interval),
        nodes=nodes,
        rate=META_RATE,
        restart=restart,
        interval=interval,
        assumed="restart 5 min, checkpoint every 30 min, in both",
    )


_LLAMA_3: Final = Published(
    name="Llama 3 405B, 16,384 GPUs",
    source="arXiv 2407.21783, section 3.3.4",
    said=0.9,
    least=True,
    nodes=2048,
    rate=419 / 54 / 2048,
    days=54,
    detection=60.0,
    restart=180.0,
    interval=900.0,
    assumed="detection 1 min, restart 3 min, checkpoint every 15 min",
)

RESULTS: Final = (
    _meta(128),
    _meta(512),
    _meta(2048),
    _LLAMA_3,
    replace(
        _LLAMA_3,
        name="the same, with this simulator's times for Megatron",
        detection=1800.0,
        restart=1380.0,
        interval=1800.0,
        assumed="arXiv 2401.00134: 30 min, 23 min, checkpoint every 30 min",
    ),
    Published(
        name="MegaScale, 12,288 GPUs",
        source="arXiv 2402.15627, section 6.3",
        said=0.9,
        least=True,
        nodes=1536,
        rate=100 / 28 / 1536,
        detection=600.0,
        restart=450.0,
        interval=900.0,
        assumed="published bounds of 10 min to detect and diagnose, and 15 min to catch up, half of it taken as the"
        " restart; 100 repairs in *several weeks*, taken as 4",
    ),
    Published(
        name="ByteRobust, 9,600 GPUs",
        source="arXiv 2509.16293",
        said=0.97,
        nodes=1200,
        rate=_LLAMA_3.rate,
        days=90,
        detection=60.0,
        restart=510.0,
        interval=20.0,
        assumed="rate of Llama 3; published: detection 1 min and localization 2 to 15 min; a checkpoint in every step",
    ),
    Published(
        name="AIReSim, 4,096 servers",
        source="arXiv 2603.07041, table 1; karthikp-ubc/airesim, docs/FINDINGS.md: 9,873 h for 256 days",
        said=256 * 24 / 9873,
        nodes=4096,
        rate=0.01,
        restart=1200.0,
        interval=1.0,
        days=14,
        assumed="recovery 20 min. There nothing fails during a recovery: 1 / (1 + 0.57); here it does: exp(-0.57). Its"
        " bad servers (2.3 % there) are left out",
        seeds=1,
    ),
)


def validation_cases(_seeds: int) -> list[SimulationCase]:
    """Create the cases of all published numbers."""
    return [case for published in RESULTS for case in published.cases()]


def show_validation(curves: Sequence[WafCurve], _folder: Path) -> str:
    """Tabulate predicted and published ETTR."""
    found: dict[str, list[float]] = {}
    for curve in curves:
        found.setdefault(str(curve.row["variant"]), []).append(float(curve.row["ettr"]))
    lines = ["| published by | source | ETTR published | predicted | difference, points | assumed |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for each in RESULTS:
        predicted = sum(found[each.name]) / len(found[each.name])
        said = f"> {100 * each.said:.0f} %" if each.least else f"{100 * each.said:.1f} %"
        off = 100 * (predicted - each.said)
        judged = ("within the bound" if off >= 0 else f"**{off:+.1f}**") if each.least else f"{off:+.1f}"
        lines.append(f"| {each.name} | {each.source} | {said} | {100 * predicted:.1f} % | {judged} | {each.assumed} |")
    return "\n".join([*lines, "", *_mttf()])


def _mttf() -> list[str]:
    lines = ["| mean time to failure at RSC-1's rate (arXiv 2410.21680) | published | 24 h / (nodes x 0.0065) |"]
    lines.append("|---|---:|---:|")
    for gpus, hours in _MTTF.items():
        lines.append(f"| {gpus:,} GPUs | {hours:g} h | {24 / (gpus / 8 * META_RATE):.2f} h |")
    return lines


_MTTF: Final[Mapping[int, float]] = {1024: 7.9, 16384: 1.8, 131072: 0.23}

VALIDATION_TEXT: Final = """\
Time in which a task made counted steps (ETTR), as published, and as this simulator predicts it for a task that restarts
from checkpoints on spare nodes. Inputs that are not published are named; where they decide, the row shows only that the
published number is within reach. The rate of RSC-1 gives its projected times to failure, but not the one measured for
1,024 GPUs: small jobs there have failures that this rate does not include."""
