"""Strike coordinators, members of etcd, their links and workers of a real training at random, then check histories.

Two coordinators with `store=etcd` on three members of etcd, three agents with one worker each, and a client
that submits jobs. With --sharded there are four agents, whose model is divided into shards. Each coordinator reaches
each member by a link of its own, and agents, workers and the client reach each coordinator by one; a link that is cut
is silent and closes no connection. Strikes:

- the leader is killed, or stopped for 6 to 20 s and woken; the stand-by is killed; both are;
- one member of etcd is killed, or two for some seconds, or one is slow: stopped for 1.9 of every 2 s;
- the disk of one member of etcd, or of two, is slow for 12 s: each fsync takes 2 s longer (needs strace);
- the leader is cut from etcd, from agents, or from both, for 8 s or 25 s;

at the same time a worker is killed, or an agent with its worker, whose node joins again, or a node is drained and
used again, or, with --sharded, the model is on its way to another number of shards, or nothing happens. What was killed
starts again. At the end `histories` checks the log, the orders and the workers' steps, and the training must equal one
without failures.

    python benchmarks/failover.py --faults 20 --seed 1
    python benchmarks/failover.py --faults 12 --seed 1 --sharded --beside relayout
    python benchmarks/failover.py --faults 10 --only "stop leader" --beside worker

Each strike is printed with the time until a coordinator answers, and until a worker finishes a step in a new world if
it has to; with nothing beside it, with the time that steps take.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from coordinator.fake_etcd import EtcdMembers, three_members
from fsdp.judge import SCRIPT as SHARDED
from fsdp.judge import alone, differences
from histories import Order, violations
from system.cluster import SCRIPT, SETTINGS, Cluster
from system.judge import Reference, check_exact
from typing_extensions import override

from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.local_cluster.cluster import Proxy
from unicron_lightning.local_cluster.processes import free_port, kill, tied, until

MEMBERS, COORDINATORS = 3, 2
STOPPED_SECONDS = (20.0, 6.0, 10.0)
CUT_SECONDS = (8.0, 25.0)
SLOW_DISK_SECONDS = 12.0
SYNC_SECONDS = 2
STRIKES = (
    "kill leader", "stop leader", "kill stand-by", "kill member", "kill two members", "no coordinator", "slow member",
    "slow disk", "two slow disks", "cut from etcd", "cut from agents", "cut from both",
)  # fmt: skip
BESIDE = ("worker", "worker", "agent", "drain", "")


@dataclass(frozen=True, kw_only=True)
class StruckTraining:
    """What the agents run; ``beside``: of what happens at the same time as a strike."""

    script: Path
    agents: int
    least: int
    settings: dict[str, Any]
    beside: tuple[str, ...]


PLAIN = StruckTraining(
    script=SCRIPT,
    agents=3,
    least=1,
    settings={"nodes": 3, "full": 3, "pace": 0.05, "slow": 0.1},
    beside=BESIDE,
)
OF_SHARDS = StruckTraining(
    script=SHARDED,
    agents=4,
    least=2,
    settings={
        "steps": 6,
        "full": 4,
        "finish": True,
        "pace": 0.3,
        "slow": 0.3,
        "samples": 65536,
        "shards": 2,
        "options": {"save_distributed_checkpoint": True},
    },
    beside=(*BESIDE, "relayout", "relayout"),
)


class Redundant(Cluster):
    """A cluster with two coordinators, behind links."""

    def __init__(self, folder: Path, members: EtcdMembers, training: StruckTraining) -> None:
        self.ports = tuple(free_port() for _ in range(COORDINATORS))
        self.members = members
        clients = [client for client, _ in members.ports]
        self.to_etcd = [[Proxy(port) for port in clients] for _ in self.ports]
        self.to_coordinators = [Proxy(port) for port in self.ports]
        self.training, number = training, training.agents
        super().__init__(
            folder, agents=number, nodes=f"{training.least}:{number}", script=training.script, conf="forwarded=true",
            settings=training.settings,
        )  # fmt: skip
        self.access = replace(self.access, forwarded=True)

    @property
    @override
    def endpoint(self) -> str:
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.to_coordinators)

    def links(self, number: int, kind: str) -> list[Proxy]:
        """Return a coordinator's links that a strike cuts."""
        to_etcd, to_it = self.to_etcd[number], [self.to_coordinators[number]]
        cut = {"cut from etcd": to_etcd, "cut from agents": to_it, "cut from both": [*to_etcd, *to_it]}
        return cut.get(kind, [])

    @override
    def close(self, **options: Any) -> None:
        proxies = [*self.to_coordinators, *(proxy for each in self.to_etcd for proxy in each)]
        for proxy in proxies:
            proxy.heal()
        super().close(**options)
        for proxy in proxies:
            proxy.close()

    def ordered(self, order: Callable[[str], None], about: str) -> None:
        """Give an order, again until it is confirmed, or was without an answer."""

        def confirmed() -> bool:
            try:
                order(about)
            except UnicronError as error:
                return any(text in str(error) for text in ("on its way", "that is what the task has"))
            return True

        until("an order", confirmed, 90)

    def logged(self) -> list[dict[str, Any]]:
        """Return all events, page by page."""
        found: list[dict[str, Any]] = []
        while page := self.fetch("/v1/events", since=str(found[-1]["seq"] if found else 0)):
            found += page
        return found

    def layouts(self) -> int:
        """Return how often the layout has changed; 0 while no coordinator answers."""
        try:
            return sum(event["name"] == "layout_changes" for event in self.logged())
        except UnicronError:
            return 0

    def relayout(self, shards: str) -> None:
        """Order another number of shards."""
        self.fetch(f"/v1/tasks/{self.task}/relayout", method="POST", shards=shards)

    def start_one(self, number: int) -> None:
        """Start a coordinator that does not run, and wait until it leads or stands by."""
        words = [f"coordinator.port={self.ports[number]}", "store=etcd", f"store.state_dir={self.folder}/state{number}"]
        words.append(f"store.endpoints=[{','.join(f'http://127.0.0.1:{each.port}' for each in self.to_etcd[number])}]")
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


class Strike:
    """One strike, and the way back from it.

    Args:
        cluster: that is struck.
        kind: of `STRIKES`.
        beside: of `BESIDE`.
        chance: decides about members and workers.
    """

    def __init__(self, cluster: Redundant, kind: str, beside: str, chance: random.Random) -> None:
        self._cluster, self.kind, self.beside, self._chance = cluster, kind, beside, chance
        self._killed: list[int] = []
        self._drain: threading.Thread | None = None
        self._drained = ""
        self._leader = self._syncs = 0

    def run(self) -> str:
        """Strike, and wait until all is whole again; return what happened."""
        cluster = self._cluster
        world = cluster.wait_world(cluster.training.agents, seconds=120)
        until("a leader", lambda: cluster.leader() is not None, 90)
        layouts = cluster.layouts()
        if self.beside == "relayout":
            cluster.ordered(cluster.relayout, "1" if layouts % 2 == 0 else "2")
            time.sleep(self._chance.uniform(0.0, 1.5))
        self._leader, began = cluster.leader() or 0, time.time()
        self._strike()
        self._strike_beside(world)
        healing = threading.Thread(target=self._heal)
        healing.start()
        try:
            if self.kind == "no coordinator":  # a process started by a thread would end with it
                time.sleep(1)
                cluster.start_one(0)
            out = {None, self._leader} if self.kind in ("stop leader", "cut from etcd", "cut from both") else {None}
            until("a leader", lambda: cluster.leader() not in out, 90)
            answers, healed = time.time() - began, None
            if self.beside == "relayout":
                until("the layout", lambda: cluster.layouts() > layouts, 120)
            if self.beside in ("worker", "agent", "relayout"):
                epoch = max(note["epoch"] for note in world)
                until("a new world", lambda: any(n["epoch"] > epoch for n in cluster.newest_steps()), 90)
                healed = round(min(n["at"] for n in cluster.newest_steps() if n["epoch"] > epoch) - began, 2)
        finally:
            healing.join()
        self._restore()
        calm = ""
        if not self.beside:
            calm = f", steps: {durations(cluster, began - 15, began)} before, {durations(cluster, began)} since"
        again = f", a step in a new world after {healed} s" if healed else ""
        syncs = f", {self._syncs} syncs were slow" if "disk" in self.kind else ""
        return f"a coordinator answers after {answers:.2f} s{again}{syncs}{calm}"

    def _strike(self) -> None:
        cluster, kind, leader = self._cluster, self.kind, self._leader
        if kind in ("kill leader", "no coordinator"):
            kill(cluster.process(leader).pid, signal.SIGKILL)
        if kind in ("kill stand-by", "no coordinator"):
            kill(cluster.process(1 - leader).pid, signal.SIGKILL)
        if kind == "stop leader":
            kill(cluster.process(leader).pid, signal.SIGSTOP)
        if kind in ("kill member", "kill two members"):
            self._killed = self._chance.sample(range(MEMBERS), 2 if kind == "kill two members" else 1)
            for member in self._killed:
                cluster.members.kill(member)
        for proxy in cluster.links(leader, kind):
            proxy.cut()

    def _strike_beside(self, world: list[dict[str, Any]]) -> None:
        cluster, victim = self._cluster, self._chance.choice(world)
        if self.beside == "worker":
            kill(victim["pid"], signal.SIGKILL)
        if self.beside == "agent":
            kill(cluster.agents[victim["node"]].pid, signal.SIGKILL)
            cluster.replace(victim["node"])
        if self.beside == "drain":
            self._drained = victim["node"]
            self._drain = threading.Thread(target=cluster.ordered, args=(cluster.drain, self._drained))
            self._drain.start()

    def _heal(self) -> None:
        """End what ends by itself, beside the waiting for its effects."""
        cluster, kind = self._cluster, self.kind
        if kind == "stop leader":
            time.sleep(self._chance.choice(STOPPED_SECONDS))
            kill(cluster.process(self._leader).pid, signal.SIGCONT)
        if kind == "kill two members":
            time.sleep(4)
            cluster.members.start(self._killed.pop())
        if kind.startswith("cut"):
            time.sleep(self._chance.choice(CUT_SECONDS))
            for proxy in cluster.links(self._leader, kind):
                proxy.heal()
        if kind in ("slow disk", "two slow disks"):
            self._slow_disks(self._chance.sample(range(MEMBERS), 2 if kind == "two slow disks" else 1))
        if kind == "slow member":
            slow = cluster.members.processes[self._chance.randrange(MEMBERS)]
            for _ in range(5):
                slow.send_signal(signal.SIGSTOP)
                time.sleep(1.9)
                slow.send_signal(signal.SIGCONT)
                time.sleep(0.1)

    def _slow_disks(self, members: list[int]) -> None:
        """Make each fsync of members take longer for a while, and count them."""
        traces = [self._cluster.folder / f"syncs-{member}" for member in members]
        tracers = []
        try:
            for member, trace in zip(members, traces, strict=True):
                pid = self._cluster.members.processes[member].pid
                delay = f"inject=fsync,fdatasync:delay_exit={SYNC_SECONDS}000000"
                words = ["strace", "-f", "-qq", "-o", str(trace), "-e", "trace=fsync,fdatasync", "-e", delay]
                tracers.append(subprocess.Popen([*words, "-p", str(pid)], stderr=subprocess.DEVNULL))
            time.sleep(SLOW_DISK_SECONDS)
        finally:
            for tracer in tracers:
                tracer.terminate()  # it detaches
                tracer.wait()
        self._syncs = sum(trace.read_text().count("(DELAYED)") for trace in traces)

    def _restore(self) -> None:
        cluster = self._cluster
        if self._drain is not None:
            self._drain.join()
            cluster.ordered(cluster.undrain, self._drained)
        for number in range(COORDINATORS):
            if cluster.process(number).poll() is not None:
                cluster.start_one(number)
        for member in self._killed:
            cluster.members.start(member)
        until("etcd", lambda: all(cluster.members.healthy(member) for member in range(MEMBERS)), 60)
        cluster.wait_world(cluster.training.agents, after=time.time(), seconds=120)


def durations(cluster: Redundant, since: float, until: float = math.inf) -> str:
    """Describe the seconds between the steps of each worker."""
    at: dict[int, list[float]] = defaultdict(list)
    for note in cluster.newest_steps():
        if since <= note["at"] < until:
            at[note["pid"]].append(note["at"])
    found = sorted(later - former for times in at.values() for former, later in itertools.pairwise(sorted(times)))
    return f"{statistics.median(found):.2f} s, {found[-1]:.2f} s at most" if found else "an unknown time"


def checked(cluster: Redundant, client: Client) -> list[str]:
    """Return all violations in the histories; print figures about them."""
    events = cluster.logged()
    known = [job["name"] for job in cluster.fetch("/v1/jobs")]
    steps = sorted(cluster.notes("step"), key=lambda note: (note["pid"], note["at"]))
    confirmed = sum(order.confirmed for order in client.orders)
    print(f"{len(events)} events, {confirmed} of {len(client.orders)} orders confirmed, {len(steps)} steps of workers")
    return violations(events, client.orders, known, steps)


def judged(cluster: Redundant, folder: Path) -> str:
    """Compare the parameters with those of a training without failures, in a folder of its own."""
    training, (last, *_) = cluster.training, cluster.notes("end")
    if training is PLAIN:
        reference = Reference(folder, {**SETTINGS, **training.settings}, last["data_epoch"])
        return str(check_exact(cluster.folder, reference, workers=training.agents))
    found = differences(cluster.folder, alone(folder, {**training.settings, "steps": last["step"]}))
    worst = max(found.values())
    assert len(found) == training.agents and worst < 1e-10, found
    return f"{last['step']} steps, largest difference of a parameter {worst:.1e}"


def given() -> argparse.Namespace:
    """Return the options, with the training and what may happen beside a strike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sharded", action="store_true", help="train a model in shards, which relayouts change")
    parser.add_argument("--only", nargs="+", choices=STRIKES, default=STRIKES, help="kinds of strikes")
    parser.add_argument("--beside", nargs="+", choices=(*OF_SHARDS.beside, "nothing"), help="what happens meanwhile")
    options = parser.parse_args()
    options.training = OF_SHARDS if options.sharded else PLAIN
    options.beside = ["" if each == "nothing" else each for each in options.beside or options.training.beside]
    if "relayout" in options.beside and not options.sharded:
        parser.error("--beside relayout: expected --sharded")
    if shutil.which("strace") is None and any("disk" in kind for kind in options.only):
        parser.error("strace is missing, which makes disks slow: install it, or name other kinds with --only")
    return options


def main() -> None:
    """Run the command line."""
    options = given()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place, three_members(Path(place) / "etcd") as members:
        (folder := Path(place) / "run").mkdir()
        cluster = Redundant(folder, members, options.training)
        try:
            cluster.start_one(0)
            until("a leader", lambda: cluster.leader() is not None, 60)
            cluster.start_one(1)
            cluster.start()
            client = Client(cluster)
            try:
                for number in range(options.faults):
                    kind = options.only[number] if number < len(options.only) else chance.choice(options.only)
                    strike = Strike(cluster, kind, chance.choice(options.beside), chance)
                    print(f"{number + 1} {kind}, {strike.beside or 'nothing'} beside:", end=" ", flush=True)
                    print(strike.run(), flush=True)
            finally:
                client.close()
            found = checked(cluster, client)
            (folder / "finish").touch()
            cluster.wait_exit()
        except BaseException:
            shutil.copytree(folder, kept := tempfile.mkdtemp(prefix="failover-"), dirs_exist_ok=True)
            print(f"\nlogs and events: {kept}")
            raise
        finally:
            cluster.close()
        for each in found:
            print(f"VIOLATION {each}")
        print(judged(cluster, Path(place) / "reference"))
        print(f"{options.faults} strikes, seed {options.seed}: {len(found)} violations")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
