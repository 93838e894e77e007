"""Time the recovery of this system and of its peers, in turns, and write the tables of docs/comparison.md.

    python benchmarks/peers.py [--systems unicron torchft-nightly ...] [--faults worker node ...] [--runs 3]
    python benchmarks/peers.py --write docs/comparison.md

Each peer gets an environment of its own in ``--environments``, made on first use with pip: torch of this environment's
version, and the peer's package. The work and the faults are those of `recovery`. One run at a time; a round has a run
of each system, so that all meet the same load. Results are kept in ``--output``; if there are some, ``--write`` writes
them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from measure import Figures, summary
from recovery import COORDINATOR_SECONDS, FAULTS, HERE, RECOVER_SECONDS
from workload import MICRO_BATCHES, MICRO_SIZE

_TELEMETRY = ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
_NVRX = ("defusedxml", "nvidia-ml-py", "packaging", "psutil", "pynvml", "pyyaml")


@dataclass(frozen=True, kw_only=True)
class System:
    """A system that is measured.

    Attributes:
        job: its name in `recovery.SYSTEMS`.
        package: its package for pip, with the version; "" for this one and for torch's own.
        needs: what else pip has to install. The package itself is installed without its requirements, which may name
            another torch.
        workers: their number. LM-Resiliency copies states in pairs. With three all others are connected to the worker
            that dies, so that gloo, which most peers cannot abort, ends their collectives.
    """

    job: str
    package: str = ""
    needs: tuple[str, ...] = ()
    workers: int = 3


SYSTEMS = {
    "unicron": System(job="unicron"),
    "unicron-loop": System(job="unicron-loop"),
    "torchrun": System(job="torchrun"),
    "torchft-0.2.0": System(job="torchft", package="torchft==0.2.0", needs=_TELEMETRY),
    "torchft-nightly": System(job="torchft", package="torchft-nightly==2026.10.26", needs=_TELEMETRY),
    "nvrx-inprocess": System(job="nvrx", package="nvidia-resiliency-ext==0.4.1", needs=_NVRX),
    "nvrx-ft_launcher": System(job="ft_launcher", package="nvidia-resiliency-ext==0.4.1", needs=_NVRX),
    "lm-resiliency": System(job="lm-resiliency", package="lm-resiliency==0.2.0", workers=4),
}
WITH_COORDINATOR = ("unicron", "torchft")
TITLES = {
    "worker": "A worker is killed",
    "node": "An agent and its worker are killed, without a replacement",
    "stopped": "A worker is stopped (SIGSTOP)",
    "stuck": "A worker's main thread sleeps for ever",
    "coordinator": "The coordinator, or the lighthouse, is killed",
}
BEGIN, END = "<!-- figures of benchmarks/peers.py -->\n", "<!-- end of the figures -->\n"


def environment(system: System, folder: Path) -> Path:
    """Return the folder of a system's scripts, after making its environment if there is none.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    if not system.package:
        return Path(sys.executable).parent
    made = (folder / system.package.replace("==", "-")).absolute()
    if not (made / "complete").exists():
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        pip: list[str | Path] = [made / "bin" / "python", "-m", "pip", "install", "--quiet"]
        torch = metadata.version("torch").partition("+")[0]
        subprocess.run([*pip, f"torch=={torch}", "numpy", *system.needs], check=True)
        subprocess.run([*pip, "--no-deps", system.package], check=True)
        (made / "complete").touch()
    return made / "bin"


def measured(name: str, fault: str, folder: Path, python: Path, seconds: float) -> Figures:
    """Return the figures of one run, by a process of its own, as `workload` reads the number of workers once."""
    system = SYSTEMS[name]
    words = ["--systems", system.job, "--faults", fault, "--runs", "1", "--seconds", f"{seconds:g}"]
    command: list[str | Path] = [sys.executable, HERE / "recovery.py", *words, "--python", python, "--output", folder]
    variables = {**os.environ, "BENCH_WORKERS": f"{system.workers}"}
    made = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
    return {**json.loads(made.stdout.splitlines()[0]), "system": name}


def series(names: Sequence[str], faults: Sequence[str], runs: int, options: argparse.Namespace) -> list[Figures]:
    """Measure all, in rounds, and keep what is found after each run."""
    found: list[Figures] = []
    pythons = {name: environment(SYSTEMS[name], options.environments) for name in names}
    for number in range(runs):
        for fault in faults:
            for name in names:
                if fault == "coordinator" and not SYSTEMS[name].job.startswith(WITH_COORDINATOR):
                    continue
                folder = options.output / f"{name}-{fault}-{number}"
                found.append(measured(name, fault, folder, pythons[name], options.seconds))
                print(json.dumps(found[-1]), flush=True)
                (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def recovery_table(group: Sequence[Figures], seconds: float) -> list[str]:
    """Return the rows of a fault that strikes a worker."""
    titles = ["system", "runs", "detected, s", "next step, s", "replacement's first step, s", "lost steps"]
    titles += ["lost micro-batches", "lost samples", "smallest batch", "survivors' processes"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name in dict.fromkeys(each["system"] for each in group):
        own = [each for each in group if each["system"] == name]
        good = [each for each in own if "error" not in each]
        if not good:
            late = f"none within {RECOVER_SECONDS if own[0]['fault'] == 'worker' else seconds:g} s"
            lines.append(f"| {name} | 0 of {len(own)} | | {late} | | | | | | |")
            continue
        figures = ["detect_s", "progress_s", "rejoin_s", "lost_steps", "lost_micro_batches", "lost_samples"]
        cells = [summary([each[figure] for each in good if figure in each]) for figure in figures]
        smallest = min(each["smallest_batch"] for each in good)
        kept = "kept" if all(each["survivors_kept"] for each in good) else "restarted"
        cells += [f"{smallest} of {SYSTEMS[name].workers * MICRO_BATCHES * MICRO_SIZE}", kept]
        lines.append(f"| {name} | {len(good)} of {len(own)} | " + " | ".join(cells) + " |")
    return lines


def coordinator_table(group: Sequence[Figures]) -> list[str]:
    """Return the rows of the coordinator's death."""
    titles = ["system", "runs", "longest step before, s", "longest step after, s"]
    titles += [f"steps in the {COORDINATOR_SECONDS:g} s after", "last step after, s", "coordinator back, s"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name in dict.fromkeys(each["system"] for each in group):
        own = [each for each in group if each["system"] == name and "error" not in each]
        figures = ["largest_gap_before_s", "largest_gap_s", "steps_after", "last_step_s", "coordinator_back_s"]
        cells = [summary([each[figure] for each in own if not math.isnan(each[figure])]) for figure in figures]
        lines.append(f"| {name} | {len(own)} | " + " | ".join(cells) + " |")
    return lines


def tables(found: Sequence[Figures], seconds: float) -> str:
    """Return all tables, by fault, as Markdown."""
    loads = [each["load"] for each in found]
    versions = [f"torch {metadata.version('torch')}"]
    versions += dict.fromkeys(each.package.replace("==", " ") for each in SYSTEMS.values() if each.package)
    lines = [f"{time.strftime('%Y-%m-%d')}, {', '.join(versions)}, Python {sys.version.split()[0]}, {os.cpu_count()} "]
    lines[0] += f"cores, load average {statistics.median(loads):g} ({min(loads):g} to {max(loads):g})."
    for fault in dict.fromkeys(each["fault"] for each in found):
        group = [each for each in found if each["fault"] == fault]
        lines += ["", f"### {TITLES[fault]}", ""]
        lines += coordinator_table(group) if fault == "coordinator" else recovery_table(group, seconds)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the tables, and write them where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="time limit of a recovery without a replacement")
    parser.add_argument("--output", type=Path, default=Path("bench-output/peers"))
    parser.add_argument("--environments", type=Path, default=Path("bench-output/environments"))
    parser.add_argument("--write", type=Path, help="page with the figures to replace")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    kept = options.output / "results.json"
    if options.write and kept.exists():
        found = json.loads(kept.read_text())
    else:
        found = series(options.systems, options.faults, options.runs, options)
    text = tables(found, options.seconds)
    print(text)
    if options.write:
        before, _, rest = options.write.read_text().partition(BEGIN)
        options.write.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
