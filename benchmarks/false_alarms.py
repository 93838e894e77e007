"""Train a mixed workload without faults: every reported fault is a false alarm.

    python benchmarks/false_alarms.py [--minutes 60] [--output bench-output/false_alarms]

Three workers of benchmarks/job_false_alarms.py run on agents of their own; one agent starts later and joins. Two other
processes occupy both cores now and then, for up to a minute and a half. Every line of the coordinator's event log is
then accounted for:

* Events of a healthy task's life are listed here by name; every other event is an *alarm*.
* A report that something is *slow* is a statement, not an alarm. It is shown apart, with the share of the preceding
  minute in which the two processes were running as evidence. Without such evidence (a share of 0) the run fails too.

The run fails on an alarm, if fewer or more workers were started than agents, or if no step was finished.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detection import START_SECONDS, Watched
from measure import Figures
from recovery import HERE, TASK
from workload import WORKERS

HEALTHY = {
    "coordinator_started", "task_created", "agent_registered", "slot_granted", "worker_hello", "worker_ready_to_join",
    "epoch_published", "epoch_settled", "worker.entered_epoch", "worker.started", "worker.grown", "checkpoint_saved",
    "worker_finished", "agent_left", "task_over",
}  # fmt: skip
"""Events of a healthy task."""
SLOW = {"task_degraded", "task_normal", "straggler", "straggler_over"}
"""Statements about speed, which cause no action."""
EVIDENCE_SECONDS = 60.0
"""Time before a statement about speed that may explain it."""
BUSY_SECONDS, QUIET_SECONDS = (10.0, 90.0), (10.0, 60.0)
LATE_SECONDS = 10.0
"""Delay of the last agent's start after the others."""
END_SECONDS = 180.0
BURN = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end:\n    pass"
Span = tuple[float, float]


class Mixed(Watched):
    """The run.

    Args:
        folder: of its logs; created here.
        seconds: duration of the training.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__("unicron", folder, Path(sys.executable).parent)
        self._seconds = seconds
        self.busy: list[Span] = []

    def start_agent(self, slot: int) -> None:
        if slot == WORKERS - 1:
            time.sleep(LATE_SECONDS)
        command: list[str | Path] = [self._bin / "torchrun", "--nproc-per-node=1", "--max-restarts=1000"]
        command += [f"--nnodes=1:{WORKERS}", "--rdzv-backend=unicron", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        command += [f"--rdzv-id={TASK}", f"--rdzv-conf=node=n{slot},embedded=false"]
        command += [HERE / "job_false_alarms.py", str(self._seconds)]
        self.processes.start(f"agent{slot}", command, BENCH_SLOT=str(slot))

    def ended(self) -> bool:
        """Whether all agents have exited."""
        return all(self.processes.started[f"agent{slot}"].poll() is not None for slot in range(WORKERS))

    def contend(self, generator: random.Random) -> None:
        """Occupy both cores now and then, until the agents exit."""
        deadline = time.monotonic() + self._seconds + END_SECONDS
        while not self.ended():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the agents have not ended; logs in {self.processes.folder}")
            self._rest(generator.uniform(*QUIET_SECONDS))
            if self.ended():
                return
            seconds, started = generator.uniform(*BUSY_SECONDS), time.time()
            burners = [
                subprocess.Popen([sys.executable, "-c", BURN.format(seconds)], cwd=self.processes.folder)
                for _ in range(os.cpu_count() or 1)
            ]
            for burner in burners:
                burner.wait()
            self.busy.append((started, time.time()))

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended():
            time.sleep(0.5)


def judge(log: Sequence[dict[str, Any]], busy: Sequence[Span]) -> Figures:
    """Classify the event log: ``alarms``, ``slow`` (each with its evidence), and the count of each event name."""
    alarms = [event for event in log if event["name"] not in HEALTHY | SLOW or _is_failure(event)]
    slow = [{**event, "busy_share": share_of(event["at"], busy)} for event in log if event["name"] in SLOW]
    return {"alarms": alarms, "slow": slow, "events": Counter(event["name"] for event in log)}


def share_of(at: float, busy: Sequence[Span]) -> float:
    """Share of the `EVIDENCE_SECONDS` before a moment in which the cores were occupied."""
    start = at - EVIDENCE_SECONDS
    return sum(max(0.0, min(at, b) - max(start, a)) for a, b in busy) / EVIDENCE_SECONDS


def _is_failure(event: dict[str, Any]) -> bool:
    fields = event["fields"]
    kinds = fields.get("kind") in ("fail", "restart") and event["name"].startswith(("epoch_", "worker.entered"))
    return kinds or event["incident"] is not None or fields.get("succeeded") is False


def run(folder: Path, seconds: float) -> Figures:
    """Run everything and return the figures."""
    shutil.rmtree(folder, ignore_errors=True)
    mixed = Mixed(folder, seconds)
    loads = []
    try:
        mixed.start()
        mixed.until(lambda: any(e["event"] == "step" for e in mixed.poll()), "the first step", START_SECONDS)
        loads.append(os.getloadavg()[0])
        mixed.contend(random.Random(1))
        loads.append(os.getloadavg()[0])
        mixed.poll()
        log = mixed.news()
    finally:
        mixed.processes.stop()
    return {**judge(log, mixed.busy), **life(mixed), "loads": loads, "busy_seconds": sum(b - a for a, b in mixed.busy)}


def life(mixed: Mixed) -> Figures:
    """Figures from the workers' own logs."""
    events = mixed.events
    figures: Figures = {"processes": sum(e["event"] == "started" for e in events)}
    figures["steps"] = len({e["step"] for e in events if e["event"] == "step"})
    figures["validations"] = len({e["step"] for e in events if e["event"] == "validated"})
    for kind in ("stall", "collected", "checkpoint", "hook"):
        seconds = [e["seconds"] for e in events if e["event"] == kind]
        figures[kind] = {"times": len(seconds), "longest": round(max(seconds, default=0.0), 2)}
    times = sorted(e["t"] for e in events if e["event"] == "step" and e["slot"] == "0")
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    if gaps:
        figures["step_seconds"] = {"median": round(gaps[len(gaps) // 2], 4), "longest": round(gaps[-1], 2)}
    return figures


def report(found: Figures) -> str:
    """The figures as readable text."""
    lines = [f"{name}: {value}" for name, value in found.items() if name not in ("alarms", "slow", "events")]
    lines.append("events: " + ", ".join(f"{name} {number}" for name, number in sorted(found["events"].items())))
    for name in ("slow", "alarms"):
        lines.append(f"{name}: {len(found[name])}")
        lines += [f"  {json.dumps(event)}" for event in found[name][:40]]
    return "\n".join(lines)


def passes(found: Figures) -> bool:
    """Whether the figures are those of a run without faults."""
    explained = all(event["busy_share"] > 0 for event in found["slow"])
    return not found["alarms"] and explained and found["processes"] == WORKERS and found["steps"] > 0


def main() -> None:
    """Run, report, and fail on an alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of training (default: %(default)g)")
    parser.add_argument("--output", type=Path, default=Path("bench-output/false_alarms"))
    arguments = parser.parse_args()
    found = run(arguments.output, 60 * arguments.minutes)
    (arguments.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(report(found))
    print("no false alarms" if passes(found) else "FAILED")
    sys.exit(not passes(found))


if __name__ == "__main__":
    main()
