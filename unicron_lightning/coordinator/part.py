"""The protocol of the machine's parts: `Part` declares the rules of one package about a task.

A rule is a function that gets the task and the turn, changes the task's state, and adds actions to the turn. The
machine calls these rules only through the parts listed in `parts`, in their order there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.state import Agent, Task

M = TypeVar("M", bound=wire.FromAgent)


Receiver = tuple[type[msgspec.Struct], Callable[[Task, Turn, Agent, Any], None]]
"""A type of agents' messages and the rule for it; made by `on`, which checks that they fit."""


def on(kind: type[M], rule: Callable[[Task, Turn, Agent, M], None]) -> Receiver:
    """Declare that a rule handles messages of this type."""
    return kind, rule


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rules about one aspect of a task; a part has those that it needs."""

    restore: Callable[[Task, Turn], None] | None = None
    """Continues with the state of an earlier coordinator process, or of the store: no timer runs, no agent is
    connected."""
    receivers: tuple[Receiver, ...] = ()
    """Rules for messages. A message is handled by all parts that have a rule for its type."""
    timers: Mapping[str, Callable[[Task, Turn], None]] = field(default_factory=dict)
    """Rule for each kind of the part's timers, `ev.TimerKey.kind`."""
    agent_timers: Mapping[str, Callable[[Task, Turn, Agent], bool | None]] = field(default_factory=dict)
    """Rule for each kind of timer that concerns one agent. A rule that returns False has changed nothing: the task
    needs no review."""
    review: Callable[[Task, Turn], bool | None] | None = None
    """Takes the steps that are due, after each input. Idempotent. If it returns True, all parts review again."""
    record: Callable[[Task, Turn, ev.Emit], None] | None = None
    """Processes an event of the task's log, at the end of the turn. It decides nothing."""
