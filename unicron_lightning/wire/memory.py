"""Messages about states of training that agents keep in memory: staged by workers, offered to those of a new life.

A *version* is the state of a task at a step boundary, divided into parts; a *copy* is one part in one agent's memory.
"""

from __future__ import annotations

import msgspec

from unicron_lightning.wire.checkpoints import Digest
from unicron_lightning.wire.fields import Count, Id, Index, Message, Pid, Size


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
