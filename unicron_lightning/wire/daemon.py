"""Messages between the coordinator and a node's daemon (``unicron agent``), in the form of `wire`'s.

This is the third link of the control plane: one WebSocket per daemon, text frames, one message a frame. It is
declarative. The coordinator sends a daemon the complete list of torchrun agents to run (`NodeRun`) after each change
and each connection. The daemon starts and stops agents accordingly, and reports the complete list of its agents
(`NodeReport`). No lost message matters, and a restarted daemon or coordinator continues from the present state.
"""

from __future__ import annotations

from typing import Annotated, Union

import msgspec
from msgspec import Meta

from unicron_lightning.jobs import Job
from unicron_lightning.wire import Refused
from unicron_lightning.wire.fields import Code, Count, Host, Message, Name, Pid, Wall


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A torchrun agent to run: one of a job's, in a slot of the node."""

    job: Job
    slot: str
    ending: bool = False
    """The task has succeeded: the agent exits by itself, and is not started again."""


class NodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """A torchrun agent that the daemon was ordered to run."""

    job: Job
    slot: Name
    pid: Pid | None = None
    """torchrun's process; None if it is not running."""
    starts: Count = 0
    """Number of its starts."""
    code: Code | None = None
    """End of its last process: exit status, or minus the signal's number; None if none has ended."""
    reason: Annotated[str, Meta(max_length=1000)] = ""
    """Reason why the last start failed; "" if it succeeded."""


# ---- daemon -> coordinator -----------------------------------------------------------------------------------------


class NodeHello(Message, frozen=True, kw_only=True, tag="node_hello"):
    """First message of every connection. Answered by `NodeRun`, or `wire.Refused`."""

    protocol: int
    node: Name
    host: Host
    pid: Pid
    started_at: Wall
    """time.time() of the daemon's start: among daemons with the same label the newest one stays."""
    slots: list[Name]
    tasks: list[NodeTask]
    """Agents that are running already."""
    kind: Name | None = None
    """Of its accelerators, if the cluster has several."""


class NodeReport(Message, frozen=True, kw_only=True, tag="node_report"):
    """The daemon's running agents, and the ends of earlier ones. Sent after each change."""

    tasks: list[NodeTask]


# ---- coordinator -> daemon -----------------------------------------------------------------------------------------


class NodeRun(Message, frozen=True, kw_only=True, tag="node_run"):
    """All torchrun agents to run on the node. Others are to be stopped."""

    launches: list[Launch]


FromNode = Union[NodeHello, NodeReport]
ToNode = Union[NodeRun, Refused]

decode_from_node = msgspec.json.Decoder(FromNode).decode
decode_to_node = msgspec.json.Decoder(ToNode).decode
