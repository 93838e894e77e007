"""Draw what three workers computed before, during and after the SIGKILL of one of them: docs/images/kill.svg.

    python benchmarks/picture.py [docs/images/kill.svg]

The work is that of `recovery.py`: four micro-batches of 50 ms per worker and step. A bar is a micro-batch, in the
colour of the worker that has it without failures. All is from the log of one real run; nothing is drawn by hand.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import workload

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent / "docs" / "images" / "kill.svg"
KILL_STEP, VICTIM = 25, 2
BEFORE, AFTER = 0.55, 0.75
"""Seconds before and after the kill, and around the first step of the replacement."""
COLOURS = ("#4477aa", "#ccbb44", "#cc3311")
Events = Sequence[Mapping[str, Any]]


def record(folder: Path) -> tuple[Events, float]:
    """Train, kill a worker after the second micro-batch of a step; return all events, and the time of the kill."""
    environment = {"OMP_NUM_THREADS": "1", "BENCH_LOG": str(folder), "GLOO_SOCKET_IFNAME": "lo", "BENCH_EQUAL": "1"}
    with LocalCluster(
        [HERE / "job_unicron.py"], nodes=0, nnodes=f"1:{workload.WORKERS}", environment=environment, folder=folder
    ) as cluster:
        for slot in range(workload.WORKERS):
            cluster.start_node(f"n{slot}", BENCH_SLOT=str(slot))
        until("a full world", lambda: full(events(folder)) >= KILL_STEP, 120)
        step = full(events(folder)) + 3
        until("the step", lambda: any(is_point(each, step) for each in events(folder)), 30)
        victim = next(each["pid"] for each in events(folder) if is_point(each, step))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        until("the replacement", lambda: full(events(folder), killed) >= step + 3, 60)
        time.sleep(AFTER)
        return events(folder), killed


def events(folder: Path) -> Events:
    """Return all complete lines of the workers' logs, by time."""
    lines = [line for path in folder.glob("worker_*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return sorted(map(json.loads, lines), key=lambda event: event["t"])


def full(found: Events, since: float = 0.0) -> int:
    """Return the newest step of all workers together; 0 for none."""
    return max((e["step"] for e in found if e["event"] == "step" and e["world"] == 3 and e["t"] > since), default=0)


def is_point(event: Mapping[str, Any], step: int) -> bool:
    """Whether the victim has just finished its second micro-batch of a step."""
    place = (event["event"], event["slot"], event.get("step"), event.get("place"))
    return place == ("micro", str(VICTIM), step, 1)


def draw(found: Events, killed: float, path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    pids = {each["pid"] for each in found if each["slot"] == str(VICTIM) and each["t"] > killed + 0.01}
    joined = min(each["t"] for each in found if each["pid"] in pids and each["event"] == "micro")
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(BEFORE + AFTER, 1.25 * BEFORE))
    for axes, at, before, after in ((left, killed, BEFORE, AFTER), (right, joined, BEFORE / 4, BEFORE)):
        owners = owners_of(found, killed - 1.5 if axes is left else joined - 0.1)
        shown = [each for each in found if at - before < each["t"] < at + after + workload.MICRO_SECONDS]
        bars(axes, shown, killed, owners)
        axes.set_xlim(at - before - killed, at + after - killed)
        axes.set_xlabel("seconds after the kill")
        axes.spines[["top", "right", "left"]].set_visible(False)
    left.axvline(0.0, color="black", linewidth=1.5)
    left.annotate("SIGKILL", (0.0, VICTIM + 0.42), ha="center", va="bottom", fontsize=9, annotation_clip=False)
    left.set_yticks(range(workload.WORKERS), [f"worker {slot}" for slot in range(workload.WORKERS)])
    left.set_ylim(-0.6, VICTIM + 0.6)
    left.set_title("the step in which worker 2 dies is finished by the others", fontsize=10, loc="left", pad=16)
    right.set_title("its replacement joins", fontsize=10, loc="left", pad=16)
    handles = [Patch(color=colour, label=f"micro-batches of worker {slot}") for slot, colour in enumerate(COLOURS)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def owners_of(found: Events, since: float) -> dict[int, int]:
    """Return the worker of each micro-batch of a step, from the first steps of a full world after some time."""
    owners: dict[int, int] = {}
    for each in found:
        if each["event"] == "micro" and each["t"] > since:
            owners.setdefault(each["number"], int(each["slot"]))
    return owners


def bars(axes: Any, found: Events, killed: float, owners: Mapping[int, int]) -> None:
    """Draw the micro-batches of all workers, in the colours of their owners, and the ends of steps."""
    for each in found:
        if each["event"] == "micro":
            begin, long = each["t"] - killed - workload.MICRO_SECONDS, workload.MICRO_SECONDS - 0.004
            axes.barh(int(each["slot"]), long, left=begin, height=0.7, color=COLOURS[owners[each["number"]]])
        elif each["event"] == "step":
            at = each["t"] - killed
            axes.plot([at, at], [int(each["slot"]) - 0.45, int(each["slot"]) + 0.45], color="black", linewidth=0.8)


def main() -> None:
    """Record a run, and write the picture of it."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    with tempfile.TemporaryDirectory(prefix="picture-") as name:
        draw(*record(Path(name)), path)
    print(path)


if __name__ == "__main__":
    main()
