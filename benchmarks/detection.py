"""Measure how soon a fault is detected and how soon the other workers are notified, beside torchrun and torchft.

    python benchmarks/detection.py [--systems unicron torchrun torchft] [--faults kill exception ...] [--runs 20]

Three workers, one per agent, train the workload of benchmarks/recovery.py (steps of 4 micro-batches of 50 ms). Faults
strike one after the other at random moments, each after the world has been complete for some steps:

    kill       SIGKILL of a worker
    exception  a worker raises in its training_step
    agent      SIGKILL of an agent, whose connection is reset
    cut        a proxy between an agent and the coordinator stops forwarding; no connection ends
    hang       a worker's main thread sleeps for ever; its control thread and its agent live
    stop       SIGSTOP of a worker
    lock       a C call sleeps for ever and holds the interpreter's lock

``--burners 6`` adds processes that compute all the time: detection on an overloaded machine.

The injecting process records the moment of the fault. *Known* is the first event of the incident in the coordinator's
log, *notified* the time recorded by the other workers. All processes share one machine and one clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from detection_figures import detected, table
from measure import Event, Figures, typical_step
from recovery import HERE, SYSTEMS, TASK, Run, pythons
from workload import WORKERS

from unicron_lightning.cli.client import fetch
from unicron_lightning.local_cluster.cluster import Proxy

FAULTS = ("kill", "exception", "agent", "cut", "hang", "stop", "lock")
ORDERED = {"exception": "raise", "hang": "hang", "lock": "lock"}
"""Faults that a worker injects into itself, with the words of `job_detection`."""
VICTIM = 2
WHOLE_STEPS = 12
"""Steps of a complete world between faults, in which step times are learned again."""
LEARN_SECONDS = 32.0
"""Time to learn a connection's heartbeats: `detection.most_silence` applies at first and shrinks over 60 heartbeats."""
START_SECONDS, HEAL_SECONDS, DETECT_SECONDS = 120.0, 90.0, 60.0


class Watched(Run):
    """A run of one system in which faults strike repeatedly.

    Args:
        system: unicron, torchrun or torchft.
        folder: of its logs; created here.
        python: folder of the interpreter and scripts to use.
        overrides: of the coordinator's configuration.

    Attributes:
        proxy: connects the agent of `VICTIM` to the coordinator, if the fault is a cut.
    """

    def __init__(self, system: str, folder: Path, python: Path, overrides: Sequence[str] = ()) -> None:
        super().__init__(system, folder, python)
        self._overrides = overrides
        self.proxy: Proxy | None = None
        self._seq = 0

    def start(self) -> None:
        if self.system == "unicron":
            state = self.processes.folder / "coordinator"
            words = [f"coordinator.port={self.port}", f"store.state_dir={state}", *self._overrides]
            self.processes.start("coordinator", [self._bin / "unicron", "coordinator", *words])
            self.until(lambda: bool(self.coordinator_events()), "the coordinator", START_SECONDS)
        super().start()

    def start_agent(self, slot: int) -> None:
        if self.system != "unicron":
            super().start_agent(slot)
            return
        port = self.proxy.port if self.proxy is not None and slot == VICTIM else self.port
        command: list[str | Path] = [self._bin / "torchrun", "--nproc-per-node=1", "--max-restarts=1000"]
        command += ["--nnodes=2:3", "--rdzv-backend=unicron", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={TASK}"]
        forwarded = str(port != self.port).lower()
        command += [f"--rdzv-conf=node=n{slot},embedded=false,forwarded={forwarded}", HERE / "job_detection.py"]
        self.processes.start(f"agent{slot}", command, BENCH_SLOT=str(slot))

    def until(self, there: Callable[[], Any], what: str, seconds: float) -> Any:
        """Poll until the condition returns a true value, and return it.

        Raises:
            TimeoutError: the condition stayed false for ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not (found := there()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.system}: not within {seconds:g} s: {what}; logs in {self.processes.folder}")
            time.sleep(0.05)
        return found

    def wait_whole(self, since: float, seconds: float) -> dict[str, int]:
        """Wait until a complete world has made some steps; return the workers' processes by slot."""
        newest: dict[str, list[Event]] = {}

        def whole() -> dict[str, int]:
            for e in self.poll():
                if e["event"] == "step":
                    steps = newest.setdefault(e["slot"], [])
                    good = e["t"] > since and e["world"] == WORKERS and (not steps or steps[-1]["pid"] == e["pid"])
                    newest[e["slot"]] = [*steps, e] if good else [e] if e["world"] == WORKERS else []
            ready = len(newest) == WORKERS and all(len(steps) >= WHOLE_STEPS for steps in newest.values())
            return {slot: steps[-1]["pid"] for slot, steps in newest.items()} if ready else {}

        return dict(self.until(whole, "a whole world", seconds))

    def news(self) -> list[dict[str, Any]]:
        """The coordinator's events since the last call."""
        events: list[dict[str, Any]] = fetch(f"127.0.0.1:{self.port}", "/v1/events", since=str(self._seq))
        self._seq = max([self._seq, *(e["seq"] for e in events)])
        return events


def strike(run: Watched, fault: str, slot: str, pid: int) -> float:
    """Inject the fault; return the time at which it struck."""
    if fault in ORDERED:
        order = run.processes.folder / f"fault_{slot}"
        order.with_suffix(".tmp").write_text(ORDERED[fault])
        order.with_suffix(".tmp").rename(order)
        found = run.wait_event(lambda e: e["event"] == "fault" and e["pid"] == pid, START_SECONDS)
        return float(found["t"])
    at = time.time()
    if fault == "cut":
        assert run.proxy is not None
        run.proxy.cut()
    else:
        victim = run.processes.started[f"agent{slot}"].pid if fault == "agent" else pid
        os.kill(victim, signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    return at


def once(run: Watched, fault: str, generator: random.Random, since: float) -> Figures:
    """Inject one fault into a complete world and return its detection times."""
    pids = run.wait_whole(since, START_SECONDS if since == 0.0 else HEAL_SECONDS)
    slot = str(VICTIM) if fault == "cut" else str(generator.randrange(WORKERS))
    if run.system == "unicron":
        run.news()
    if fault == "cut":
        time.sleep(LEARN_SECONDS)
    step = typical_step(run.events, pids)
    time.sleep(generator.uniform(0.0, step))
    at = strike(run, fault, slot, pids[slot])
    figures = _known(run, at, slot) if run.system == "unicron" else _first_sign(run, at, slot)
    figures |= {"step_s": step, "struck": slot, "at": at}
    if fault in ("hang", "stop", "lock") and "worker" in figures:
        figures["named"] = figures["worker"] == _worker_of(run, pids[slot])
    if fault == "cut" and run.proxy is not None:
        run.proxy.heal()
    if fault == "agent":
        run.processes.started[f"agent{slot}"].wait(10)
        run.start_agent(int(slot))
    return figures


def _known(run: Watched, at: float, slot: str) -> Figures:
    log: list[dict[str, Any]] = []

    def complete() -> Figures:
        log.extend(run.news())
        run.poll()
        figures = detected(at, slot, log, run.events)
        heard = {e["slot"] for e in run.events if e["event"] == "told" and e.get("incident") == figures.get("incident")}
        return figures if len(heard - {slot}) == WORKERS - 1 else {}

    try:
        return dict(run.until(complete, "all others are notified", DETECT_SECONDS))
    except TimeoutError as error:
        return {**detected(at, slot, log, run.events), "error": str(error)}


def _first_sign(run: Watched, at: float, slot: str) -> Figures:
    """Time of the first sign in another worker, for systems without an event log."""

    def there() -> Figures:
        run.poll()
        signs = [e for e in run.events if e["t"] > at and e["event"] in ("reacted", "dropped") and e["slot"] != slot]
        return {"told_s": min(e["t"] for e in signs) - at} if signs else {}

    return dict(run.until(there, "a sign in another worker", DETECT_SECONDS))


def _worker_of(run: Watched, pid: int) -> str | None:
    """The worker whose hello came from a process."""
    hellos = (e["fields"] for e in run.coordinator_events() if e["name"] == "worker_hello")
    return next((str(fields["worker"]) for fields in hellos if fields["pid"] == pid), None)


def series(system: str, fault: str, runs: int, folder: Path, python: Path, overrides: Sequence[str]) -> list[Figures]:
    """Inject a fault ``runs`` times in one run of a system."""
    shutil.rmtree(folder, ignore_errors=True)
    run, generator = Watched(system, folder, python, overrides), random.Random(f"{system} {fault}")
    results: list[Figures] = []
    with ExitStack() as stack:
        stack.callback(run.processes.stop)
        if fault == "cut":
            run.proxy = stack.enter_context(closing(Proxy(run.port)))
        try:
            run.start()
            for _ in range(runs):
                since = results[-1]["at"] if results else 0.0
                about = {"system": system, "fault": fault, "load": round(os.getloadavg()[0], 2)}
                results.append({**about, **once(run, fault, generator, since)})
                print(json.dumps(results[-1]), flush=True)
        except TimeoutError as error:
            print(error, file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Run the series and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS[:2]), choices=SYSTEMS[:3])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS, help="peers: kill only")
    parser.add_argument("--runs", type=int, default=20, help="runs of each fault (default: %(default)s)")
    parser.add_argument("--torchft-venv", type=Path, help="virtual environment with torchft-nightly")
    parser.add_argument("--coordinator", nargs="*", default=[], help="overrides of the coordinator's configuration")
    parser.add_argument("--burners", type=int, default=0, help="processes that compute beside the runs")
    parser.add_argument("--output", type=Path, default=Path("bench-output/detection"))
    arguments = parser.parse_args()
    results: list[Figures] = []
    with burning(arguments.burners):
        _all_series(arguments, results)
    print(table(results))


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep processes computing while the context is open."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _all_series(arguments: argparse.Namespace, results: list[Figures]) -> None:
    for system, python in pythons(arguments.systems, arguments.torchft_venv).items():
        for fault in arguments.faults if system == "unicron" else [f for f in arguments.faults if f == "kill"]:
            folder = arguments.output / f"{system}-{fault}"
            results += series(system, fault, arguments.runs, folder, python, arguments.coordinator)
            (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
