"""Kill a worker in the middle of an accumulation window and time the recovery, for this system and its peers.

    python benchmarks/recovery.py [--systems unicron torchrun torchft unicron-loop] [--faults worker] [--runs 5]

All peers, each in an environment of its own: benchmarks/peers.py.

The work is the same for all (`workload`): 3 workers, one per agent, 4 micro-batches of 50 ms per worker and optimizer
step, and a SIGKILL as soon as the worker of slot 2 has finished micro-batch 1 of step 25 (``--kill-step``). Agents of
this system prepare replacements meanwhile, which takes some seconds: with step 25 a replacement may wait for that.
Faults: `worker`, `node` (its agent, too), `stopped` (SIGSTOP), `stuck` (the main thread sleeps for ever), and
`coordinator` of a system that has one.

    detect    from the kill to the first sign that any other process has detected it
    resume    to the first optimizer step that a survivor finishes
    progress  to the first step that was not finished before the kill
    rejoin    to the first step of the killed worker's replacement
    start-up  the replacement's own, from the start of its process until it is ready to join: imports and the model,
              which no recovery can avoid without a warm stand-by
"""

from __future__ import annotations

import argparse
import contextlib
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
SYSTEMS = ("unicron", "torchrun", "torchft", "unicron-loop", "nvrx", "ft_launcher", "lm-resiliency")
"""*unicron-loop* is a loop of `unicron_lightning.Run`; the last three are by the packages of benchmarks/peers.py."""
FAULTS = ("worker", "node", "stopped", "stuck", "coordinator")
TASK = "bench"
VICTIM = "2"
KILL_STEP, KILL_PLACE = 25, 1
"""The step in which a worker is killed, by default, and the place of its last micro-batch."""
START_SECONDS, RECOVER_SECONDS = 120.0, 90.0
NO_REJOIN_SECONDS = 20.0
"""Time after a fault, by default, in which survivors are observed if no replacement is awaited."""
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
        environment = {"BENCH_SLOT": str(slot)}
        torchrun: list[str | Path] = [self._bin / "torchrun", "--nproc-per-node=1", "--max-restarts=1000"]
        endpoint = [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={TASK}"]
        hosted = [f"--nnodes={WORKERS}:{WORKERS}", "--rdzv-backend=c10d", *endpoint, "--local-addr=127.0.0.1"]
        hosted += [f"--rdzv-conf=is_host={int(slot == 0)}"]
        match self.system:
            case "unicron" | "unicron-loop":
                torchrun += [f"--nnodes=2:{WORKERS}", "--rdzv-backend=unicron", *endpoint, f"--rdzv-conf=node=n{slot}"]
                torchrun += [HERE / ("job_unicron.py" if self.system == "unicron" else "job_loop.py")]
            case "torchrun":
                torchrun += [*hosted, HERE / "job_ddp.py"]
            case "ft_launcher":
                torchrun = [self._bin / "ft_launcher", *torchrun[1:], *hosted, HERE / "job_ddp.py"]
            case "lm-resiliency":
                torchrun += [*hosted, HERE / "job_lm_resiliency.py"]
            case "nvrx":
                torchrun = [self._bin / "python", HERE / "job_nvrx.py"]  # as srun would: torchrun would end all
                environment |= {"RANK": str(slot), "WORLD_SIZE": str(WORKERS), "LOCAL_RANK": "0"}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
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


def strike(run: Run, fault: str, pid: int) -> float:
    """Let a fault strike the worker; return the time."""
    at = time.time()
    match fault:
        case "stuck":
            (run.processes.folder / f"stuck_{VICTIM}").touch()
        case "stopped":
            os.kill(pid, signal.SIGSTOP)
        case _:
            os.kill(pid, signal.SIGKILL)
    if fault == "node":
        with contextlib.suppress(ProcessLookupError):  # where the worker has no agent
            os.kill(run.processes.started[f"agent{VICTIM}"].pid, signal.SIGKILL)
    return at


def kill_worker(run: Run, fault: str, seconds: float = NO_REJOIN_SECONDS) -> Figures:
    """Let a fault strike the worker and time the recovery.

    Args:
        run: of the system.
        fault: ``worker``, ``node``, ``stopped`` or ``stuck``.
        seconds: time limit without a replacement: after ``worker`` it is `RECOVER_SECONDS`.
    """
    found = run.wait_kill_point()
    kill = Kill(at=strike(run, fault, found["pid"]), slot=VICTIM, pid=found["pid"], step=found["step"])
    rejoins = fault == "worker" and run.system != "nvrx"
    deadline = time.monotonic() + (RECOVER_SECONDS if fault == "worker" else seconds)
    wanted = {"progress_s", "rejoin_s"} if rejoins else {"progress_s"}
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
    """Kill the coordinator, or the peer's process in its place, and watch the training for some time."""
    run.wait_kill_point()
    if run.system == "torchft":
        pid = run.processes.started["lighthouse"].pid
    else:
        started = next(e for e in run.coordinator_events() if e["name"] == "coordinator_started")
        pid = int(started["fields"]["pid"])
    at = time.time()
    os.kill(pid, signal.SIGKILL)
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
        "last_step_s": max((e["t"] - at for e in after if e["event"] == "step"), default=0.0),
        "coordinator_back_s": back,
        "survivors_kept": all(e["pid"] == pids[e["slot"]] for e in after),
    }


def measure(
    system: str,
    fault: str,
    folder: Path,
    python: Path,
    kill_step: int = KILL_STEP,
    seconds: float = NO_REJOIN_SECONDS,
) -> Figures:
    """Run one system with one fault and return the figures."""
    shutil.rmtree(folder, ignore_errors=True)
    run = Run(system, folder, python, kill_step)
    try:
        run.start()
        figures = kill_coordinator(run) if fault == "coordinator" else kill_worker(run, fault, seconds)
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


def series(found: dict[str, Path], faults: Sequence[str], runs: int, output: Path, **options: Any) -> list[Figures]:
    """Run everything, alternating between systems, one run at a time.

    Args:
        found: folder of the interpreter of each system.
        faults: of this system; of others ``worker``, unless there is but one system.
        runs, output: as the command's.
        options: `measure`'s ``kill_step`` and ``seconds``.
    """
    results: list[Figures] = []
    for number in range(runs):
        for system, python in found.items():
            for fault in faults if system == "unicron" or len(found) == 1 else [f for f in faults if f == "worker"]:
                results.append(measure(system, fault, output / f"{system}-{fault}-{number}", python, **options))
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
    parser.add_argument("--faults", nargs="+", default=["worker", "node", "coordinator"], choices=FAULTS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kill-step", type=int, default=KILL_STEP)
    parser.add_argument("--seconds", type=float, default=NO_REJOIN_SECONDS, help="limit without a replacement")
    parser.add_argument("--torchft-venv", type=Path, help="virtual environment with torchft-nightly")
    parser.add_argument("--python", type=Path, help="folder of the interpreter of the only system")
    parser.add_argument("--output", type=Path, default=Path("bench-output/recovery"))
    options = parser.parse_args()
    found = pythons(options.systems, options.torchft_venv)
    if options.python is not None:
        found = dict.fromkeys(options.systems, options.python.absolute())
    extent = {"kill_step": options.kill_step, "seconds": options.seconds}
    results = series(found, options.faults, options.runs, options.output, **extent)
    print(table(results), coordinator_table(results), sep="\n\n")


if __name__ == "__main__":
    main()
