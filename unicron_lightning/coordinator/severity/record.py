"""Kinds of errors and their severities, the paper's table of in-band detection with additions; and the workflow's
state.

The state of the severity workflow of a task is plain structs, stored with it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from unicron_lightning import wire

Severity = Literal["SEV1", "SEV2", "SEV3"]


@dataclass(kw_only=True)
class SeverityLimits:
    """Limits of the workflow; times in seconds. The group ``severity`` of the configuration inherits them, so that they
    are not frozen: Hydra cannot override values of a frozen schema.
    """

    reattempt_limit: int = 3
    """Renewals of a broken connection in place, without a finished step, before a suspect is restarted."""
    reattempt_window: float = 300.0
    """Window of `reattempt_limit`: earlier renewals do not count."""
    soon_steps: int = 3
    """Steps within which a new worker's failure is attributed to its node."""
    cordon_failures: int = 4
    """Number of such failures in a row on one node after which it is cordoned."""
    cordon_window: float = 3600.0
    """Window of `cordon_failures`: earlier failures do not count."""
    crash_attempts: int = 5
    """Number of failures at the same step, with no step finished beyond it, after which a task is stopped."""
    crash_lives: int = 10
    """Number of lives from a checkpoint, none of which got further than earlier ones, after which a task is stopped."""
    hold_timeout: float = 3600.0
    """Time that a task may hold below its minimum of nodes, after which it is stopped."""
    strict: bool = False
    """Whether errors escalate as in the paper: whoever is at fault, and whether or not a task needs the node."""


SEVERITY: Final[Mapping[str, Severity]] = {
    "lost_connection": "SEV1",
    "exited_abnormally": "SEV2",
    "connection_failed": "SEV3",
    "illegal_memory_access": "SEV2",
    "ecc_error": "SEV1",
    "invalid_dma_mapping": "SEV1",
    "nvlink_error": "SEV1",
    "gpu_driver_error": "SEV1",
    "cuda_error": "SEV2",
    "other_network_error": "SEV3",
    "other_software_error": "SEV2",
    "nccl_timeout": "SEV3",
    "link_flapping": "SEV3",
    "task_hang": "SEV2",
    "config_error": "SEV2",
    "unnamed_software_error": "SEV2",
    "out_of_memory": "SEV2",
    "storage_error": "SEV2",
    "nan_loss": "SEV3",
    "parameters_differ": "SEV3",
    "silent_data_corruption": "SEV1",
    "gradients_differ": "SEV2",
    "programs_differ": "SEV3",
    "node_degraded": "SEV3",
    "link_degraded": "SEV3",
    "silent": "SEV2",
    "recovery_stuck": "SEV2",
    "keeps_failing": "SEV2",
}
"""Severity of the first occurrence of an error, by its kind. docs/detection.md has the evidence for each kind."""

REPORTED_ONLY: Final = ("link_degraded", "nan_loss", "node_degraded")
"""Kinds that end nothing: they are only logged."""

DOUBTING: Final = ("parameters_differ", "silent_data_corruption", "gradients_differ")
"""Kinds after which a worker's parameters, or what it has staged of them, may be wrong."""

REPEATABLE: Final = ("other_software_error", "gradients_differ")
"""Kinds that a new life from the same checkpoint may show again, at the same step: then the program causes them."""

STOPPING: Final = ("parameters_differ", "programs_differ")
"""Kinds that end the task, whatever its state is."""


def known(kind: str) -> str:
    """Return the kind to handle when ``kind`` is reported, maybe by a newer agent."""
    return kind if kind in SEVERITY else "unnamed_software_error"


def was_sent(message: wire.WorkerDied) -> bool:
    """Whether a worker ended by a signal that no fault of a process itself raises, and that nothing explains."""
    return message.cause == "signal" and message.code in (signal.SIGKILL, signal.SIGTERM) and message.kind is None


KEPT: Final = 20
"""Number of failures kept for a diagnosis."""
EQUAL_FAILURES: Final = 3
"""Failures of new workers of one node in a row, with one cause, after which none is expected to succeed."""

Awaited = Literal["", "reports", "entries"]


class UnattributedError(msgspec.Struct, frozen=True, kw_only=True):
    """Error that a worker without a hello reported before its process ended."""

    kind: str
    """One of `SEVERITY`."""
    cause: str = ""
    """Readable cause: exit status, signal, ..."""
    step: int | None = None
    """Number of optimizer steps that the worker had finished in its fit; None if it did not report one."""
    fault: str = ""
    """Identifies an exception of the program, see `apply.fault_of`; "" for all other failures."""
    place: str = ""
    """``fault`` without the step."""
    first: bool = False
    """Whether it was raised in a phase between steps, e.g. a validation, that its process had not passed before."""
    frames: tuple[str, ...] = ()
    """The last frames of an exception, the innermost last."""
    output: tuple[str, ...] = ()
    """Last lines of output of a worker that ended before its hello."""


class Failure(UnattributedError, frozen=True, kw_only=True):
    """An error that occurred, with its place."""

    node: str
    agent: str
    worker: str | None = None
    step: int = 0
    """Number of optimizer steps finished when it occurred, as its worker reported, or else as known."""
    at: float = 0.0
    """time.time() of the coordinator."""

    @property
    def what(self) -> str:
        """Its cause, or else its kind."""
        return self.cause or self.kind


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a worker's membership."""

    node: str
    step: int
    """Number of optimizer steps that were finished at the start."""


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of the program in a member that had taken part in more than its first steps."""

    step: int
    """Number of optimizer steps that were finished."""
    age: int
    """Number of those in which the worker had taken part."""
    at: float
    """time.time() of the coordinator."""


class Series(msgspec.Struct, kw_only=True):
    """Consecutive failures of one node, each of a worker that had just joined."""

    times: list[float] = []
    mark: int = 0
    """`SeverityRecord.mark` at the first failure."""
    step: int = 0
    """`SeverityRecord.step` at the last failure: a worker that joins later and lasts ends the series."""


class SeverityRecord(msgspec.Struct, kw_only=True):
    """Basis of all decisions. Steps are finished optimizer steps, those of a script's earlier fits included."""

    epoch: int = 0
    """The newest epoch that was processed."""
    settled: bool = False
    life: int = 1

    step: int = 0
    """Newest known step of this life."""
    mark: int = 0
    """Newest step ever known: progress is any step beyond it."""
    before: dict[int, int] = {}
    """Steps before each fit of the script after the first, by its number."""
    base: int = 0
    """`step` when the newest epoch was settled."""
    joined: dict[str, Joined] = {}
    """Members of the newest settled epoch."""
    awaited: Awaited = ""
    """Event that the newest epoch's timer waits for."""
    reports_entry: bool = False
    """Whether the task's workers report their entry into an epoch."""

    unjudged: list[Failure] = []
    """Members' failures since the newest epoch was settled: their progress is known at the next epoch."""
    failed: list[Failure] = []
    """The last failures since the last progress."""
    latest: list[Failure] = []
    """The last failures, whatever progress there was."""
    attempts: int = 0
    """Epochs that failed at one step since the last progress, at most one in `workflow.ATTEMPT_SECONDS`."""
    attempted_at: float | None = None
    """Time of the last of them."""
    lives: int = 0
    """Lives that failed since the last progress."""
    starts: dict[str, int] = {}
    """Rounds that failed before any worker trained, since the last progress, by agent."""
    exits: dict[str, int] = {}
    """Rounds in which workers ended by themselves before any worker of the task had registered, by agent."""
    rounds: dict[str, int] = {}
    """Last round in which a worker failed at its start, by agent; failures of its siblings count as the same one."""

    raised: list[str] = []
    """Faults of the program by which members have ended in this life, since there was progress."""
    faults: dict[str, int] = {}
    """By fault of the program: lives, or rounds of one agent before training, that ended by it since progress."""

    places: dict[str, str] = {}
    """`Failure.place` of the last failure of each agent's workers."""

    recurring: dict[str, list[Recurrence]] = {}
    """The last times of an exception of the program, by its type, place and text without numbers."""

    reattempts: list[float] = []
    """Times of SEV3 reactions in place since a step was finished."""
    renewals: list[float] = []
    """Times of the newest renewals of connections between workers, whatever progress there was."""
    named: dict[str, int] = {}
    """Reports of a failed connection by workers since a step was finished, by agent."""
    series: dict[str, Series] = {}
    """Consecutive failures by node."""

    unattributed: dict[str, UnattributedError] = {}
    """Errors reported by workers without a hello in an agent's present round, by worker."""
    reports: list[tuple[str, str, float]] = []
    """Source, kind and time of the newest errors that ended nothing; an agent repeats some."""

    def steps(self, fit: int, step: int) -> int:
        """Return the number of steps of all fits, given that of a fit: trainers count from 0 in each."""
        return step + (self.before.setdefault(fit, self.mark) if fit > 1 else 0)

    @property
    def most_starts(self) -> int:
        """Largest number of rounds of one agent that failed before any worker trained."""
        return max(self.starts.values(), default=0)

    @property
    def most_exits(self) -> int:
        """Largest number of rounds of one agent whose workers ended before any worker of the task had registered."""
        return max(self.exits.values(), default=0)

    @property
    def tries(self) -> int:
        """Number of failed tries since the last progress."""
        return max(self.attempts, self.most_starts)

    @property
    def newest(self) -> Failure | None:
        """The newest failure since the last progress, judged or not."""
        return max([*self.failed, *self.unjudged], key=lambda failure: failure.at, default=None)

    @property
    def last_words(self) -> str:
        """Place and cause of the last failure, whatever progress there was; "" if there was none."""
        return f"last failure, on {self.latest[-1].node}: {self.latest[-1].what}" if self.latest else ""

    @property
    def repeated(self) -> str | None:
        """The fault of the program that has ended two tries in the same way."""
        return next((fault for fault, times in self.faults.items() if times > 1), None)

    def begin_afresh(self) -> None:
        """Clear failures that were not caused by the nodes."""
        self.attempts = 0
        self.starts.clear()
        self.exits.clear()
        self.raised.clear()
        self.faults.clear()
        self.places.clear()
        self.recurring.clear()
        for failure in self.failed:
            self.series.pop(failure.node, None)
        self.failed.clear()
