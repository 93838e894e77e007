"""The coordinator's state: plain structs, serializable as JSON, with no behaviour beyond simple queries.

One `Task` holds everything about a task; tasks share nothing. `Cluster` adds the connections, which exist only while
this process runs. Rules live in the packages beside this module, e.g. `membership.slots` (which agents run) and
`membership.epochs` (which workers train together).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.incidents.facts import Accounts, Lifetimes, Measured
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.severity.record import SeverityRecord
from unicron_lightning.jobs import Job
from unicron_lightning.wire.daemon import Launch, NodeTask

PauseReason = Literal["plan", "cancel", "departure"]
"""Why a task's members write a checkpoint before they are stopped."""


class LayoutRecord(msgspec.Struct, kw_only=True):
    """Layouts of one task; empty for tasks whose workers hold the whole model."""

    spread: wire.Spread | None = None
    """Spread reported last by workers of this life."""
    transformer: dict[str, bool | int | str] = {}
    """Shape of the model as reported last, also in earlier lives: `wire.Spread.transformer`."""
    in_force: wire.Layout | None = None
    """Layout set by an operator's order; None: the script's own layout."""
    ordered: wire.Layout | None = None
    """Layout of an order for which the workers have not written the checkpoint yet."""
    untried: bool = False
    """Whether the present life is the first in this layout and has finished no step yet."""
    before: wire.Layout | None = None
    """Layout in force before an untried one."""
    failed: list[wire.Layout] = []
    """Layouts that were given up before a step was finished in them: the plan does not order them again."""


class CalibrationOrder(msgspec.Struct, kw_only=True):
    """Measurement of a task's speed at chosen sizes, by an operator's order."""

    sizes: list[int]
    """Numbers of nodes, in the order of their measurement; once it has ended, those that it came to."""
    steps: int
    """Steps that each size has to make."""
    seconds: float
    """Time limit of a size."""
    before: int | None
    """`Task.target` before, which is in force again at the end."""
    begun: float
    """time.time() of the order."""
    since: float
    """time.time() at which the present size was ordered."""
    place: int = 0
    """Index of the present size."""
    epoch: int = 0
    """Epoch in which steps of the present size count; 0 before it has any."""
    first: int = 0
    """Step after which steps count."""
    skipped: dict[int, str] = {}
    """Sizes that were not measured, with the reasons."""
    ended: str = ""
    """Why it has ended before all sizes were measured or skipped; "" if it has not."""

    @property
    def size(self) -> int | None:
        """Size that is measured now; None if the calibration has ended."""
        return self.sizes[self.place] if self.place < len(self.sizes) else None


class MemoryRecord(msgspec.Struct, kw_only=True):
    """States of one task in its agents' memory; the copies themselves are in `Agent.copies`."""

    complete: wire.StateVersion | None = None
    """Newest version of which all copies were held."""
    doubted: int = 0
    """Newest epoch in which workers were found to differ: versions up to it are not offered."""
    offered: tuple[wire.StateOffer, ...] = ()
    """Versions offered to the founders of life `offered_in`, newest first."""
    offered_in: int = 0
    wait: Literal["none", "begun", "over"] = "none"
    """Whether founders wait for others whose nodes hold parts of a version, or for their digests."""


class NodeExclusion(msgspec.Struct, kw_only=True):
    """One node of a task that is excluded because others do not reach it, or was recently."""

    reason: str = ""
    """Reason of the exclusion; "" if the node is not excluded."""
    times: list[float] = []
    """time.time() of each recent exclusion."""
    reached_since: float = 0.0
    """Time since which the node and the others have reached each other; 0 if they do not."""


class ProbeState(msgspec.Struct, kw_only=True):
    """Probes between nodes of one task: the probe in progress, and excluded nodes."""

    number: int = 0
    """Number of the newest probe."""
    asked: list[str] = []
    """Agents whose answer is pending; empty if no probe is in progress."""
    missed: dict[str, list[str]] = {}
    """Agents not reached, by agent that has answered."""
    rests_until: float = 0.0
    """Time until which no suspicion leads to another probe."""
    weak_rests_until: float = 0.0
    """Time until which no weak suspicion (a wait, perhaps for a slow rank) leads to another probe."""
    clean: int = 0
    """Number of probes since the last one that found a cut."""
    entering: int = 0
    """Epoch whose members are watched while they connect."""
    looks: int = 0
    """Number of checks of that epoch's members."""
    nodes: dict[str, NodeExclusion] = {}
    """By label."""


class WatchRecord(msgspec.Struct, kw_only=True):
    """Hang and slowness detection of one task. All times are time.time() of the coordinator."""

    epoch: int = 0
    """The task's newest epoch when the reports were made; reports of other epochs do not count."""
    since: float = 0.0
    """Time at which the first member was overdue; 0: none is."""
    pause: float = 0.0
    """Seconds until the members are asked again."""
    reports: dict[str, wire.ActivityReport] = {}
    """Reported activity of each member."""
    inspected: dict[str, wire.Inspect] = {}
    """Orders to agents to record stacks, by worker."""

    slow_since: float = 0.0
    """Time since which steps have been slower than usual; 0: they are not."""
    degraded: bool = False
    """Whether steps have been slow long enough for the task to be degraded."""
    behind: dict[str, float] = {}
    """Time since which a member's micro-batches have taken longer than its peers', by member."""
    stragglers: dict[str, float] = {}
    """Factor by which each straggler is slower: members that have been behind for long enough."""


class Worker(msgspec.Struct, kw_only=True):
    """A live worker that has sent its hello. Dead, fenced and finished workers are removed from `Task.workers`."""

    id: str
    agent: str
    local_rank: int
    pid: int
    capacity: int
    founder: bool
    port: int = 0
    """On its agent's host, for links of other workers."""
    built: bool = False
    """Whether the worker has sent `wire.WorkerReady`: its model exists, so it can become a member."""
    idle: bool = False
    """Whether its script has ended without a ``fit``, in a task that had members: it waits for the task's end."""
    ready: int = 0
    """Newest epoch for which the worker reported its state."""
    member: bool = False
    entered: int = 0
    """Newest epoch that the worker has entered, as far as it reports that."""
    state: dict[str, Any] = {}
    step: int = 0
    fit: int = 0
    """Number of its script's ``fit`` call, as far as it reports that."""
    metrics: dict[str, float | None] = {}
    pace: wire.Pace | None = None
    """Step times of the worker as reported last."""


class Agent(msgspec.Struct, kw_only=True):
    """One torchrun process. At most `Task.limit` of a task's agents hold a slot."""

    id: str
    task: str
    node: str
    host: str
    pid: int
    secret: str = ""
    """SHA-256 of the secret that the agent registered with; a process with another secret is not this agent."""
    slot: str | None = None
    """Label of the accelerators on its node that its workers use; None: no other task uses them."""
    rack: str = ""
    """Label of what its node shares with others and can be lost with."""
    conn: int | None
    """Connection number; None while the agent is away, in a grace period."""
    away_since: float | None = None
    """time.time() at which its connection last ended, or the coordinator started without it."""
    silent: float | None = None
    """Seconds of silence after which its connection was closed; None: it ended otherwise, or the agent is connected."""
    problems: list[str] = []
    """Problems of its node, by `detection.health.Problem.check`."""
    unhealthy: str = ""
    """Problem of its node that bars it from a slot; "" if there is none."""
    held: bool = False
    """Whether its next grant is delayed, since its workers failed at their start."""
    departing: bool = False
    """Whether its process was asked to end, so that its workers leave at the next step boundary."""
    parted: str = ""
    """Nodes that its node does not reach, which bars it from a slot; "" if it reaches all."""
    cuts: list[float] = []
    """time.time() of its newest connection failures that ended within the grace period."""
    round: int = 0
    store: wire.Address | None = None
    waiting: bool = False
    """Whether the agent is in next_rendezvous, without a grant for ``round``."""
    holder: bool = False
    """Whether it had a slot when it last began to wait: it then precedes stand-by agents."""
    arrived: int = 0
    batch: int = 0
    """Number of the joint grant: slots granted at the same time share it."""
    local_world: int | None = None
    ranked: bool = False
    gone: list[str] = []
    """Workers of the present round that are dead, fenced or finished."""
    went: int = 0
    """Newest epoch whose `wire.Go` it had received when it registered; 0 if unknown."""
    told: int = 0
    """Newest epoch that it has: as sent over its present connection, or as it registered."""
    fresh: bool = False
    """Whether it has just registered, so that the plan waits briefly for other agents of its node."""
    stopping: bool = False
    """Whether its slot was taken back and it has not yet stopped its workers and rejoined the rendezvous as ordered."""
    missing: list[str] = []
    """Live workers that the agent did not list when it registered again; its report on them may still arrive."""
    warm: bool = False
    """Whether its workers of ``round`` were started without a slot, and none has been granted since."""
    copies: tuple[wire.StateCopy, ...] = ()
    """Copies of the task's state in its memory."""
    hellos: dict[str, wire.WorkerHello] = {}
    """Hellos of its warm workers that wait to be welcomed: these are not in `Task.workers` yet."""

    @property
    def all_warm(self) -> bool:
        """Whether all its workers are warm and can be welcomed now."""
        return self.warm and not self.gone and len(self.hellos) == self.local_world and self.conn is not None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the copies in its memory."""
        return sum(copy.size for copy in self.copies)

    @property
    def barred(self) -> str:
        """Reason why the agent gets no slot; "" if none is known."""
        return "; ".join(filter(None, (self.unhealthy, self.parted)))

    @property
    def place(self) -> str | None:
        """Name of its accelerators in the cluster; None if no other task uses them."""
        return None if self.slot is None else f"{self.node}/{self.slot}"


def has_multiple(step: int, least: int, most: int) -> bool:
    """Whether a multiple of ``step`` lies between ``least`` and ``most``, inclusive."""
    return most - most % step >= least


class Task(msgspec.Struct, kw_only=True):
    """State of one training job."""

    id: str
    min_nodes: int
    max_nodes: int
    created_at: float
    started_at: float | None = None
    """time.time() of a job's first slots, from which its time limit counts."""
    weight: float = 1.0
    """w(t), the weight of the task's FLOPs relative to other tasks."""
    target: int | None = None
    """Number of nodes ordered by an operator; None: all available ones, up to ``max_nodes``."""
    calibration: CalibrationOrder | None = None
    """The newest calibration, which may have ended."""
    replica_nodes: int = 0
    """Nodes occupied by one replica of the model, or by several replicas together; 0 if workers report no replicas."""
    agents: dict[str, Agent] = {}
    lost: list[str] = []
    """Agents declared lost; workers that they bring back are fenced."""
    slots: list[str] = []
    """Agents whose slot is granted, in slot order: the index is the group rank."""
    workers: dict[str, Worker] = {}
    finished: list[str] = []
    """Members of this life that have finished successfully."""
    broken: dict[str, str] = {}
    """Members whose programs have failed by themselves, with the cause, until an epoch without them is settled."""

    lifecycle: Lifecycle
    """Replaced only by the transitions in `lifecycle`; read through the properties below."""
    agents_succeeded: int = 0
    pause_reason: PauseReason = "plan"
    """Of the newest pause: the plan gives the task no place, an operator cancels it, or all members' agents depart."""

    life: int = 1
    number: int = 0
    """Newest epoch number; keeps rising over lives."""
    epoch: wire.Epoch | None = None
    """Newest epoch of this life."""
    go: wire.Go | None = None
    """The `wire.Go` of ``epoch``; the epoch is settled once it exists."""
    earlier: wire.Go | None = None
    """`wire.Go` of the epoch in which members train until a planned ``epoch`` is settled; None otherwise."""
    established: list[str] = []
    """Members of the newest settled epoch: those that have the task's state."""
    ending: list[str] = []
    """Members that have reported an error that ends them, until a life begins: they may still report a checkpoint."""
    replicas: list[list[str]] = []
    """Workers of each replica as reported last, see `wire.Replicas`."""
    replicas_of: int = 0
    """Epoch that `replicas` describes."""
    replicas_at_once: int | None = None
    """Number of replicas that may leave at the same time; None: all but one."""
    layouts: LayoutRecord = msgspec.field(default_factory=LayoutRecord)
    comm_error_epoch: int = 0
    """Epoch for which a failed collective is being diagnosed; 0 if none."""

    severity: SeverityRecord = msgspec.field(default_factory=SeverityRecord)
    """Records of the severity workflow."""
    watch: WatchRecord = msgspec.field(default_factory=WatchRecord)
    probing: ProbeState = msgspec.field(default_factory=ProbeState)
    """Probes between nodes, and nodes that were left out."""
    held: tuple[float, int] | None = None
    """time.time() at which the task began to hold, and `committed` then, see `membership.epochs`."""
    committed: int = 0
    """Step of the newest commit of this life that any worker has reported; its death does not lower the number."""
    incident: str | None = None
    incidents: int = 0
    restarts: int = 0
    records: dict[str, str] = {}
    lasting: dict[str, str] = {}
    """The records that are kept for later lives."""
    recorded: dict[str, int] = {}
    records_after: int = 0
    """Newest epoch of the lives before; ``recorded`` has the epoch of each record."""
    checkpoints: list[wire.Checkpoint] = []
    """Reported checkpoints, newest first."""
    memory: MemoryRecord = msgspec.field(default_factory=MemoryRecord)
    struck: dict[str, tuple[int, str]] = {}
    """Strikes of each injected fault, by key: their number, and the claim of the last one."""
    arrivals: int = 0
    batches: int = 0
    measured: Measured = msgspec.field(default_factory=Measured)
    accounts: Accounts = msgspec.field(default_factory=Accounts)

    @property
    def elastic(self) -> bool:
        """Whether a worker has sent its hello: the task recovers in process."""
        return self.lifecycle.script == "elastic"

    @property
    def plain(self) -> bool:
        """Whether the script is known to be a plain one."""
        return self.lifecycle.script == "plain"

    @property
    def formed(self) -> bool:
        """Whether the first slots were granted."""
        return self.lifecycle.slots != "none"

    @property
    def regrouping(self) -> bool:
        """Whether all agents of a plain script are stopping."""
        return self.lifecycle.slots == "regrouping"

    @property
    def restoring(self) -> bool:
        """Whether some agents have not reconnected yet to this coordinator process."""
        return self.lifecycle.agents == "restoring"

    @property
    def absent(self) -> bool:
        """Whether the task has no agent and waits for some."""
        return self.lifecycle.agents == "absent"

    @property
    def rebuilding(self) -> bool:
        """Whether agents are given time to register a task that this coordinator did not know."""
        return self.lifecycle.rebuilding

    @property
    def pausing(self) -> bool:
        """Whether its members write a checkpoint, after which the task pauses."""
        return self.lifecycle.pausing

    @property
    def over(self) -> bool | None:
        """Whether the task succeeded; None until it has ended."""
        return self.lifecycle.over

    @property
    def checkpoint(self) -> wire.Checkpoint | None:
        """The newest checkpoint."""
        return self.checkpoints[0] if self.checkpoints else None

    @property
    def settled(self) -> bool:
        """Whether the newest epoch has received its `wire.Go`."""
        return self.go is not None

    @property
    def finishing(self) -> bool:
        """Whether the task's end has begun: no agent or worker is admitted any more."""
        return bool(self.finished) or self.agents_succeeded > 0

    @property
    def failed_end(self) -> str:
        """Why the task has failed although members have finished; "" if it has not.

        The program of a member that failed by itself after the training, e.g. as it wrote a result, is not run again:
        the others are gone. A member that was killed, or lost with its node, had trained to the end as well.
        """
        failed = [f"{worker}: {cause}" for worker, cause in self.broken.items() if worker in self.established]
        said = "a worker's program has failed after those of others had finished, or shortly before"
        return f"{said}: {'; '.join(failed)}" if failed else ""

    @property
    def limit(self) -> int:
        """Largest number of agents that may hold a slot now, in whole replicas."""
        wanted = self.max_nodes if self.target is None else self.target
        rest = wanted % self.granularity
        return wanted - rest + (self.granularity if wanted - rest < self.min_nodes else 0)

    @property
    def granularity(self) -> int:
        """Number of nodes that the task's size must be a multiple of; 1 if no multiple is within its bounds."""
        step = self.replica_nodes or 1
        return step if has_multiple(step, self.min_nodes, self.max_nodes) else 1

    def queue(self) -> list[Agent]:
        """Stand-by agents in the order in which they get a slot: those with warm workers first."""
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

    @property
    def foremost(self) -> Worker | None:
        """The live worker with the newest reported step, and its metrics."""
        return max(self.workers.values(), key=lambda worker: worker.step, default=None)

    def rank_of(self, worker: str | None) -> int | None:
        """Return the global rank of a worker in the newest epoch; None if it is no member."""
        return next((rank for rank, member in enumerate(self.members()) if member.worker == worker), None)

    def as_member(self, worker: Worker) -> wire.Member:
        """Return the worker as a member of an epoch."""
        of = self.agents[worker.agent]
        return wire.Member(
            worker=worker.id,
            agent=of.id,
            node=of.node,
            host=of.host,
            local_rank=worker.local_rank,
            rack=of.rack,
            port=worker.port,
        )

    def awaits_entries(self) -> bool:
        """Whether a live member has not reported that it has entered the newest epoch."""
        there = (self.workers.get(member.worker) for member in reversed(self.members()))  # the last ones report last
        return any(worker is not None and worker.entered != self.number for worker in there)

    def place(self, worker: Worker) -> tuple[int, int]:
        """Sort key: slot order, then local rank."""
        order = self.slots.index(worker.agent) if worker.agent in self.slots else len(self.slots)
        return order, worker.local_rank

    def capacity(self) -> int:
        """Largest number of workers that the task can use: the smallest capacity of its live workers."""
        return min((worker.capacity for worker in self.workers.values()), default=0)


class Pending(msgspec.Struct, kw_only=True):
    """A connection whose agent can't be admitted yet: its messages wait until the task's fate is known."""

    conn: int
    messages: list[wire.FromAgent] = []


class Node(msgspec.Struct, kw_only=True):
    """A node's daemon (``unicron agent``), which runs the agents of submitted tasks."""

    label: str
    host: str
    pid: int
    started_at: float
    conn: int | None
    """Connection number; None while the daemon is away, in a grace period."""
    slots: list[str]
    """Labels of its slots; each is a place that every job of its kind can use."""
    kind: str = ""
    """Of its accelerators; "": it has none."""
    launches: list[Launch] = []
    """Agents that it is ordered to run."""
    tasks: list[NodeTask] = []
    """Agents that it runs, as it reports."""
    unsent: bool = False
    """Whether ``launches`` has not been sent to it since it connected."""

    @property
    def places(self) -> list[str]:
        """Names of its slots in the cluster."""
        return [f"{self.label}/{slot}" for slot in self.slots]


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a task."""

    name: str
    state: Literal["succeeded", "failed", "cancelled"]
    reason: str
    managed: bool
    """Whether the task was submitted; otherwise its user started torchrun."""
    submitted_at: float
    ended_at: float


class Lasting(msgspec.Struct, kw_only=True):
    """State beside the tasks that outlives the coordinator's process."""

    drained: list[str] = []
    """Drained nodes, and drained agents by their ids: they get no workers."""
    cordoned: dict[str, str] = {}
    """Nodes drained by the coordinator itself because of their failures, with the reasons."""
    assigned: dict[str, str] = {}
    """The plan in force: the task of each place, "" for none."""
    allocation: dict[str, int] = {}
    """The plan in force: places of each task when the plan was made."""
    layouts: dict[str, wire.Layout] = {}
    """The plan in force: layout of each task whose job leaves it to the plan."""
    planned: str = ""
    """Key of the situation that the plan in force was made for."""
    lifetimes: Lifetimes = msgspec.field(default_factory=Lifetimes)
    """Lifetimes measured in tasks that are over."""
    jobs: dict[str, Job] = {}
    """Submitted tasks that are not over, by name; each has an entry in `Cluster.tasks`."""
    held: dict[str, list[str]] = {}
    """Jobs that wait for the success of other tasks, with the names of these."""
    results: list[JobResult] = []
    """Results of the newest tasks that are over."""
    nodes: dict[str, Node] = {}
    """Nodes with a daemon, by label."""
    lost: dict[str, float] = {}
    """time.time() of the last loss of a daemon or an agent, for the newest nodes that had one. A node that is back is
    not down, see `server.reasons`; one that leaves in order is forgotten."""

    @property
    def out(self) -> frozenset[str]:
        """Nodes, and agents by their ids, that get no workers: drained or cordoned."""
        return frozenset((*self.drained, *self.cordoned))

    def excludes(self, agent: Agent) -> bool:
        """Whether the agent, or its node, gets no workers whatever the plan: drained, or cordoned."""
        return agent.node in self.drained or agent.id in self.drained or agent.node in self.cordoned

    def record_lost(self, node: str, now: float) -> None:
        """Record the loss of a node's daemon or agent."""
        known = {label: at for label, at in self.lost.items() if label != node}
        self.lost = dict([*known.items(), (node, now)][-_LOST_KEPT:])


class Cluster(msgspec.Struct, kw_only=True):
    """The whole state. Only ``tasks`` and ``lasting`` outlive the process."""

    tasks: dict[str, Task] = {}
    conns: dict[int, tuple[str, str]] = {}
    """Task and agent of each registered connection."""
    pending: dict[str, list[Pending]] = {}
    """Pending connections by task."""
    lasting: Lasting = msgspec.field(default_factory=Lasting)
    idle: bool = False
    gathering: bool = False
    """Whether agents have registered that count only when a running timer expires."""
    asked: str | None = None
    """Key of the situation for which a plan is awaited."""

    def pending_of(self, conn: int) -> Pending | None:
        """Return the pending messages of a connection."""
        found = (item for items in self.pending.values() for item in items if item.conn == conn)
        return next(found, None)

    @property
    def nodes(self) -> dict[str, Node]:
        """Nodes whose daemon is connected or may reconnect, by label."""
        return self.lasting.nodes


_ROUND_DIGITS = 15
_LOST_KEPT = 32
encode = msgspec.json.Encoder().encode
decode_task = msgspec.json.Decoder(Task).decode
decode_lasting = msgspec.json.Decoder(Lasting).decode
decode_cluster = msgspec.json.Decoder(Cluster).decode


def round_of(worker: str) -> int:
    """Return the rendezvous round in a worker's id; -1 if the id is malformed."""
    _, _, digits = worker.rpartition("#")
    return int(digits) if digits.isdecimal() and len(digits) <= _ROUND_DIGITS else -1
