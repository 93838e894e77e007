"""Messages between worker, agent and coordinator.

This package is the whole vocabulary of the control plane. Its names are those of this module, except for the
messages of the third link, which `wire.daemon` has. Two links carry it, both as JSON objects with a ``type``
field:

* **agent <-> coordinator**: one persistent WebSocket per agent (text frames, one message a frame).
* **worker <-> agent**: one UNIX stream socket per worker (one message a line).

A worker never communicates with the coordinator directly: its agent forwards its messages and adds nothing but its own
identity, which is known from the connection. Everything received is decoded into a frozen struct and refused if it does
not fit; nothing is ever unpickled. Unknown fields are ignored, so that a newer peer may send more.

Identity: an *agent* is ``<node>-<8 hex>``, new for every torchrun process. A *worker* is ``<agent>/<local
rank>#<round>`` where the round counts the agent's rendezvous: a restarted worker is a new worker.
"""

from __future__ import annotations

from typing import Union

import msgspec

from unicron_lightning.wire.activity import ActivityQuery, ActivityReport, Inspect, Pace, Progress, WatchLimits
from unicron_lightning.wire.agent import (
    PROTOCOL_VERSION,
    Address,
    Beat,
    Bye,
    Departing,
    EpochWanted,
    LocalWorld,
    Register,
    RendezvousBegin,
    StoreUsed,
    WorkerDied,
    WorkerInfo,
    sealed,
)
from unicron_lightning.wire.checkpoints import Checkpoint, CheckpointSaved
from unicron_lightning.wire.coordinator import (
    PARTING,
    PLANNED,
    Arrival,
    Epoch,
    EpochChange,
    EpochKind,
    Fence,
    Go,
    Grant,
    Holders,
    Member,
    Notice,
    Ranks,
    Refused,
    Registered,
    Standing,
    Stop,
    TaskOver,
    Welcome,
)
from unicron_lightning.wire.faults import FaultDue, FaultRecorded, Inject
from unicron_lightning.wire.fields import Message
from unicron_lightning.wire.health import Barred, ErrorReport, GpuReading, NodeReading
from unicron_lightning.wire.memory import (
    OpenCopy,
    StateComplete,
    StateCopy,
    StateGiven,
    StateHeld,
    StateOffer,
    StateStaged,
    StateVersion,
    StateWanted,
)
from unicron_lightning.wire.peers import Peer, Probe, Probed
from unicron_lightning.wire.replicas import Layout, Replicas, Spread
from unicron_lightning.wire.worker import (
    CommError,
    Heartbeat,
    Imported,
    Lookup,
    LookupReply,
    Record,
    Training,
    WorkerDone,
    WorkerEvent,
    WorkerHello,
    WorkerReady,
)

__all__ = [
    "PARTING",
    "PLANNED",
    "PROTOCOL_VERSION",
    "ActivityQuery",
    "ActivityReport",
    "Address",
    "Arrival",
    "Barred",
    "Beat",
    "Bye",
    "Checkpoint",
    "CheckpointSaved",
    "CommError",
    "Departing",
    "Epoch",
    "EpochChange",
    "EpochKind",
    "EpochWanted",
    "ErrorReport",
    "FaultDue",
    "FaultRecorded",
    "Fence",
    "Forwarded",
    "FromAgent",
    "FromWorker",
    "Go",
    "GpuReading",
    "Grant",
    "Heartbeat",
    "Holders",
    "Imported",
    "Inject",
    "Inspect",
    "Layout",
    "LocalWorld",
    "Lookup",
    "LookupReply",
    "Member",
    "Message",
    "NodeReading",
    "Notice",
    "OpenCopy",
    "Pace",
    "Peer",
    "Probe",
    "Probed",
    "Progress",
    "Ranks",
    "Record",
    "Refused",
    "Register",
    "Registered",
    "RendezvousBegin",
    "Replicas",
    "Spread",
    "Standing",
    "StateComplete",
    "StateCopy",
    "StateGiven",
    "StateHeld",
    "StateOffer",
    "StateStaged",
    "StateVersion",
    "StateWanted",
    "Stop",
    "StoreUsed",
    "TaskOver",
    "ToAgent",
    "ToWorker",
    "Training",
    "WatchLimits",
    "Welcome",
    "WorkerDied",
    "WorkerDone",
    "WorkerEvent",
    "WorkerHello",
    "WorkerInfo",
    "WorkerReady",
    "decode_from_agent",
    "decode_from_worker",
    "decode_to_agent",
    "decode_to_worker",
    "encode",
    "sealed",
]

Forwarded = Union[
    WorkerHello,
    WorkerReady,
    CommError,
    Progress,
    WorkerEvent,
    Record,
    Lookup,
    CheckpointSaved,
    WorkerDone,
    ErrorReport,
    FaultDue,
    ActivityReport,
    Replicas,
]
FromWorker = Union[Forwarded, Heartbeat, Imported, Training, StateWanted]
ToWorker = Union[Welcome, Epoch, Go, LookupReply, TaskOver, Notice, FaultRecorded, Inject, ActivityQuery, StateGiven]
FromAgent = Union[
    Beat,
    NodeReading,
    Register,
    RendezvousBegin,
    LocalWorld,
    EpochWanted,
    StoreUsed,
    WorkerDied,
    Departing,
    Bye,
    Probed,
    StateHeld,
    Forwarded,
]
ToAgent = Union[
    Beat,
    Barred,
    Registered,
    Refused,
    Grant,
    Ranks,
    Stop,
    Fence,
    Inspect,
    Probe,
    EpochChange,
    StateComplete,
    ToWorker,
]

encode = msgspec.json.Encoder().encode
decode_from_worker = msgspec.json.Decoder(FromWorker).decode
decode_to_worker = msgspec.json.Decoder(ToWorker).decode
decode_from_agent = msgspec.json.Decoder(FromAgent).decode
decode_to_agent = msgspec.json.Decoder(ToAgent).decode
decode_staged = msgspec.json.Decoder(StateStaged).decode
