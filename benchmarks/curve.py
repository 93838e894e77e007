"""Times of a recovery by the number of workers: real torchruns, agents and coordinator, light workers on this machine.

    python benchmarks/curve.py [--workers 4 8 16 32 64] [--kills 5]

Each worker runs the step protocol without Lightning (`job_light`), and emulates its micro-batches by sleeping, so that
two cores bear many. One worker after another is killed after the first of its two micro-batches of a step, and not
replaced. All times are in ms after the kill, for the last of the survivors:

    notified   the worker knows of the new epoch
    stopped    it has finished its present micro-batch, and reported
    go         it knows that all have
    connected  it has connected with its peers, and planned the rest of the step
    step       it has finished the step; the emulated work that was left then takes two to three micro-batches
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from event_logs import Event, EventReader, wait_event

from unicron_lightning.cli.client import fetch
from unicron_lightning.local_cluster.processes import Processes, free_port

HERE = Path(__file__).resolve().parent
START_SECONDS, RECOVER_SECONDS = 300.0, 60.0
TIMES = ("notified", "stopped", "go", "connected", "step")


class Run:
    """A task of ``workers`` workers, one in each agent."""

    def __init__(self, workers: int, kills: int, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.workers = workers
        self.port = free_port()
        environment = {
            "OMP_NUM_THREADS": "1",
            "BENCH_LOG": str(folder.resolve()),
            "BENCH_WORKERS": str(workers),
            "PYTHONWARNINGS": "ignore",
            "UNICRON_STATE_DIR": str(folder.resolve() / "coordinator"),
            "UNICRON_PREPARE": "0",  # imports beside the first steps would be measured, too
        }
        self.processes = Processes(folder, environment, inside=True)
        self.logs = EventReader(self.processes.folder)
        torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node=1", "--max-restarts=0"]
        torchrun += [f"--nnodes={max(1, workers - kills)}:{workers}", "--rdzv-backend=unicron", "--rdzv-id=curve"]
        torchrun += [f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        for number in range(workers):
            self.processes.start(f"agent{number}", [*torchrun, f"--rdzv-conf=node=n{number}", HERE / "job_light.py"])

    def wait(self, wanted: Callable[[Event], bool], seconds: float) -> Event:
        """Wait for a new event; see `event_logs.wait_event`."""
        return wait_event(self.logs.poll, wanted, seconds, told=f"logs in {self.processes.folder}")

    def kill_one(self, world: int) -> dict[str, float]:
        """Kill a worker in the middle of a step; return the times in ms, and the number of repeated micro-batches."""
        spared = self._beside_coordinator()
        self.wait(lambda e: e["event"] == "step" and e["world"] == world, START_SECONDS)
        self.wait(lambda e: e["event"] == "step" and e["world"] == world, RECOVER_SECONDS)
        victim = self.wait(lambda e: e["event"] == "micro" and e["pid"] not in spared, RECOVER_SECONDS)
        at = time.time()
        os.kill(victim["pid"], signal.SIGKILL)
        finished: set[int] = set()

        def all_finished(event: Event) -> bool:
            if event["event"] == "step" and event["step"] >= victim["step"] and event["t"] > at:
                finished.add(event["pid"])
            return len(finished) == world - 1

        self.wait(all_finished, RECOVER_SECONDS)
        time.sleep(0.1)
        self.logs.poll()
        return self._times(at, victim["step"])

    def _times(self, at: float, step: int) -> dict[str, float]:
        after = [event for event in self.logs.events if event["t"] > at]
        steps = [e for e in after if e["event"] == "step" and e["step"] == step]
        moments: dict[str, Iterable[float]] = {
            "notified": (e["t"] for e in after if e["event"] == "notified"),
            "stopped": (e["t"] for e in after if e["event"] == "exchange"),
            "go": (e["t"] for e in after if e["event"] == "connect"),
            "connected": (e["at"] for e in self._entered(at)),
            "step": (e["t"] for e in steps),
        }
        times = {name: 1e3 * (max(found) - at) for name, found in moments.items()}
        done = [e["micro"] for e in self.logs.events if e["event"] == "micro" and e["step"] == step]
        return {**times, "repeated": len(done) - len(set(done))}

    def _entered(self, at: float) -> list[Event]:
        log = fetch(f"127.0.0.1:{self.port}", "/v1/events")
        return [e for e in log if e["name"] == "worker.entered_epoch" and e["at"] > at]

    def _beside_coordinator(self) -> set[int]:
        """Workers of the agent that has the coordinator: its death would be another fault."""
        log = fetch(f"127.0.0.1:{self.port}", "/v1/events")
        first = next(e["fields"]["pid"] for e in log if e["name"] == "worker_hello")
        return {first}


def measure(workers: int, kills: int, folder: Path) -> list[dict[str, float]]:
    """Kill ``kills`` workers of a task; return the times of each recovery."""
    run = Run(workers, kills, folder)
    try:
        run.wait(lambda e: e["event"] == "step" and e["world"] == workers, START_SECONDS)
        return [run.kill_one(workers - number) for number in range(kills)]
    finally:
        run.processes.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("bench-output/curve"))
    options = parser.parse_args()
    for workers in options.workers:
        kills = min(options.kills, workers - 2)
        found = measure(workers, kills, options.output / str(workers))
        cells = []
        for name in TIMES:
            values = [each[name] for each in found]
            cells.append(f"{name} {statistics.median(values):.0f} [{min(values):.0f}-{max(values):.0f}]")
        repeated = max(each["repeated"] for each in found)
        print(
            f"{workers} workers, {len(found)} kills, load {os.getloadavg()[0]:.1f}: {'   '.join(cells)} ms; "
            f"at most {repeated:.0f} micro-batches repeated",
            flush=True,
        )


if __name__ == "__main__":
    main()
