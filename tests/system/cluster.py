"""A task of real torchrun agents that train `train`: observe it, inject faults, and judge the result."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import sqlite3
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from system.network import Network
from worlds.torchruns import ForkingProcesses

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import kill, lives, until

Note = dict[str, Any]
SCRIPT = Path(__file__).parent / "train.py"
SETTINGS = {
    "devices": 1,
    "nodes": 3,
    "accumulation": 2,
    "rounds": {},  # the same by data epoch, with an accumulation of 1
    "full": 3,  # workers of the complete world
    "pace": 0.008,  # seconds of a micro-batch in the complete world
    "slow": 0.09,  # seconds of a micro-batch in a smaller world
    "epochs": -1,
    "keep": 1,  # number of best checkpoints; -1: all
    "dtype": "float64",
    "rebalance": False,
    "lag": {},  # additional seconds of a node's micro-batches, by node
    "accelerator": "cpu",
    "precision": None,
    "fused": False,  # AdamW, fused
    "compile": False,  # compile the module's net; or the mode of torch.compile
    "beside": False,  # checkpoints by UnicronCheckpoint, instead of ModelCheckpoint
    "resume": None,  # ckpt_path
    "memory": None,  # [every_n_steps, partners] of MemoryCheckpoint
    "fill": 0.0,  # part of the accelerator's memory that each worker holds
    "assert_at": None,  # [rank, step] of a single device-side assertion
}


class Notes:
    """The notes of all workers of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._lines: dict[str, list[Note]] = defaultdict(list)

    def __call__(self, what: str, **fields: Any) -> list[Note]:
        """The notes of a kind, oldest first within a process."""
        self._update()
        return [line for line in self._lines[what] if fields.items() <= line.items()]

    def count(self, what: str) -> int:
        """Number of notes of a kind."""
        self._update()
        return len(self._lines[what])

    def newest(self, what: str, number: int) -> list[Note]:
        """The most recently read notes of a kind."""
        self._update()
        return self._lines[what][-number:]

    def all(self) -> list[Note]:
        """All notes."""
        self._update()
        return [line for lines in self._lines.values() for line in lines]

    def _update(self) -> None:
        for path in sorted(self._folder.glob("notes-*.jsonl")):
            start = self._read.get(path, 0)
            if path.stat().st_size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = start + whole
            for line in map(json.loads, data[:whole].splitlines()):
                self._lines[line["what"]].append(line)


class Cluster(LocalCluster):
    """One task's agents on this machine, in a folder of their own.

    Args:
        folder: for all output.
        agents: number of agents to start at once, called n0, n1, ...
        nodes: of ``--nnodes``.
        per_node: of ``--nproc-per-node``.
        schedule: groups of faults, as sentences of the language, that the workers inject themselves; see `train`.
        conf: further ``--rdzv-conf``.
        settings: values that differ from `SETTINGS`.
        script: the workers' script, which gets the folder as its argument.
        variables: further environment of a node's agent.
        network: in which the nodes are.
        racks: label of a node's rack.
        leaves: pattern of socket files that processes may leave, because they are killed.
        others: of `LocalCluster`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        agents: int = 3,
        nodes: str = "1:3",
        per_node: int = 1,
        schedule: list[dict[str, Any]] | None = None,
        conf: str = "",
        settings: Mapping[str, Any] | None = None,
        script: Path = SCRIPT,
        variables: Callable[[str], Mapping[str, str]] = lambda node: {},
        network: Network | None = None,
        racks: Mapping[str, str] | None = None,
        leaves: str | None = None,
        beside: Cluster | None = None,
        **others: Any,
    ) -> None:
        state = folder / "state" if beside is None else beside.state_dir
        super().__init__(
            [script, folder],
            nodes=[f"n{place}" for place in range(agents)],
            workers_per_node=per_node,
            nnodes=nodes,
            conf={"allow_injection": "false", **dict(pair.split("=", 1) for pair in conf.split(",") if pair)},
            environment={"OMP_NUM_THREADS": "1", "COORDINATOR_FILE": str(state / "coordinator.json")},
            folder=folder,
            beside=beside,
            stop_seconds=0.0,
            **others,
        )
        self.processes = ForkingProcesses(self.processes.folder, self.processes.environment)
        self.settings = {**SETTINGS, **(settings or {})}
        self.notes = Notes(folder)
        self.network = network
        self._racks = racks or {}
        self._leaves = leaves
        self._variables = variables
        self.replaced: list[int] = []
        (folder / "settings.json").write_text(json.dumps(self.settings))
        (folder / "schedule.json").write_text(json.dumps(schedule or []))
        self.schedule = schedule or []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.print_logs()
        super().__exit__(kind, error, trace)

    # ---- actions

    def start_node(self, node: str, *options: str, port: int | None = None, **environment: str) -> float:
        return super().start_node(node, *options, port=port, **{**environment, **self._variables(node)})

    def replace(self, node: str) -> None:
        """Reap a killed agent and start another for its node."""
        agent = self.agents[node]
        assert agent.wait(60) == -signal.SIGKILL
        self.replaced.append(agent.pid)
        self.start_node(node)

    def order(self, *words: str) -> None:
        """Run the command ``unicron`` as an operator would."""
        done = self.unicron(*words)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"

    def finish(self, seconds: float = 300.0, *, whole: bool = True) -> None:
        """Let the run end after an epoch without further events; every agent must succeed.

        Args:
            seconds: time limit.
            whole: whether to wait for the complete world.
        """
        (self.folder / ("finish" if whole else "finish_in_any_world")).touch()
        self.wait_end(seconds)

    def wait_end(self, seconds: float = 300.0, *, linger: bool = False) -> None:
        """Wait for the end of the agents and of all other processes.

        Args:
            seconds: for the agents.
            linger: let the coordinator exit by itself, as it does some seconds later, instead of stopping it.
        """
        self.watch(self._ended, "the agents' end", seconds, stalled=120)  # after the last step the agents only exit
        codes = {node: agent.returncode for node, agent in self.agents.items()}
        assert set(codes.values()) == {0}, f"exit statuses {codes}"
        if self._beside is not None:
            return
        if not linger and (pid := self.coordinator()) is not None:
            kill(pid, signal.SIGTERM)
        until("the coordinator's end", lambda: self.coordinator() is None)
        until(f"the end of orphans: {self.processes.alive()}", lambda: not self.processes.alive())
        self.check_left_nothing()

    def _ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents.values())

    def watch(self, condition: Callable[[], Any], what: str, seconds: float, stalled: float = 60.0) -> Any:
        """Wait for a condition; fail if no step is finished anywhere for ``stalled`` seconds before it holds."""
        deadline = time.monotonic() + seconds
        steps, since = 0, time.monotonic()
        while not (found := condition()):
            now, number = time.monotonic(), self.notes.count("step")
            if number > steps or number == 0:  # the start includes imports, which are slow on a busy machine
                steps, since = number, now
            assert now < deadline, f"not within {seconds} s: {what}"
            assert now < since + stalled, f"no step finished for {stalled} s, waiting for {what}"
            time.sleep(0.05)
        return found

    # ---- commands in the network

    def _endpoint_of(self, port: int | None) -> str:
        return super()._endpoint_of(port) if self.network is None else f"{self.network.host}:{self.port}"

    def _torchrun_command(self, node: str, port: int | None, options: Sequence[str]) -> list[str]:
        command = super()._torchrun_command(node, port, options)
        if node in self._racks:
            command[command.index("--rdzv-conf") + 1] += f",rack={self._racks[node]}"
        return command if self.network is None else [*self.network.prefix(node), *command]

    def _coordinator_command(self) -> list[str]:
        command = super()._coordinator_command()
        return command if self.network is None else [*self.network.at_switch(), *command]

    # ---- observations

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The task's events, each with its fields beside the rest."""
        found = super().events(name)
        return [{**event, **event["fields"]} for event in found]

    def world(self) -> list[Note]:
        """The newest finished step of each worker of the newest world."""
        steps = self.newest_steps()
        if not steps:
            return []
        epoch = max(line["epoch"] for line in steps)
        newest = {line["pid"]: line for line in steps if line["epoch"] == epoch}
        return list(newest.values())

    def newest_steps(self) -> list[Note]:
        """The last finished steps of all workers, as many as needed to determine the present world."""
        return self.notes.newest("step", 1000)

    def wait_world(self, size: int, after: float = 0.0, seconds: float = 150.0) -> list[Note]:
        """Wait for a finished step of a world of this size, later than ``after``."""

        def there() -> list[Note] | None:
            world = self.world()
            settled = len(world) == size and all(line["world"] == size and line["at"] > after for line in world)
            return world if settled and all(lives(line["pid"]) for line in world) else None

        return list(self.watch(there, f"a world of {size}", seconds))

    def check_left_nothing(self) -> None:
        """Check that no port and no socket file are left."""
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, "the coordinator's port is still open"
        sockets = [path for path in self.temporary.rglob("*") if _is_socket(path)]
        sockets = [path for path in sockets if self._leaves is None or not path.match(self._leaves)]
        assert not sockets, f"left behind: {sockets}"

    def print_logs(self) -> None:
        """Print the logs that explain a failed test."""
        for log in sorted(self.folder.glob("agent-*.log")) + sorted(self.state_dir.glob("*.log")):
            print(f"==== {log.name}\n{log.read_text()[-5000:]}")
        with contextlib.suppress(sqlite3.Error):
            print("==== events")
            for event in self.events()[-60:]:
                print(json.dumps(event))
        for line in self.notes("fault"):
            print(json.dumps(line))
        for line in self.world():
            print(json.dumps(line))


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False
