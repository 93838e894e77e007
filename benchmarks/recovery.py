"""Kill a worker in the middle of an accumulation window and time the recovery, for this system and its peers.

    python benchmarks/recovery.py [--systems unicron torchrun torchft unicron-loop] [--faults worker] [--runs 5]

The work is the same for all (`workload`): 3 workers, one per agent, 4 micro-batches of 50 ms per worker and optimizer
step, and a SIGKILL as soon as the worker of slot 2 has finished micro-batch 1 of step 25 (``--kill-step``). Agents of
this system prepare replacements meanwhile, which takes some seconds: with step 25 a replacement may wait for that.

    detect    from the kill to the first sign that any other process has detected it
    resume    to the first optimizer step that a survivor finishes
    progress  to the first step that was not finished before the kill
    rejoin    to the first step of the killed worker's replacement
    start-up  the replacement's own, from the start of its process until it is ready to join: imports and the model,
              which no recovery can avoid without a warm stand-by
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from event_logs import Event, EventReader, wait_event
from measure import Figures, Kill, largest_gap, recovery, started_at, summary, typical_step
from workload import WORKERS

from unicron_lightning.cli.client import fetch
from unicron_lightning.errors import CoordinatorUnavailable
from unicron_lightning.local_cluster.processes import Processes, free_port

HERE = Path(__file__).resolve().parent
SYSTEMS = ("unicron", "torchrun", "torchft", "unicron-loop")
"""The last one is a loop of `unicron_lightning.Run`."""
TASK = "bench"
VICTIM = "2"
KILL_STEP, KILL_PLACE = 25, 1
"""The step in which a worker is killed, by default, and the place of its last micro-batch."""
START_SECONDS, RECOVER_SECONDS = 120.0, 90.0
COORDINATOR_SECONDS = 15.0
"""Observation time of the training after the coordinator's death."""


class Run:
    """One run of one system.

    Args:
        system: one of `SYSTEMS`.
        folder: of its logs; created here.
        python: folder of the interpreter and scripts to use.
        kill_step: step of the kill.
    """

    def __init__(self, system: str, folder: Path, python: Path, kill_step: int = KILL_STEP) -> None:
        self.system = system
        self._kill_step = kill_step
        self.port = free_port()
        self._bin = python
        self._born: dict[int, float] = {}
        environment = {
            "OMP_NUM_THREADS": "1",
            "BENCH_LOG": str(folder.resolve()),
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": "lo",
            "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
            "UNICRON_STATE_DIR": str(folder.resolve() / "coordinator"),
            # torch 2.13 otherwise keeps stale addresses in the store shared between rounds, and restarts hang
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.processes = Processes(folder, environment, inside=True)
        self._logs = EventReader(self.processes.folder)
        self.events = self._logs.events

    def start(self) -> None:
        """Start all agents and the system's further processes."""
        if self.system == "torchft":
            command = ["--bind", f"127.0.0.1:{self.port}", "--min_replicas", "1", "--quorum_tick_ms", "100"]
            command += ["--join_timeout_ms", "10000", "--heartbeat_timeout_ms", "1000"]
            self.processes.start("lighthouse", [self._bin / "torchft_lighthouse", *command])
            time.sleep(0.7)
        for slot in range(WORKERS):
            self.start_agent(slot)

    def start_agent(self, slot: int) -> None:
        """Start the agent of a slot with its worker."""
        torchrun: list[str | Path] = [self._bin / "torchrun", "--nproc-per-node=1", "--max-restarts=1000"]
        endpoint = [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={TASK}"]
        environment = {"BENCH_SLOT": str(slot)}
        match self.system:
            case "unicron" | "unicron-loop":
                torchrun += ["--nnodes=2:3", "--rdzv-backend=unicron", *endpoint, f"--rdzv-conf=node=n{slot}"]
                torchrun += [HERE / ("job_unicron.py" if self.system == "unicron" else "job_loop.py")]
            case "torchrun":
                torchrun += ["--nnodes=3:3", "--rdzv-backend=c10d", *endpoint, "--local-addr=127.0.0.1"]
                torchrun += [f"--rdzv-conf=is_host={int(slot == 0)}", HERE / "job_ddp.py"]
            case _:
                torchrun += ["--nnodes=1:1", f"--master-port={free_port()}", HERE / "job_torchft.py"]
                environment |= {"REPLICA_GROUP_ID": str(slot), "NUM_REPLICA_GROUPS": str(WORKERS)}
                environment |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}"}
        self.processes.start(f"agent{slot}", torchrun, **environment)

    def poll(self) -> list[Event]:
        """Read the new events since the last call."""
        new = self._logs.poll()
        for event in new:
            if event["event"] == "started" and psutil.pid_exists(event["pid"]):
                self._born[event["pid"]] = started_at(event["pid"])
        return new

    def wait_event(self, wanted: Callable[[Event], bool], seconds: float) -> Event:
        """Wait for a new event; see `event_logs.wait_event`."""
        return wait_event(self.poll, wanted, seconds, told=f"{self.system}, logs in {self.processes.folder}")

    def wait_kill_point(self) -> Event:
        """Wait until the victim has finished its micro-batch in a world that has been complete for ten steps."""
        complete = 0

        def wanted(event: Event) -> bool:
            nonlocal complete
            if event["event"] == "step" and event["slot"] == VICTIM:
                complete = complete + 1 if event["world"] == WORKERS else 0
            return (
                event["event"] == "micro"
                and event["slot"] == VICTIM
                and event["step"] >= self._kill_step
                and event["place"] == KILL_PLACE
                and complete >= 10
            )

        return self.wait_event(wanted, START_SECONDS)

    def coordinator_events(self) -> list[dict[str, Any]]:
        """The coordinator's event log; empty if it does not answer."""
        try:
            return list(fetch(f"127.0.0.1:{self.port}", "/v1/events"))
        except CoordinatorUnavailable:
            return []

    def startup(self, kill: Kill) -> Figures:
        """The replacement's own part of the rejoin, from the coordinator's log."""
        pids = {e["pid"] for e in self.events if e["slot"] == kill.slot and e["t"] > kill.at and e["pid"] != kill.pid}
        log = self.coordinator_events()
        for hello in (e for e in log if e["name"] == "worker_hello" and e["fields"]["pid"] in pids):
            worker, born = hello["fields"]["worker"], self._born.get(hello["fields"]["pid"])
            for ready in (e for e in log if e["name"] == "worker_ready_to_join" and e["fields"]["worker"] == worker):
                if born is not None:
                    return {"respawn_s": born - kill.at, "startup_s": ready["at"] - born}
        return {}


def kill_worker(run: Run, fault: str) -> Figures:
    """Kill the worker, and its agent too if the fault is the loss of a node."""
    found = run.wait_kill_point()
    kill = Kill(at=time.time(), slot=VICTIM, pid=found["pid"], step=found["step"])
    os.kill(kill.pid, signal.SIGKILL)
    if fault == "node":
        os.kill(run.processes.started[f"agent{VICTIM}"].pid, signal.SIGKILL)
    deadline = time.monotonic() + (RECOVER_SECONDS if fault == "worker" else 20.0)
    wanted = {"progress_s", "rejoin_s"} if fault == "worker" else {"progress_s"}
    figures: Figures = {}
    while not wanted <= figures.keys() and time.monotonic() < deadline:
        time.sleep(0.02)
        if run.poll():
            figures = recovery_so_far(run.events, kill)
    time.sleep(1.0)
    run.poll()
    figures = recovery(run.events, kill) if wanted <= figures.keys() else {**figures, "error": "no recovery"}
    if fault == "worker" and run.system.startswith("unicron"):
        figures |= run.startup(kill)
        if "startup_s" in figures:
            figures["rejoin_after_startup_s"] = figures["rejoin_s"] - figures["startup_s"]
    return {"killed_step": kill.step, **figures}


def recovery_so_far(events: Sequence[Event], kill: Kill) -> Figures:
    """`recovery` if a step has been finished since the kill, else empty."""
    if not any(e["event"] == "step" and e["t"] > kill.at for e in events):
        return {}
    return recovery(events, kill)


def kill_coordinator(run: Run) -> Figures:
    """Kill the coordinator and check that training continues."""
    run.wait_kill_point()
    started = next(e for e in run.coordinator_events() if e["name"] == "coordinator_started")
    at = time.time()
    os.kill(int(started["fields"]["pid"]), signal.SIGKILL)
    back = math.nan
    while time.time() < at + COORDINATOR_SECONDS:
        time.sleep(0.05)
        run.poll()
        if math.isnan(back) and run.coordinator_events():
            back = time.time() - at
    before, after = [e for e in run.events if e["t"] <= at], [e for e in run.events if e["t"] > at]
    pids = {e["slot"]: e["pid"] for e in before if e["event"] == "step"}
    return {
        "step_s": typical_step(before, pids),
        "largest_gap_before_s": largest_gap(before, at - 4.0, at),
        "largest_gap_s": largest_gap(after, at, math.inf),
        "steps_after": len({e["step"] for e in after if e["event"] == "step"}),
        "coordinator_back_s": back,
        "survivors_kept": all(e["pid"] == pids[e["slot"]] for e in after),
    }


def measure(system: str, fault: str, folder: Path, python: Path, kill_step: int = KILL_STEP) -> Figures:
    """Run one system with one fault and return the figures."""
    run = Run(system, folder, python, kill_step)
    try:
        run.start()
        figures = kill_coordinator(run) if fault == "coordinator" else kill_worker(run, fault)
    except TimeoutError as error:
        figures = {"error": str(error)}
    finally:
        run.processes.stop()
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    return {"system": system, "fault": fault, "load": round(os.getloadavg()[0], 2), **rounded}


def pythons(systems: Sequence[str], torchft: Path | None) -> dict[str, Path]:
    """Folder of the interpreter for each system that can run here."""
    own = Path(sys.executable).parent
    found = {system: own for system in systems if system != "torchft"}
    if "torchft" in systems and torchft is not None:
        found["torchft"] = torchft.absolute() / "bin"
    return found


def series(
    systems: Sequence[str],
    faults: Sequence[str],
    runs: int,
    output: Path,
    torchft: Path | None,
    kill_step: int = KILL_STEP,
) -> list[Figures]:
    """Run everything, alternating between systems, one run at a time."""
    results: list[Figures] = []
    for number in range(runs):
        for system, python in pythons(systems, torchft).items():
            for fault in faults if system == "unicron" else [f for f in faults if f == "worker"]:
                folder = output / f"{system}-{fault}-{number}"
                shutil.rmtree(folder, ignore_errors=True)
                results.append(measure(system, fault, folder, python, kill_step))
                print(json.dumps(results[-1]), flush=True)
    return results


def table(results: Sequence[Figures]) -> str:
    """Medians as a Markdown table."""
    titles = ["system", "fault", "runs", "detect s", "resume s", "progress s", "rejoin s", "start-up s"]
    titles += ["rejoin - start-up s", "lost steps", "lost micro-batches", "lost samples", "world meanwhile"]
    titles += ["smallest batch", "survivors' processes"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for system, fault in dict.fromkeys((r["system"], r["fault"]) for r in results):
        group = [r for r in results if (r["system"], r["fault"]) == (system, fault)]
        good = [r for r in group if "error" not in r]
        if fault == "coordinator" or not good:
            continue
        names = ["detect_s", "resume_s", "progress_s", "rejoin_s", "startup_s", "rejoin_after_startup_s"]
        names += ["lost_steps", "lost_micro_batches", "lost_samples"]
        cells = [summary([r[name] for r in good if name in r]) for name in names]
        worlds = sorted({world for r in good for world in r["worlds_degraded"] if world != WORKERS})
        batches = sorted({r["smallest_batch"] for r in good})
        cells += [", ".join(map(str, worlds)) or "none", ", ".join(map(str, batches))]
        cells.append("kept" if all(r["survivors_kept"] for r in good) else "restarted")
        lines.append(f"| {system} | {fault} | {len(good)} of {len(group)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def coordinator_table(results: Sequence[Figures]) -> str:
    """Effect of the coordinator's death as a Markdown table; empty if it was not killed."""
    group = [r for r in results if r["fault"] == "coordinator" and "error" not in r]
    if not group:
        return ""
    names = ["largest_gap_before_s", "largest_gap_s", "steps_after", "coordinator_back_s"]
    cells = [summary([r[name] for r in group]) for name in names]
    return (
        "| coordinator killed: runs | longest step before s | longest step after s | steps in the 15 s after | "
        "coordinator back s |\n|---|---|---|---|---|\n| " + " | ".join([str(len(group)), *cells]) + " |"
    )


def main() -> None:
    """Run the series and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["unicron", "unicron-loop", "torchrun"], choices=SYSTEMS)
    parser.add_argument("--faults", nargs="+", default=["worker", "node", "coordinator"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kill-step", type=int, default=KILL_STEP)
    parser.add_argument("--torchft-venv", type=Path, help="virtual environment with torchft-nightly")
    parser.add_argument("--output", type=Path, default=Path("bench-output/recovery"))
    arguments = parser.parse_args()
    results = series(
        arguments.systems,
        arguments.faults,
        arguments.runs,
        arguments.output,
        arguments.torchft_venv,
        arguments.kill_step,
    )
    print(table(results), coordinator_table(results), sep="\n\n")


if __name__ == "__main__":
    main()
