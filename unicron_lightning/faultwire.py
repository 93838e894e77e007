"""Messages of faults on purpose (docs/faults.md). Part of `wire`, which is where they are used from.

Faults are texts of `faults.language`: whoever carries one out reads it there.
"""

from __future__ import annotations

from typing import Any

from unicron_lightning.fields import Count, Id, Key
from unicron_lightning.message import Message


class FaultDue(Message, frozen=True, kw_only=True, tag="fault_due"):
    """A fault of the worker's own script is due. It waits for `FaultNoted`, and strikes if that says so."""

    worker: Id
    claim: Key
    """Names this strike; the same one may be asked for again."""
    key: Key
    """Names the fault in the task, whichever worker it strikes."""
    most: Count | None
    """How often it may strike in the life of the task; None: no limit."""
    fault: Key
    fields: dict[str, Any]
    """Where it strikes, for the event log: rank, step, phase."""


class FaultNoted(Message, frozen=True, kw_only=True, tag="fault_noted"):
    """[to the worker] Answer to `FaultDue`: it is in the event log. What the worker cannot do to itself is done by its
    agent on the way of this message, or by the coordinator once it is sent.
    """

    worker: str
    claim: str
    fault: str
    strikes: bool
    reason: str = ""
    """Why not."""


class Inject(Message, frozen=True, kw_only=True, tag="inject"):
    """[to the worker, if the agent cannot do it] A fault by an operator's order; ``worker`` None: upon the agent."""

    worker: str | None
    key: str
    fault: str
