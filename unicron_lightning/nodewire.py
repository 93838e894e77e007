"""Messages between the coordinator and a node's daemon (``unicron agent``), in the form of `wire`'s.

A third link of the control plane: one WebSocket per daemon, text frames, one message a frame. It is declarative. The
coordinator tells a daemon which torchrun agents shall run there (`NodeRun`), all of them, each time that they change
and after each connection; the daemon makes it so and tells what runs (`NodeReport`), all of it as well. So nothing
depends on a message that was lost, and a daemon or a coordinator that comes back goes on from what there is.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import Meta

from unicron_lightning.fields import Code, Count, Host, Name, Pid, Wall
from unicron_lightning.jobs import Job
from unicron_lightning.wire import Message, Refused


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A torchrun agent that shall run: one of a job's, in a slot of the node."""

    job: Job
    slot: str
    ending: bool = False
    """The task has ended well: the agent is left to end by itself, and not started again."""


class NodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """A torchrun agent that the daemon was told to run."""

    job: Job
    slot: Name
    pid: Pid | None = None
    """torchrun's process; None: it does not run now."""
    starts: Count = 0
    """How often it was started."""
    code: Code | None = None
    """How it ended the last time: exit status, or minus the signal's number; None if it never did."""
    reason: Annotated[str, Meta(max_length=1000)] = ""
    """Why it could not be started the last time; "" if it could."""


# ---- daemon -> coordinator -----------------------------------------------------------------------------------------


class NodeHello(Message, frozen=True, kw_only=True, tag="node_hello"):
    """First message of every connection. Answered by `NodeRun`, or `wire.Refused`."""

    protocol: int
    node: Name
    host: Host
    pid: Pid
    started_at: Wall
    """time.time() of the daemon's start: of two with the same label the newer one stays."""
    slots: list[Name]
    tasks: list[NodeTask]
    """What it runs already."""


class NodeReport(Message, frozen=True, kw_only=True, tag="node_report"):
    """What the daemon runs now, and how what it has run ended. Told after each change."""

    tasks: list[NodeTask]


# ---- coordinator -> daemon -----------------------------------------------------------------------------------------


class NodeRun(Message, frozen=True, kw_only=True, tag="node_run"):
    """All torchrun agents that shall run on the node. Others are to be stopped."""

    launches: list[Launch]


FromNode = Union[NodeHello, NodeReport]
ToNode = Union[NodeRun, Refused]

decode_from_node = msgspec.json.Decoder(FromNode).decode
decode_to_node = msgspec.json.Decoder(ToNode).decode
