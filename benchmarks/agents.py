"""Measure a coordinator under many agents: time until the last agent has received the epoch after a failure.

    python benchmarks/agents.py [--agents 1000] [--tasks 10 1] [--events 30] [--clients 3] [--seconds 10] [--json FILE]

One real coordinator runs on loopback with its store on disk. Client processes (`agent_client`) simulate agents with one
worker each over real WebSockets: they register, receive grants, join, answer every epoch, and report progress once a
second and the first step of each epoch. Each value of ``--tasks`` is a run that divides the agents among that many
tasks.

Failures follow one after the other, each once the previous one has settled. In turns a worker dies (its agent reports
the death and later a new worker) and an agent's connection is closed (another agent replaces it). Measured is the time
from the fault in its client to the moment when the last other agent of the task has the whole message of the next
epoch, by the clock that all processes share. An agent whose connection ends has ``reconnect_grace`` (0.25 s) to
reconnect before it counts as lost; this time is subtracted, as the table states.

Also measured: bytes of the coordinator's messages from a failure until the task is whole again (two epochs), for all
agents together; the coordinator's memory (largest resident set) and its share of a core while only heartbeats arrive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
from measure import Figures

from unicron_lightning.local_cluster.processes import Processes, free_port

TARGET_P99_MS, TARGET_MB = 100.0, 300.0
RECONNECT_GRACE = 0.25


class Clients:
    """The client processes and their reports."""

    def __init__(self, number: int, port: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("agent_client.py")), str(port)]
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
        self.settled: dict[str, int] = {}
        self.received: dict[int, dict[str, int]] = {}
        """By client: bytes of the coordinator's messages, by kind."""

    def bytes_received(self) -> Counter[str]:
        """Bytes of the coordinator's messages to all agents, by kind."""
        return sum((Counter(part) for part in self.received.values()), Counter())

    def order(self, number: int, **order: Any) -> None:
        stdin = self.processes[number].stdin
        assert stdin is not None
        stdin.write(json.dumps(order).encode() + b"\n")
        stdin.flush()

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
                    self.received[number] = told["received"]
                    for task, epoch in told["settled"].items():
                        self.settled[task] = max(epoch, self.settled.get(task, 0))
                else:
                    self.epochs[told["task"], told["epoch"]][number] = told

    def whole(self, task: str, size: int) -> bool:
        """Whether the newest epoch of a task has settled with ``size`` members."""
        newest = max((epoch for of, epoch in self.epochs if of == task), default=0)
        settled = newest and self.settled.get(task, 0) == newest
        return bool(settled) and sum(part["count"] for part in self.epochs[task, newest].values()) == size

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


def wait(clients: Clients, what: str, probe: Any, seconds: float = 300.0) -> Any:
    """Poll until ``probe`` returns a true value, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
        clients.read()
    return found


def measure(agents: int, tasks: int, events: int, number_of_clients: int, seconds: float) -> Figures:
    """Run one coordinator with its clients and collect the figures."""
    size = agents // tasks
    nodes = (max(1, size - size // 10), size)
    names = [(f"n{place}.0", f"task{place % tasks}", nodes) for place in range(size * tasks)]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        processes = Processes(Path(folder) / "run", {}, inside=True)
        port = free_port()
        command = [sys.executable, "-m", "unicron_lightning.coordinator", f"coordinator.port={port}"]
        coordinator = processes.start("coordinator", [*command, f"store.state_dir={folder}/state"])
        clients = None
        try:
            await_port(port)
            seen = psutil.Process(coordinator.pid)
            clients = Clients(number_of_clients, port)
            began = time.monotonic()
            for place in range(number_of_clients):
                clients.order(place, do="start", agents=names[place::number_of_clients])
            home = {name: place % number_of_clients for place, (name, _, _) in enumerate(names)}
            wait(clients, "all members", lambda: all(clients.whole(f"task{n}", size) for n in range(tasks)), 600)
            start_seconds = time.monotonic() - began
            time.sleep(2)
            quiet = share(seen, seconds)
            before = clients.bytes_received()
            times = [strike(clients, home, number, tasks, size) for number in range(events)]
            sent = {kind: round(count / max(1, events)) for kind, count in (clients.bytes_received() - before).items()}
            memory = memory_mb(coordinator.pid)
        finally:
            if clients is not None:
                clients.close()
            processes.stop()
    about = {"agents": size * tasks, "tasks": tasks, "events": events, "clients": number_of_clients}
    figures = {"start_s": round(start_seconds, 2), "quiet_cpu": round(quiet, 3), **memory}
    loads = {"load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
    return {**about, **figures, **loads, "bytes_per_event": sent, "died_ms": times[0::2], "closed_ms": times[1::2]}


def strike(clients: Clients, home: dict[str, int], number: int, tasks: int, size: int) -> float:
    """Inject one failure and wait until the task is complete again.

    Returns:
        Milliseconds until the last of the other agents had the next epoch.
    """
    task = f"task{number % tasks}"
    index = random.Random(number).randrange(size)
    name = f"n{index * tasks + number % tasks}.0"
    clients.read()
    before = clients.settled[task]
    closes = number % 2 == 1
    clients.struck.pop(name, None)
    clients.order(home[name], do="close" if closes else "die", agent=name)

    def told() -> tuple[int, float] | None:
        epochs = sorted(epoch for of, epoch in clients.epochs if of == task and epoch > before)
        for epoch in epochs:
            parts = list(clients.epochs[task, epoch].values())
            if parts[0]["kind"] == "fail" and sum(part["count"] for part in parts) >= size - 1:
                return epoch, max(part["last"] for part in parts)
        return None

    _, last = wait(clients, f"the epoch after {before} of {task}", told)
    wait(clients, "all members again", lambda: clients.whole(task, size))
    time.sleep(0.5)
    return round(1e3 * (last - clients.struck[name] - (RECONNECT_GRACE if closes else 0.0)), 2)


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


def share(process: psutil.Process, seconds: float) -> float:
    """CPU time of a process over an interval, as a share of one core."""
    before = process.cpu_times()
    time.sleep(seconds)
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
        for name, key in (("worker died", "died_ms"), ("connection closed, less 250 ms", "closed_ms")):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--tasks", type=int, nargs="+", default=[10, 1])
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--clients", type=int, default=3, help="client processes")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="observation time of the coordinator under heartbeats only"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    results = [measure(options.agents, n, options.events, options.clients, options.seconds) for n in options.tasks]
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
