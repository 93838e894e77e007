"""The coordinator's state: plain structs, writable as JSON, without behaviour beyond simple questions about themselves.

One `Task` holds all that is known about a task; tasks share nothing. `Cluster` adds the connections, which are of this
process's life only. Rules live in `slots` (which agents run), `membership` (which workers train together) and
`registration`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.incident import Accounts
from unicron_lightning.coordinator.layouts import Layouts
from unicron_lightning.coordinator.measured import Lifetimes, Measured
from unicron_lightning.coordinator.paired import Paired
from unicron_lightning.coordinator.severity.record import Record
from unicron_lightning.coordinator.watch.record import Watch
from unicron_lightning.jobs import Job
from unicron_lightning.nodewire import Launch, NodeTask


class Worker(msgspec.Struct, kw_only=True):
    """A live worker that said hello. Dead, fenced and finished ones are removed from `Task.workers`."""

    id: str
    agent: str
    local_rank: int
    pid: int
    capacity: int
    founder: bool
    built: bool = False
    """It said `wire.WorkerReady` at least once: its model exists, it can become a member."""
    ready: int = 0
    """Newest epoch for which it reported its state."""
    state: dict[str, Any] = {}
    step: int = 0
    metrics: dict[str, float | None] = {}
    pace: wire.Pace | None = None
    """How fast its steps have been, as it told last."""


class Agent(msgspec.Struct, kw_only=True):
    """One torchrun process. At most `Task.limit` of a task's agents hold a slot."""

    id: str
    task: str
    node: str
    host: str
    pid: int
    secret: str = ""
    """SHA-256 of the secret that it registered with; another one is not this agent."""
    slot: str | None = None
    """Label of the accelerators on its node that its workers use; None: nobody else uses them."""
    conn: int | None
    """Its connection; None while it is away, in a grace period."""
    away_since: float | None = None
    """time.time() at which its connection ended last, or the coordinator began without it."""
    silent: float | None = None
    """Seconds without a word after which its connection was given up; None: it was closed, or there is one."""
    problems: list[str] = []
    """What is wrong with its node, by `detection.health.Problem.check`."""
    unhealthy: str = ""
    """What is wrong with its node such that it gets no slot; "" if nothing is."""
    paired: Paired = msgspec.field(default_factory=Paired)
    """Its exchanges of data with others."""
    cuts: list[float] = []
    """time.time() of its newest broken connections that it came back from in time."""
    round: int = 0
    store: wire.Address | None = None
    waiting: bool = False
    """In next_rendezvous, without a grant for ``round``."""
    holder: bool = False
    """Had a slot when it last began to wait: it goes before those that stand by."""
    arrived: int = 0
    batch: int = 0
    """Slots granted at the same time have the same number."""
    local_world: int | None = None
    ranked: bool = False
    gone: list[str] = []
    """Workers of the present round that are dead, fenced or finished."""
    fresh: bool = False
    """It has just come to a place, and the plan waits for a moment, as its neighbours may come too."""
    stopping: bool = False
    """Its slot was taken back: it was told to stop its workers and to rendezvous again, and has not yet."""
    missing: list[str] = []
    """Live workers that the agent did not name when it registered again; its own word on them may still come."""
    warm: bool = False
    """Its workers of ``round`` were started without a slot, and it has got none since."""
    hellos: dict[str, wire.WorkerHello] = {}
    """Its warm workers that wait to be welcomed: they are not in `Task.workers` yet."""

    @property
    def all_warm(self) -> bool:
        """Whether all its workers are warm and can be welcomed now."""
        return self.warm and not self.gone and len(self.hellos) == self.local_world and self.conn is not None

    @property
    def barred(self) -> str:
        """Why it gets no slot; "" if nothing is known that keeps it from one."""
        return "; ".join(filter(None, (self.unhealthy, self.paired.reason)))

    @property
    def place(self) -> str | None:
        """Names its accelerators in the cluster; None if they are its own."""
        return None if self.slot is None else f"{self.node}/{self.slot}"


class Checkpoint(msgspec.Struct, kw_only=True, frozen=True):
    """The newest complete persistent checkpoint that a worker told of."""

    path: str
    step: int


def has_multiple(step: int, least: int, most: int) -> bool:
    """Whether there is a multiple of ``step`` from ``least`` to ``most``."""
    return most - most % step >= least


class Task(msgspec.Struct, kw_only=True):
    """All about one training job."""

    id: str
    min_nodes: int
    max_nodes: int
    created_at: float
    weight: float = 1.0
    """w(t), what its FLOPs are worth beside those of other tasks."""
    target: int | None = None
    """How many nodes an operator wants it to have; None: as many as there are, up to ``max_nodes``."""
    replica_nodes: int = 0
    """Nodes that a replica of its model takes, or a few replicas together; 0 if workers do not tell of replicas."""
    agents: dict[str, Agent] = {}
    lost: list[str] = []
    """Agents declared lost; what they bring back is fenced."""
    slots: list[str] = []
    """Agents whose slot is granted, in slot order: the place is the group rank."""
    workers: dict[str, Worker] = {}
    finished: list[str] = []
    """Members of this life that ended well."""

    formed: bool = False
    """The first grants were given."""
    elastic: bool = False
    """A worker said hello: the task recovers in process."""
    store_used: bool = False
    """Evidence of a plain script: workers use the rendezvous' store."""
    changed: bool = False
    """Agents changed since the last common grant, before it was known whether the script minds."""
    regrouping: bool = False
    """Plain script: all agents were told to stop, and are granted together when all wait."""
    agents_succeeded: int = 0

    life: int = 1
    number: int = 0
    """Newest epoch number; goes on counting over lives."""
    epoch: wire.Epoch | None = None
    """Newest epoch of this life."""
    go: wire.Go | None = None
    """The `wire.Go` of ``epoch``; the epoch is settled once it exists."""
    established: list[str] = []
    """Members of the newest settled epoch: those that have the task's state."""
    replicas: list[list[str]] = []
    """Workers of each replica as told last, see `wire.Replicas`."""
    replicas_of: int = 0
    """The epoch of which that was told."""
    replicas_at_once: int | None = None
    """How many of them may leave at a time; None: all but one."""
    layouts: Layouts = msgspec.field(default_factory=Layouts)
    join_due: bool = False
    """Candidates waited long enough for their siblings."""
    join_timer: bool = False
    comm_error_epoch: int = 0
    """Epoch for which a collective's failure is under consideration; 0 if none."""
    rebuilding: bool = False
    """The task was running before this coordinator knew of it: its agents are given time to tell."""
    restoring: bool = False
    """The state comes from an earlier coordinator process and some agents have not come back yet."""
    empty_grace: bool = False
    """Nobody is there. Agents that were lost are given time to come back; a job waits for them as long as it takes."""

    severity: Record = msgspec.field(default_factory=Record)
    """What the severity workflow goes by."""
    watch: Watch = msgspec.field(default_factory=Watch)
    incident: str | None = None
    incidents: int = 0
    restarts: int = 0
    records: dict[str, str] = {}
    checkpoint: Checkpoint | None = None
    over: bool | None = None
    """Once the task has ended: whether it succeeded."""
    struck: dict[str, tuple[int, str]] = {}
    """Of faults on purpose, by key: how often they struck, and the claim of the last time."""
    arrivals: int = 0
    batches: int = 0
    measured: Measured = msgspec.field(default_factory=Measured)
    accounts: Accounts = msgspec.field(default_factory=Accounts)

    @property
    def settled(self) -> bool:
        """Whether the newest epoch has got its `wire.Go`."""
        return self.go is not None

    @property
    def finishing(self) -> bool:
        """Whether the task's end has begun: nobody is taken in any more."""
        return bool(self.finished) or self.agents_succeeded > 0

    @property
    def limit(self) -> int:
        """Most agents that are to hold a slot now: whole replicas of them."""
        wanted = self.max_nodes if self.target is None else self.target
        rest = wanted % self.granularity
        return wanted - rest + (self.granularity if wanted - rest < self.min_nodes else 0)

    @property
    def granularity(self) -> int:
        """It has a multiple of so many nodes; 1 if there is none between its least and most."""
        step = self.replica_nodes or 1
        return step if has_multiple(step, self.min_nodes, self.max_nodes) else 1

    def queue(self) -> list[Agent]:
        """Agents that stand by, in the order in which they get a slot: who has warm workers comes first."""
        standing = [agent for agent in self.agents.values() if agent.waiting or (agent.warm and not agent.gone)]
        return sorted(standing, key=lambda agent: (not agent.all_warm, not agent.warm, not agent.holder, agent.arrived))

    def workers_of(self, agent: str) -> list[Worker]:
        """The agent's live workers, by local rank."""
        return sorted((w for w in self.workers.values() if w.agent == agent), key=lambda w: w.local_rank)

    def members(self) -> list[wire.Member]:
        """Members of the newest epoch, dead ones included; empty between lives."""
        return [] if self.epoch is None else self.epoch.members

    def live_members(self) -> list[wire.Member]:
        """Members that neither died nor finished."""
        return [member for member in self.members() if member.worker in self.workers]

    def place(self, worker: Worker) -> tuple[int, int]:
        """Sort key: slot order, then local rank."""
        order = self.slots.index(worker.agent) if worker.agent in self.slots else len(self.slots)
        return order, worker.local_rank

    def capacity(self) -> int:
        """Most workers that the task can use: the least that any live worker says."""
        return min((worker.capacity for worker in self.workers.values()), default=0)


class Pending(msgspec.Struct, kw_only=True):
    """A connection whose agent can't be taken in yet: its messages wait until the task's fate is known."""

    conn: int
    messages: list[wire.FromAgent] = []


class Node(msgspec.Struct, kw_only=True):
    """A node's daemon (``unicron agent``), which runs the agents of submitted tasks."""

    label: str
    host: str
    pid: int
    started_at: float
    conn: int | None
    """Its connection; None while it is away, in a grace period."""
    slots: list[str]
    """Labels of its slots; each is a place that every job can use."""
    launches: list[Launch] = []
    """What it was told to run."""
    tasks: list[NodeTask] = []
    """What it runs, by its own word."""
    untold: bool = False
    """It has not heard of ``launches`` since it connected."""

    @property
    def places(self) -> list[str]:
        """Names of its slots in the cluster."""
        return [f"{self.label}/{slot}" for slot in self.slots]


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a task ended."""

    name: str
    state: Literal["succeeded", "failed", "cancelled"]
    reason: str
    managed: bool
    """Whether it was submitted; else its user started torchrun."""
    submitted_at: float
    ended_at: float


class Lasting(msgspec.Struct, kw_only=True):
    """What is known beside the tasks and outlives the coordinator's process."""

    drained: list[str] = []
    """Nodes, or agents by their ids, that are to have no workers."""
    cordoned: dict[str, str] = {}
    """Nodes that were isolated because of their failures, with the reasons: drained, but by no operator's order."""
    assigned: dict[str, str] = {}
    """The plan in force: the task of each place, "" for nobody."""
    allocation: dict[str, int] = {}
    """The plan in force: places of each task when it was made."""
    planned: str = ""
    """Names the situation that the plan in force was made for."""
    lifetimes: Lifetimes = msgspec.field(default_factory=Lifetimes)
    """Of tasks that are over."""
    jobs: dict[str, Job] = {}
    """Tasks that were submitted and are not over, by name; each has an entry in `Cluster.tasks`."""
    results: list[JobResult] = []
    """How the newest of the tasks that are over ended."""
    nodes: dict[str, Node] = {}
    """Nodes with a daemon, by label."""


class Cluster(msgspec.Struct, kw_only=True):
    """Everything. Only ``tasks`` and ``lasting`` outlive the process."""

    tasks: dict[str, Task] = {}
    conns: dict[int, tuple[str, str]] = {}
    """Registered connections: task and agent of each."""
    pending: dict[str, list[Pending]] = {}
    """By task."""
    lasting: Lasting = msgspec.field(default_factory=Lasting)
    idle: bool = False
    gathering: bool = False
    """Agents have come, and a timer is running after which they count."""
    asked: str | None = None
    """Names the situation for which a plan is awaited."""

    def pending_of(self, conn: int) -> Pending | None:
        """What waits of a connection."""
        found = (item for items in self.pending.values() for item in items if item.conn == conn)
        return next(found, None)

    @property
    def nodes(self) -> dict[str, Node]:
        """Nodes whose daemon is there, or may come back, by label."""
        return self.lasting.nodes


_ROUND_DIGITS = 15
_task_decoder = msgspec.json.Decoder(Task)
_cluster_decoder = msgspec.json.Decoder(Cluster)
encode = msgspec.json.Encoder().encode
decode_task = _task_decoder.decode
decode_lasting = msgspec.json.Decoder(Lasting).decode
decode_cluster = _cluster_decoder.decode


def round_of(worker: str) -> int:
    """The rendezvous round in a worker's id; -1 if the id is malformed."""
    _, _, digits = worker.rpartition("#")
    return int(digits) if digits.isdecimal() and len(digits) <= _ROUND_DIGITS else -1
