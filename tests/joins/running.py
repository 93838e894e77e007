"""Runs scripts in worlds of workers that are forked by a prepared process, so that a joiner is there at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from worlds.torchruns import ENVIRONMENT, prepared, stub_of

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import Processes

SECONDS: Final = 100.0
"""Most time of a script, on a busy machine."""


class Alone:
    """Forked processes.

    Args:
        processes: starts their stubs.
        stub: words of a stub's command.
    """

    def __init__(self, processes: Processes, stub: list[str]) -> None:
        self.processes, self._stub = processes, stub

    def start(self, name: str, module: str, *words: str) -> None:
        """Start a process that runs a module's ``main``."""
        self.processes.start(name, [*self._stub, module, *words])

    def has_ended(self) -> bool:
        """Whether all processes have ended."""
        return all(each.poll() is not None for each in self.processes.started.values())

    def codes(self) -> list[int]:
        """Return the processes' exit statuses; -1 of one that has not ended."""
        codes = [each.poll() for each in self.processes.started.values()]
        return [-1 if code is None else code for code in codes]

    def stop(self) -> None:
        """Kill what is left."""
        self.processes.stop(0.0)


class World(Alone):
    """A task's agents, one for each node.

    Args:
        site: where it runs.
        task: its name.
        folder: for the agents' output.
        size: number of nodes, each with a worker.
        least: nodes that the task needs to continue.
        restarts: of an agent's worker.
    """

    def __init__(self, site: Site, task: str, folder: Path, size: int, least: int, restarts: int) -> None:
        super().__init__(Processes(folder, {**site.cluster.processes.environment, **ENVIRONMENT}), site.stub)
        self.task, self.size, self.least = task, size, least
        self._site, self._restarts = site, restarts
        self._script: list[str] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._leaving: set[int] = set()

    def label(self, node: int) -> str:
        """Return a node's label."""
        return f"{self.task}-{node}"

    def start(self, module: str, *words: str) -> None:  # type: ignore[override]
        """Start the agents, whose workers run a module's ``main``."""
        script = ["--monitor-interval", "0.02", "--no-python", *self._stub, module, *words]
        where = ["--rdzv-backend", "unicron", "--rdzv-endpoint", self._site.cluster.endpoint, "--rdzv-id", self.task]
        shape = ["--nnodes", f"{self.least}:{self.size}", "--nproc-per-node", "1"]
        self._script = [*where, *shape, "--max-restarts", str(self._restarts), *script]
        for node in range(self.size):
            self._start(node)

    def _start(self, node: int) -> None:
        conf = f"node={self.label(node)},state_dir={self._site.cluster.state_dir},allow_injection=false"
        self.processes.start(f"agent{node}", [*self._stub, "agent", "--rdzv-conf", conf, *self._script])

    def run(self, module: str, *words: str, act: Callable[[World], None] | None = None) -> list[int]:
        """Start the agents, wait for their end, and stop what is left; return their exit statuses.

        Args:
            module, words: as of `start`.
            act: called again and again meanwhile.
        """
        try:
            self.start(module, *words)
            limit = time.monotonic() + SECONDS
            while not self.has_ended() and time.monotonic() < limit:
                if act is not None:
                    act(self)
                self.keep_up()
                time.sleep(0.02)
            return self.codes()
        finally:
            self.stop()

    def replace(self, node: int, number: int) -> None:
        """Send a signal to a node's agent, and start another one when it has ended."""
        self.processes.started[f"agent{node}"].send_signal(number)
        self._leaving.add(node)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a time, in `keep_up`."""
        self._later.append((time.monotonic() + seconds, action))

    def keep_up(self) -> None:
        """Do what is due: start agents again, and what was put off; to be called often."""
        for node in [each for each in self._leaving if self.processes.started[f"agent{each}"].poll() is not None]:
            self._leaving.discard(node)
            others = [f"agent{other}" for other in range(self.size) if other != node]
            if self._leaving or any(self.processes.started[each].poll() is None for each in others):
                self._start(node)  # else the task has ended
            elif self.processes.started[f"agent{node}"].poll() != 0:
                self._start(node)
        due = [each for each in self._later if each[0] <= time.monotonic()]
        self._later = [each for each in self._later if each not in due]
        for _, action in due:
            action()

    def has_ended(self) -> bool:
        """Whether all agents have ended, and none is to be started."""
        return not self._leaving and super().has_ended()


class Site:
    """Where scripts run.

    Attributes:
        folder: of outputs.
        stub: words of the command of a stub, for a process that is forked.
        cluster: has the coordinator.
    """

    def __init__(self, folder: Path, socket: Path, cluster: LocalCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.stub = stub_of(socket)

    def start_alone(self, folder: Path) -> Alone:
        """Return a group of processes without agents."""
        return Alone(Processes(folder, ENVIRONMENT), self.stub)

    def start_world(self, task: str, folder: Path, size: int, *, least: int, restarts: int) -> World:
        """Return a task's world, whose agents are not yet started."""
        return World(self, task, folder, size, least, restarts)

    def run(self, name: str, module: str = "joins.worker", restarts: int = 3, workers: int = 2, least: int = 2) -> Path:
        """Run a script in a task of its own, with a worker on each of some nodes; return its folder."""
        folder = self.folder / name
        folder.mkdir()
        world = self.start_world(f"joins-{name}", folder / "agents", workers, least=least, restarts=restarts)
        codes = world.run(module, str(folder), name)
        if set(codes) != {0}:
            for path in sorted((folder / "agents").glob("*.log")):
                print(f"==== {path.name}\n{path.read_text()[-6000:]}")
        assert set(codes) == {0}, codes
        return folder

    def log(self, name: str) -> str:
        """Return the output of a script's workers."""
        return "".join(path.read_text() for path in (self.folder / name / "agents").glob("*.log"))


@contextmanager
def site(out: Path, *modules: str) -> Iterator[Site]:
    """Start a coordinator, and the prepared process with modules that workers use."""
    with ExitStack() as stack:
        cluster = LocalCluster(nodes=[], coordinator=[], folder=out / "coordinator", stop_seconds=0.0)
        stack.enter_context(cluster)
        yield Site(out, stack.enter_context(prepared(out, *modules)), cluster)


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of a script's workers."""
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("result-*.pt"))]


def first_step(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the joiner has at its first step, and what the member has there."""
    [path] = folder.glob("joiner-*.pt")
    member = path.with_name(path.name.replace("joiner", "member"))
    return torch.load(path, weights_only=False), torch.load(member, weights_only=False)
