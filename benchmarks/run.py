"""Run all benchmarks one after another, print the tables and write results.json and results.md.

    python benchmarks/run.py [--quick] [--torchft-venv FOLDER] [--output bench-output]

A full run takes about a quarter of an hour on two cores; ``--quick`` takes three minutes and only checks that
everything works. The peers are measured in the same run: torchrun always, torchft-nightly if a virtual environment with
it is given; see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import exactness
import overhead
import psutil  # type: ignore[import-untyped]
import recovery
from measure import Figures, summary

PARTS = ("recovery", "exactness", "overhead")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Extent of the measurements."""

    runs: int
    faults: tuple[str, ...]
    sizes: dict[str, int]
    """Steps per segment by model."""
    buckets: tuple[float, ...]
    pairs: int
    accumulated_pairs: int


FULL = Effort(
    runs=5,
    faults=("worker", "node", "coordinator"),
    sizes={"1M": 10, "10M": 4},
    buckets=(1.0, 5.0, 25.0),
    pairs=8,
    accumulated_pairs=6,
)
QUICK = Effort(
    runs=1, faults=("worker", "coordinator"), sizes={"tiny": 10}, buckets=(25.0,), pairs=2, accumulated_pairs=0
)


def machine() -> Figures:
    """Description of the machine."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].split(":", 1)[1].strip() if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "lightning": metadata.version("lightning"),
        "package": metadata.version("unicron-lightning"),
        "at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "load_before": os.getloadavg(),
    }


def targets(results: dict[str, Any]) -> str:
    """Targets and measured values as a Markdown table."""

    def of(fault: str, name: str) -> list[float]:
        runs = [r for r in results.get("recovery", []) if r["system"] == "unicron" and r["fault"] == fault]
        return [r[name] for r in runs if name in r]

    def row(name: str, aim: str, values: Sequence[float], met: bool) -> str:
        return f"| {name} | {aim} | {summary(values)} | {'yes' if met else 'NO'} |"

    lines = ["| figure | target | measured | met |", "|---|---|---|---|"]
    for name, fault, key, aim in (
        ("worker killed: next finished step", "worker", "resume_s", 0.5),
        ("worker killed: progress", "worker", "progress_s", 0.5),
        ("worker killed: rejoin, beyond its own start-up", "worker", "rejoin_after_startup_s", 0.5),
        ("node lost: next finished step", "node", "resume_s", 1.0),
    ):
        if values := of(fault, key):
            lines.append(row(f"{name}, s", f"< {aim}", values, statistics.median(values) < aim))
    for key, aim in (("lost_micro_batches", 2), ("lost_samples", 0), ("lost_steps", 0)):
        if values := of("worker", key):
            name = key.replace("_", " ")
            lines.append(row(f"worker killed: {name}", f"<= {aim}", values, max(values) <= aim))
    gaps, before = of("coordinator", "largest_gap_s"), of("coordinator", "largest_gap_before_s")
    if gaps:
        aim_text = f"as before: {summary(before)}"
        met = statistics.median(gaps) < 1.25 * statistics.median(before)
        lines.append(row("coordinator killed: longest step, s", aim_text, gaps, met))
    for r in results.get("exactness", []):
        difference = r["largest_parameter_difference"]
        lines.append(
            f"| largest parameter difference after {r['steps']} steps with {r['faults']} workers killed | <= 1e-6 | "
            f"{difference:.1e} | {'yes' if difference <= 1e-6 and r['every_step'] else 'NO'} |"
        )
    for r in results.get("overhead", []):
        lines.append(
            f"| steps/s against ddp: {r['size']}, {r['bucket_mib']:g} MiB, {r['accumulate']} per worker and step | "
            f">= 0.98 | {r['ratio']:.3f} [{r['low']:.3f}-{r['high']:.3f}] | {'yes' if r['ratio'] >= 0.98 else 'NO'} |"
        )
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """All tables, as Markdown."""
    parts = ["# Benchmarks", "## Targets", targets(results)]
    for part in PARTS:
        if part in results:
            parts += [f"## {part.capitalize()}", about(results["machine"][part]), *_tables(part, results[part])]
    return "\n\n".join(part for part in parts if part) + "\n"


def about(values: Figures) -> str:
    """Description of the machine in a line."""
    loads = f"load {values['load_before'][0]:.1f} before, {values['load_after'][0]:.1f} after"
    return f"{values['cpu']}, {values['cores']} cores, torch {values['torch']}, {values['at']}, {loads}"


def _tables(part: str, results: list[Figures]) -> list[str]:
    if part == "exactness":
        return [exactness.table(results)]
    if part == "overhead":
        return [overhead.table(results)]
    failed = [f"- {r['system']}, {r['fault']}: {r['error']}" for r in results if "error" in r]
    return [recovery.table(results), recovery.coordinator_table(results), "\n".join(failed)]


def measure(part: str, effort: Effort, output: Path, torchft: Path | None) -> list[Figures]:
    """Measure one part."""
    if part == "exactness":
        return [exactness.compare(output, "tiny", 50, 1e-8)]
    if part == "recovery":
        return recovery.series(recovery.pythons(recovery.SYSTEMS[:4], torchft), effort.faults, effort.runs, output)
    return _overheads(effort, output)


def _overheads(effort: Effort, output: Path) -> list[Figures]:
    results: list[Figures] = []
    for size, steps in effort.sizes.items():
        results += overhead.series([size], effort.buckets, 1, effort.pairs, steps, output)
    if effort.accumulated_pairs:
        results += overhead.series(["1M"], (25.0,), 4, effort.accumulated_pairs, 5, output / "accumulated")
    return results


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few runs, small models")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="parts to measure (others keep earlier results)",
    )
    parser.add_argument("--torchft-venv", type=Path, help="virtual environment with torchft-nightly")
    parser.add_argument("--output", type=Path, default=Path("bench-output"))
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"machine": {}}
    for part in arguments.only:  # written after each part, since a full run takes long
        before = machine()
        results[part] = measure(part, QUICK if arguments.quick else FULL, output / part, arguments.torchft_venv)
        results["machine"][part] = {**before, "load_after": os.getloadavg()}
        path.write_text(json.dumps(results, indent=1) + "\n")
        (output / "results.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
