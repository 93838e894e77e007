"""Messages about records: values that workers leave for later workers.

Part of `wire`, from which they are used.
"""

from __future__ import annotations

from unicron_lightning.fields import Id, Key
from unicron_lightning.message import Message


class Record(Message, frozen=True, kw_only=True, tag="record"):
    """Keep ``value`` (JSON text) under ``key`` for the task's present life, for workers that join later."""

    key: Key
    value: str


class Lookup(Message, frozen=True, kw_only=True, tag="lookup"):
    """Request a recorded value. Answered by `LookupReply` with the same ``worker`` and ``key``."""

    worker: Id
    key: Key


class LookupReply(Message, frozen=True, kw_only=True, tag="lookup_reply"):
    """[to the worker] ``value`` is None if nothing is recorded."""

    worker: str
    key: str
    value: str | None
