"""Strike coordinators, members of etcd and workers of a real training at random, then check every history.

Two coordinators with `store=etcd` on three members of etcd, three agents with one worker each, and a client that
submits jobs. Strikes: the leader is killed, or stopped for 20 s and woken, or the stand-by is killed; one member of
etcd is killed, or two for some seconds; with or without a worker at the same time. What was killed starts again.
At the end `histories` checks the log, the orders and the workers' steps, and the training must equal one without
failures.

    python benchmarks/failover.py --faults 20 --seed 1

Each strike is printed with the time until a coordinator answers, and until a worker finishes a step in a new world if
one was killed.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from coordinator.fake_etcd import EtcdMembers, three_members
from histories import Order, violations
from system.cluster import SETTINGS, Cluster
from system.judge import Reference, check_exact
from typing_extensions import override

from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.local_cluster.processes import free_port, kill, tied, until

AGENTS = 3
SHAPE = {"nodes": AGENTS, "full": AGENTS, "pace": 0.05, "slow": 0.1}
STOPPED_SECONDS = 20.0
STRIKES = ("kill leader", "stop leader", "kill stand-by", "kill member", "kill two members", "no coordinator")


class Redundant(Cluster):
    """A cluster with two coordinators."""

    def __init__(self, folder: Path, members: EtcdMembers) -> None:
        self.ports = (free_port(), free_port())
        self.members = members
        super().__init__(folder, agents=AGENTS, nodes=f"1:{AGENTS}", settings=SHAPE)

    @property
    @override
    def endpoint(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start_one(self, number: int) -> None:
        """Start a coordinator that does not run, and wait until it leads or stands by."""
        words = [f"coordinator.port={self.ports[number]}", "store=etcd", f"store.state_dir={self.folder}/state{number}"]
        words.append(f"store.endpoints=[{','.join(self.members.urls)}]")
        before = self.turns(number)
        self.processes.start(f"coordinator{number}", tied("unicron_lightning.coordinator", *words))
        until("a candidate", lambda: self.turns(number) > before, 60)

    def turns(self, number: int) -> int:
        """Return how often a coordinator has begun to lead or to stand by."""
        path = self.processes.log(f"coordinator{number}")
        text = path.read_text() if path.exists() else ""
        return text.count("coordinator_leads") + text.count("coordinator_stands_by")

    def process(self, number: int) -> Any:
        return self.processes.started[f"coordinator{number}"]

    def leader(self) -> int | None:
        """Return the number of the coordinator that answers."""
        for number, port in enumerate(self.ports):
            try:
                about = self.fetch_at(port, "/v1/status")["coordinator"]
            except CoordinatorUnavailable:
                continue
            assert about["port"] == port
            return number
        return None

    def fetch_at(self, port: int, path: str) -> Any:
        from unicron_lightning.cli.client import fetch

        return fetch(f"127.0.0.1:{port}", path, self.access)

    @override
    def coordinator(self) -> int | None:
        """Return no process: none is stopped by the end of the training."""
        return None


class Client:
    """Submits a job after the other, and cancels none; each order is recorded."""

    def __init__(self, cluster: Redundant) -> None:
        self._cluster = cluster
        self.orders: list[Order] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.3):
            number += 1
            job = {"name": f"j{number}", "command": ["true"], "min_nodes": 1, "max_nodes": 1}
            try:
                self._cluster.fetch("/v1/jobs", method="POST", body=job)
                self.orders.append(Order(f"j{number}", confirmed=True))
            except UnicronError:
                self.orders.append(Order(f"j{number}", confirmed=False))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def struck(cluster: Redundant, kind: str, *, worker: bool, chance: random.Random) -> dict[str, Any]:
    """Strike, and wait until all is whole again; return what happened."""
    world = cluster.wait_world(AGENTS, seconds=120)
    leader = cluster.leader()
    assert leader is not None
    began, waking = time.time(), 0.0
    killed: list[int] = []
    if kind in ("kill leader", "no coordinator"):
        kill(cluster.process(leader).pid, signal.SIGKILL)
    if kind in ("kill stand-by", "no coordinator"):
        kill(cluster.process(1 - leader).pid, signal.SIGKILL)
    if kind == "stop leader":
        kill(cluster.process(leader).pid, signal.SIGSTOP)
        waking = time.monotonic() + STOPPED_SECONDS
    if kind in ("kill member", "kill two members"):
        killed = chance.sample(range(3), 2 if kind == "kill two members" else 1)
        for member in killed:
            cluster.members.kill(member)
    if worker:
        kill(chance.choice(world)["pid"], signal.SIGKILL)
    if len(killed) == 2:
        time.sleep(4)
        cluster.members.start(killed.pop())
    if kind == "no coordinator":
        time.sleep(1)
        cluster.start_one(0)
    until(
        "a leader", lambda: (found := cluster.leader()) is not None and (kind != "stop leader" or found != leader), 90
    )
    answers = time.time() - began
    healed = None
    if worker:
        epoch = max(note["epoch"] for note in world)
        until("a new world", lambda: any(n["epoch"] > epoch for n in cluster.newest_steps()), 90)
        healed = min(n["at"] for n in cluster.newest_steps() if n["epoch"] > epoch) - began
    if waking:
        time.sleep(max(0.0, waking - time.monotonic()))
        kill(cluster.process(leader).pid, signal.SIGCONT)
    for number in range(2):
        if cluster.process(number).poll() is not None:
            cluster.start_one(number)
    for member in killed:
        cluster.members.start(member)
    until("etcd", lambda: all(cluster.members.healthy(member) for member in range(3)), 60)
    cluster.wait_world(AGENTS, after=time.time(), seconds=120)
    return {"kind": kind, "worker": worker, "answers": round(answers, 2), "healed": healed and round(healed, 2)}


def checked(cluster: Redundant, client: Client) -> list[str]:
    """Return all violations in the histories; print figures about them."""
    events: list[dict[str, Any]] = []
    while page := cluster.fetch("/v1/events", since=str(events[-1]["seq"] if events else 0)):
        events += page
    known = [job["name"] for job in cluster.fetch("/v1/jobs")]
    steps = sorted(cluster.notes("step"), key=lambda note: (note["pid"], note["at"]))
    confirmed = sum(order.confirmed for order in client.orders)
    print(f"{len(events)} events, {confirmed} of {len(client.orders)} orders confirmed, {len(steps)} steps of workers")
    return violations(events, client.orders, known, steps)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place, three_members(Path(place) / "etcd") as members:
        (folder := Path(place) / "run").mkdir()
        cluster = Redundant(folder, members)
        try:
            cluster.start_one(0)
            until("a leader", lambda: cluster.leader() is not None, 60)
            cluster.start_one(1)
            cluster.start()
            client = Client(cluster)
            try:
                for number in range(options.faults):
                    kind = STRIKES[number] if number < len(STRIKES) else chance.choice(STRIKES)
                    print(struck(cluster, kind, worker=chance.random() < 0.7, chance=chance), flush=True)
            finally:
                client.close()
            found = checked(cluster, client)
            (folder / "finish").touch()
            cluster.wait_exit()
        finally:
            cluster.close()
        for each in found:
            print(f"VIOLATION {each}")
        epochs = cluster.notes("end")[0]["data_epoch"]
        reference = Reference(Path(place) / "reference", {**SETTINGS, **SHAPE}, epochs)
        print(check_exact(folder, reference, workers=AGENTS))
        print(f"{options.faults} strikes, seed {options.seed}: {len(found)} violations")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
