"""Messages and values by subject: replicas and layouts, health, injected faults, probes, states in memory, checkpoints.

**Faults** (docs/faults.md) are texts of `faults.fault`, parsed by the process that injects them.

**Probes.** The coordinator has agents probe each other (`Probe`) when workers wait for each other and none hangs, and
while nodes are left out that others did not reach. Each agent reports the peers that it did not reach (`Probed`).

**States in memory** are staged by workers, kept by their agents, and offered to the workers of a new life. A *version*
is the state of a task at a step boundary, divided into parts; a *copy* is one part in one agent's memory.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from unicron_lightning.wire.fields import Count, Id, Index, Key, Message, Path, Pid, Size, Wall, Word


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a replica of the model over workers."""

    tensor: Size
    """Tensor-parallel size (TP), or the number of shards (S)."""
    pipeline: Size
    """Pipeline stages (PP); 1 for shards."""
    expert: Size = 1
    """Expert-parallel size (EP); 1 for shards."""
    sharded: bool = False
    """Whether each parameter is divided into shards (FSDP2)."""
    slices: Size = 1
    """Tensor-parallel size (T) within each shard; 1 for TP x PP."""
    context: Size = 1
    """Context-parallel size (CP); 1 for shards."""

    @property
    def columns(self) -> int:
        """Number of workers of a stage that have the same slice of its layers. As in Megatron, experts are divided
        among successive ones, whether these have parts of one sequence or sequences of their own.
        """
        return max(self.context, self.expert)

    @property
    def workers(self) -> int:
        """Number of workers of a replica."""
        return self.tensor * self.columns * self.pipeline * self.slices

    @property
    def lanes(self) -> int:
        """Number of micro-batches that a replica of TP x PP computes together."""
        return self.columns // self.context

    def plain(self) -> dict[str, int]:
        """The layout for events and answers."""
        if self.sharded:
            return {"shards": self.tensor, **({"tp": self.slices} if self.slices > 1 else {})}
        further = {"cp": self.context, "ep": self.expert}
        return {"tp": self.tensor, "pp": self.pipeline, **{name: size for name, size in further.items() if size > 1}}

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.plain().items())


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The model's present layout, and the constraints on others."""

    layout: Layout
    ordered: bool
    """Whether the coordinator ordered the layout; otherwise it is the script's."""
    workers: Size
    """Workers of the declared world."""
    micro_batches: Size
    """M of a global batch."""
    tensor_divides: dict[Key, Count]
    """Sizes of the model, by name, that TP must divide."""
    pipeline_divides: dict[Key, Count]
    """Sizes of the model, by name, that PP must divide."""
    expert_divides: dict[Key, Count] = {}
    """Sizes of the model, by name, that EP must divide; without any EP is 1."""
    transformer: dict[Word, bool | Count | Word] = {}
    """Shape of the model, by the names of a job's ``transformer``, if the strategy knows it."""


class Replicas(Message, frozen=True, kw_only=True, tag="replicas"):
    """[from one worker for all] The replicas of the model in this epoch; members of none of them are spares.

    ``at_once``: number of replicas that may leave together without the loss of state; None: all but one.
    """

    worker: Id
    epoch: Count
    replicas: list[list[Id]]
    """The workers of each complete replica, oldest first."""
    at_once: Count | None = None
    spread: Spread | None = None
    """None until the model is built."""


class ErrorReport(Message, frozen=True, kw_only=True, tag="error_report"):
    """An error, reported by a worker about itself, or by an agent about a worker or its node.

    It is logged once and handled by the severity of its kind. Its consequences (the exit of the process, broken
    connections of its peers) are no separate errors.
    """

    worker: Id | None
    """Worker with the error; None if the node has it."""
    kind: Word
    """A key of `coordinator.severity.record.SEVERITY`; the coordinator takes others for `unnamed_software_error`."""
    cause: str
    """Short readable text."""
    phase: Word
    """The worker's phase: ``compute``, ``reduce``, ...; "" if unknown."""
    step: Count | None
    """Number of optimizer steps that the worker had finished."""
    at: Wall
    """time.time() of the error."""
    details: dict[str, Any]
    """Plain JSON: exception type, last frames, counters, ..."""
    ends: bool = False
    """Whether the error ends the worker's process: it takes part in nothing any more, and need not be killed."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's state as reported by NVML. Counters are since the agent's start."""

    bus: Key
    """PCI bus id."""
    celsius: float | None = None
    ecc_errors: Count = 0
    """Uncorrectable errors."""
    remap_failed: bool = False
    nvlink_errors: Count = 0
    xids: list[int] = []
    throttled: list[str] = []
    """Reasons for a lowered clock that indicate a fault."""
    error: str = ""
    """NVML's error, if it gave no answer."""


class NodeReading(Message, frozen=True, kw_only=True, tag="node_reading"):
    """State of the agent's machine; unreadable values are omitted."""

    missing: bool = False
    """Whether nothing could be read in time."""
    disk_free_bytes: dict[Key, Count] = msgspec.field(default_factory=dict)
    """By folder."""
    memory_free_percent: float | None = None
    memory_pressure_percent: float | None = None
    """Share of the last ten seconds in which all processes waited for memory (Linux' PSI, full)."""
    gpus: list[GpuReading] = msgspec.field(default_factory=list)
    gpu_error: str = ""


class Barred(Message, frozen=True, kw_only=True, tag="barred"):
    """The agent gets no slot while its node is in this state; "": it may have one."""

    reason: str


class FaultDue(Message, frozen=True, kw_only=True, tag="fault_due"):
    """A fault of the worker's own script is due. It strikes if the answer, `FaultRecorded`, allows it."""

    worker: Id
    claim: Key
    """Identifies this strike; the same claim may be sent again."""
    key: Key
    """Identifies the fault in the task, whichever worker it strikes."""
    most: Count | None
    """Largest number of strikes in the life of the task; None: no limit."""
    fault: Key
    fields: dict[str, Any]
    """Place of the strike, for the event log: rank, step, phase."""


class FaultRecorded(Message, frozen=True, kw_only=True, tag="fault_recorded"):
    """[to the worker] Answer to `FaultDue`: the fault is in the event log.

    Effects that the worker cannot cause itself are caused by its agent when it forwards this message, or by the
    coordinator after sending it.
    """

    worker: str
    claim: str
    fault: str
    strikes: bool
    reason: str = ""
    """Reason if the fault does not strike."""


class Inject(Message, frozen=True, kw_only=True, tag="inject"):
    """[to the worker, if the agent cannot do it] A fault ordered by an operator; ``worker`` None: for the agent
    itself.

    Attributes:
        worker: its id.
        key: name of the fault in the task.
        fault: the fault for this worker, without the order's selectors.
        ordered: the operator's order, for the logs; empty from older coordinators.
    """

    worker: str | None
    key: str
    fault: str
    ordered: str = ""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Address on which an agent accepts connections."""

    agent: str
    host: str
    port: int


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """[to the agent] Connect to each of the peers. Answered by one `Probed`."""

    number: int
    """Number of the probe in this task."""
    peers: list[Peer]
    seconds: float
    """Time limit for each peer."""


class Probed(Message, frozen=True, kw_only=True, tag="probed"):
    """[to the coordinator] A probe has ended."""

    number: Count
    missed: dict[Id, Key]
    """Peers that were not reached, by agent, with the reasons."""


Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A SHA-256 in hexadecimal digits."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete persistent checkpoint, as a worker has reported it."""

    path: Path
    """Absolute path, or a URL."""
    step: Count
    """Optimizer steps finished in it."""
    digest: Digest
    """Digest of what was written: of the file, or of a folder's manifest (`checkpoints.files`)."""
    life: Count
    """Life of the task in which it was written."""
    bytes: Count | None = None
    """Size of its files; None if it is not known."""
    fit: Count = 1
    """Number of the script's ``fit`` in which it was written: each counts its own steps."""


class CheckpointSaved(Message, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """A persistent checkpoint is complete at ``path`` and holds the state after ``step`` optimizer steps.

    The other fields are those of `Checkpoint`. ``parting``: all members wait to be restarted from it; see `wire.Epoch`
    of the kinds in `PARTING`.
    """

    worker: Id
    path: Path
    step: Count
    digest: Digest
    bytes: Count | None = None
    fit: Count = 1
    parting: bool = False


class StateVersion(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Identity of a version. Versions are ordered by age."""

    life: Count
    epoch: Count
    """Epoch of the members that have staged it: a version is divided by their number."""
    step: Count
    """Optimizer steps finished in it."""
    parts: Size
    copies: Size
    """Copies that each part is to have, on different nodes."""
    layout: Digest
    """SHA-256 of the names, types and shapes of the divided tensors: parts of different layouts do not fit together."""
    fit: Count = 1
    """Number of the script's ``fit``: each counts its own steps."""


class StateCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a version in memory."""

    version: StateVersion
    part: Index
    size: Count
    """Bytes."""
    digest: Digest | None = None
    """`shared_memory.digest_of` its bytes, computed by the agent that holds them; None until then."""


class OpenCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy that a process on the same machine holds open."""

    copy: StateCopy
    descriptor: Count
    """File descriptor in that process."""


class StateStaged(Message, frozen=True, kw_only=True, tag="state_staged"):
    """The worker has copied parts of its state to shared memory.

    Sent to the agent with the memory's descriptors, one for each copy, over a socket of its own; the agent reports
    `StateHeld`.
    """

    worker: Id
    staged: tuple[StateCopy, ...]


class StateWanted(Message, frozen=True, kw_only=True, tag="state_wanted"):
    """The worker asks for the copies in its agent's memory. Stays on the UNIX socket; answered by `StateGiven`."""

    worker: Id


class StateGiven(Message, frozen=True, kw_only=True, tag="state_given"):
    """[agent to worker] All copies that the agent has, held open by the process ``pid``."""

    pid: Pid
    copies: tuple[OpenCopy, ...]


class StateHeld(Message, frozen=True, kw_only=True, tag="state_held"):
    """[agent to coordinator] All copies in the agent's memory: after each change, once their digests are known, and
    before the end of a worker is reported.
    """

    copies: tuple[StateCopy, ...]


class StateComplete(Message, frozen=True, kw_only=True, tag="state_complete"):
    """[coordinator to agent] All parts of the version are held: older versions are no longer needed."""

    version: StateVersion


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A version from which a new life may begin."""

    version: StateVersion
    digests: tuple[tuple[Digest, ...], ...]
    """For each part, the digests of its copies: other bytes are not accepted."""
    holders: tuple[tuple[str, ...], ...]
    """For each part, the nodes that hold a copy."""
