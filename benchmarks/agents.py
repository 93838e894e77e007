"""Measure a coordinator under many agents: time until the last agent has received the epoch after a failure.

    python benchmarks/agents.py [--agents 1000] [--tasks 10 1] [--events 30] [--clients 1] [--seconds 10]
        [--limit 270] [--json FILE]

One real coordinator runs on loopback with its store on disk. Client processes (`agent_client`) simulate agents with one
worker each over real WebSockets: they register, receive grants, join, answer every epoch, send beats, and report
progress once a second and the first step of each epoch. Each value of ``--tasks`` is a run that divides the agents
among that many tasks.

Failures follow one after the other, each once the previous one has settled. In turns a worker dies (its agent reports
the death and later a new worker) and an agent is killed (another agent replaces it). Measured is the time from the
fault in its client to the moment when the last other agent of the task has the whole message of the next epoch, by the
clock that all processes share. An agent whose connection ends has ``reconnect_grace`` (0.25 s) to reconnect before it
counts as lost; this time is subtracted, as the table states.

Also measured: bytes of the coordinator's messages from a failure until the task is whole again (two epochs), for all
agents together; the coordinator's memory (largest resident set) and its share of a core while only beats and progress
arrive; the time from the start of the clients until all agents are members.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from measure import Figures

from unicron_lightning.local_cluster.processes import Processes, free_port

RECONNECT_GRACE = 0.25


class Clients:
    """The client processes and their reports.

    Args:
        number: of processes.
        port: of the coordinator.
        tasks: names of the tasks.
        size: agents of each.
    """

    def __init__(self, number: int, port: int, tasks: Sequence[str], size: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("agent_client.py")), str(port)]
        self.tasks, self.size = list(tasks), size
        self.places = {task: [f"{task}-{place}" for place in range(size)] for task in tasks}
        every = [place for task in tasks for place in self.places[task]]
        self._home = {place: index % number for index, place in enumerate(every)}
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(number)
        ]
        for process in self.processes:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
        self._buffers = [b"" for _ in self.processes]
        self.epochs: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        """By task and epoch: the latest report of each client."""
        self.struck: dict[str, float] = {}
        self.settled: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        """By task: the newest settled epoch of each client, its members there, and the time of the last one."""
        self.received: dict[int, dict[str, int]] = {}
        """By client: bytes of the coordinator's messages, by kind."""
        self.notes: dict[int, dict[str, int]] = {}
        self.links: dict[int, dict[str, Any]] = {}
        """By client: number of registered agents, and the time of the last registration."""

    def bytes_received(self) -> Counter[str]:
        """Bytes of the coordinator's messages to all agents, by kind."""
        return sum((Counter(part) for part in self.received.values()), Counter())

    def start(self) -> None:
        """Start all agents."""
        least = max(1, self.size - self.size // 5)
        for number in range(len(self.processes)):
            told = [
                [place, task, least, self.size]
                for task in self.tasks
                for place in self.places[task]
                if self._home[place] == number
            ]
            self._order(number, do="start", agents=told)

    def strike(self, fault: str, places: Sequence[str]) -> None:
        """Cause a fault of agents: ``die`` (the worker), ``kill`` (the agent), ``flap`` (the link)."""
        for number in range(len(self.processes)):
            here = [place for place in places if self._home[place] == number]
            if here:
                self._order(number, do=fault, places=here)

    def _order(self, number: int, **order: Any) -> None:
        stdin = self.processes[number].stdin
        assert stdin is not None
        stdin.write(json.dumps(order).encode() + b"\n")
        stdin.flush()

    def pause(self, seconds: float) -> None:
        """Read reports for some time: a client whose pipe is full stands still."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            self.read()

    def read(self) -> None:
        """Read the clients' new reports."""
        for number, process in enumerate(self.processes):
            assert process.poll() is None, "a client has ended"
            assert process.stdout is not None
            data = self._buffers[number] + (process.stdout.read() or b"")
            *lines, self._buffers[number] = data.split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "struck" in told:
                    self.struck[told["struck"]] = told["at"]
                elif "settled" in told:
                    self.received[number], self.notes[number] = told["received"], told["notes"]
                    self.links[number] = told["links"]
                    for task, found in told["settled"].items():
                        self.settled[task][number] = found
                else:
                    self.epochs[told["task"], told["epoch"]][number] = told

    def newest(self, task: str) -> int:
        """The newest epoch that any member has received."""
        return max((epoch for of, epoch in self.epochs if of == task), default=0)

    def whole(self, task: str) -> float | None:
        """Time at which the last of all members could continue in the newest epoch; None if some cannot yet."""
        parts = list(self.settled[task].values())
        newest = max((part["epoch"] for part in parts), default=0)
        there = [part for part in parts if part["epoch"] == newest]
        whole = newest >= self.newest(task) and sum(part["count"] for part in there) == self.size
        return max(part["last"] for part in there) if whole else None

    def close(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Bench:
    """A coordinator and its clients, in a temporary folder.

    Args:
        agents, tasks: numbers.
        clients: number of client processes.
    """

    def __init__(self, agents: int, tasks: int, clients: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="agents-")
        path = Path(self._folder.name)
        self._processes = Processes(path / "run", {}, inside=True)
        self.port = free_port()
        command = [sys.executable, "-m", "unicron_lightning.coordinator", f"coordinator.port={self.port}"]
        self._command = [*command, f"store.state_dir={path}/state"]
        self.start_coordinator()
        self.clients = Clients(clients, self.port, [f"task{n}" for n in range(tasks)], agents // tasks)

    def start_coordinator(self) -> None:
        """Start the coordinator and wait until it listens."""
        self.coordinator = self._processes.start("coordinator", self._command)
        await_port(self.port)

    def kill_coordinator(self) -> None:
        """Send it SIGKILL."""
        self.coordinator.kill()
        self.coordinator.wait()

    def start_agents(self, limit: float = 600.0) -> float:
        """Start all agents; return the seconds until all are members."""
        began = time.monotonic()
        self.clients.start()
        return self.await_whole(limit) - began

    def await_whole(self, seconds: float = 300.0) -> float:
        """Wait until all agents are members of their tasks; return the time of the last one."""
        times: list[float] = []

        def probe() -> bool:
            found = [self.clients.whole(task) for task in self.clients.tasks]
            times[:] = [at for at in found if at is not None]
            return len(times) == len(found)

        wait(self.clients, "all agents are members", probe, seconds)
        return max(times)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.clients.close()
        self._processes.stop()
        self._folder.cleanup()


def wait(clients: Clients, what: str, probe: Any, seconds: float = 300.0) -> Any:
    """Poll until ``probe`` returns a true value, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
        clients.read()
    return found


def measure(agents: int, tasks: int, events: int, number_of_clients: int, seconds: float, limit: float) -> Figures:
    """Run one coordinator with its clients and collect the figures."""
    load, until = os.getloadavg()[0], time.monotonic() + limit
    with Bench(agents, tasks, number_of_clients) as bench:
        clients = bench.clients
        start_seconds = bench.start_agents(limit)
        print(f"started in {start_seconds:.1f} s", file=sys.stderr)
        clients.pause(2.0)
        quiet = share(psutil.Process(bench.coordinator.pid), clients, seconds)
        busy = share(psutil.Process(clients.processes[0].pid), clients, 2.0)
        clients.read()
        before = clients.bytes_received()
        times: list[float] = []
        while len(times) < events and time.monotonic() < until:
            times.append(strike(bench, len(times)))
        clients.read()
        sent = {kind: round(count / max(1, len(times))) for kind, count in (clients.bytes_received() - before).items()}
        memory = memory_mb(bench.coordinator.pid)
    about = {"agents": clients.size * tasks, "tasks": tasks, "events": len(times), "clients": number_of_clients}
    figures = {"start_s": round(start_seconds, 2), "quiet_cpu": round(quiet, 3), "client_cpu": round(busy, 3), **memory}
    loads = {"load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
    return {**about, **figures, **loads, "bytes_per_event": sent, "died_ms": times[0::2], "closed_ms": times[1::2]}


def strike(bench: Bench, number: int) -> float:
    """Inject one failure and wait until the task is complete again.

    Returns:
        Milliseconds until the last of the other agents had the next epoch.
    """
    clients = bench.clients
    task = clients.tasks[number % len(clients.tasks)]
    place = random.Random(number).choice(clients.places[task])
    clients.read()
    before = clients.newest(task)
    kills = number % 2 == 1
    clients.struck.pop(place, None)
    clients.strike("kill" if kills else "die", [place])

    def told() -> float | None:
        for epoch in sorted(epoch for of, epoch in clients.epochs if of == task and epoch > before):
            parts = list(clients.epochs[task, epoch].values())
            if parts[0]["kind"] == "fail" and sum(part["count"] for part in parts) >= clients.size - 1:
                return float(max(part["last"] for part in parts))
        return None

    last = wait(clients, f"the epoch after {before} of {task}", told)
    bench.await_whole()
    clients.pause(0.5)
    return round(1e3 * (last - clients.struck[place] - (RECONNECT_GRACE if kills else 0.0)), 2)


def raise_descriptor_limit(agents: int) -> None:
    """Raise the limit of open files of this process and those that it starts.

    Raises:
        SystemExit: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = agents + 500
    if soft < needed <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    elif needed > hard:
        sys.exit(f"--agents {agents}: expected a hard limit of open files of {needed} or more (ulimit -Hn), got {hard}")


def await_port(port: int) -> None:
    """Wait until the coordinator listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, "the coordinator does not answer"
            time.sleep(0.05)
        else:
            return


def share(process: psutil.Process, clients: Clients, seconds: float) -> float:
    """CPU time of a process over an interval, as a share of one core."""
    before = process.cpu_times()
    clients.pause(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


def memory_mb(pid: int) -> Figures:
    """Resident set, now and at its largest, in MB of 10^6 bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = {"rss_mb": lines["VmRSS"], "peak_mb": lines["VmHWM"]}
    return {name: round(int(text.split()[0]) * 1024 / 1e6, 1) for name, text in kib.items()}


def quantile(values: list[float], share_: float) -> float:
    """Quantile by nearest rank, rounded up: of 30 values the 0.99 quantile is the largest."""
    return sorted(values)[min(len(values) - 1, int(share_ * len(values)))]


def table(results: list[Figures]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| agents | tasks | failure | events | p50 ms | p99 ms | kB sent | memory MB | CPU, quiet | start s | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        for name, key in (("worker died", "died_ms"), ("agent killed, less 250 ms", "closed_ms")):
            sent = sum(r["bytes_per_event"].values()) / 1e3
            if values := r[key]:
                lines.append(
                    f"| {r['agents']} | {r['tasks']} | {name} | {len(values)} | {statistics.median(values):.1f} "
                    f"| {quantile(values, 0.99):.1f} | {sent:.0f} | {r['peak_mb']} "
                    f"| {100 * r['quiet_cpu']:.0f} % | {r['start_s']} "
                    f"| {r['load_before']}-{r['load_after']} |"
                )
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process outlives this one
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--tasks", type=int, nargs="+", default=[10, 1])
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="observation time of the coordinator under heartbeats only"
    )
    parser.add_argument(
        "--limit", type=float, default=270.0, help="seconds for the start, and after which no further failure is caused"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    raise_descriptor_limit(options.agents)
    shape = (options.events, options.clients, options.seconds, options.limit)
    results = [measure(options.agents, n, *shape) for n in options.tasks]
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
