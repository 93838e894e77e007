"""Messages of faults on purpose (docs/faults.md).

Faults are texts of `faults.fault`, parsed by the process that injects them.
"""

from __future__ import annotations

from typing import Any

from unicron_lightning.wire.fields import Count, Id, Key, Message


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
