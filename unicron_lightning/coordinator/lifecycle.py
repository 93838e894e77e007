"""The lifecycle of a task: its states, and the transitions between them, by name.

A task's lifecycle has seven parts. Each moves on its own, along these transitions only:

    script    unknown -> changed;  unknown, changed -> plain;  any -> elastic
    slots     none -> granted <-> regrouping;  granted, regrouping -> none
    agents    present -> absent -> present;  any -> restoring;  restoring -> present, absent
    join      none -> waiting -> due;  waiting, due -> none
    rebuilding, pausing, over

These combinations do not occur: regrouping of a script that is unknown or changed; a join, or a member, of a script
that is not elastic; agents of a task that is absent; slots granted to agents before any slot was. Every other
combination may occur: a restart of the coordinator, a loss of all agents and the task's end meet a task in any state.

`Lifecycle` is frozen, and only the functions below replace it: `move`, and those for moves with conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from unicron_lightning.coordinator.state import Task


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """State of a task's lifecycle. A stored task without it, of an earlier version, is unreadable."""

    script: Literal["unknown", "changed", "plain", "elastic"] = "unknown"
    """Kind of the user's script. ``elastic``: a worker has sent its hello, so the task recovers in process. ``plain``:
    workers use the rendezvous' store. ``changed``: unknown, and agents have changed since the last common grant."""
    slots: Literal["none", "granted", "regrouping"] = "none"
    """``granted``: the first slots were granted together. ``regrouping``: all agents of a plain script are stopping,
    and are granted slots together when all wait."""
    agents: Literal["present", "restoring", "absent"] = "present"
    """``restoring``: the state comes from an earlier coordinator process, and some agents have not reconnected yet.
    ``absent``: there is no agent. Lost agents are given time to return; a job waits for agents without limit."""
    join: Literal["none", "waiting", "due"] = "none"
    """``waiting``: candidates wait for their siblings, and a timer runs. ``due``: they have waited long enough."""
    rebuilding: bool = False
    """Whether the task was running before this coordinator knew of it: its agents are given time to register."""
    pausing: bool = False
    """Whether its members write a checkpoint, after which all its slots are taken back."""
    over: bool | None = None
    """Whether the task succeeded; None until it has ended."""


_ALLOWED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "script": {"unknown": ("changed", "plain", "elastic"), "changed": ("plain", "elastic"), "plain": ("elastic",)},
    "slots": {"none": ("granted",), "granted": ("regrouping", "none"), "regrouping": ("granted", "none")},
    "agents": {
        "present": ("restoring", "absent"),
        "restoring": ("present", "absent"),
        "absent": ("present", "restoring"),
    },
    "join": {"none": ("waiting",), "waiting": ("due", "none"), "due": ("none",)},
}
"""The transitions of each part whose moves depend on its state."""


def move(task: Task, **to: Any) -> None:
    """Move parts of a task's lifecycle to other states, e.g. ``agents="present"``.

    Raises:
        AssertionError: a part has no such transition.
    """
    for part in _ALLOWED.keys() & to.keys():
        now = getattr(task.lifecycle, part)
        assert to[part] in _ALLOWED[part].get(now, ()), f"task {task.id!r}: {part} cannot move from {now} to {to[part]}"
    task.lifecycle = msgspec.structs.replace(task.lifecycle, **to)


def found_elastic(task: Task) -> None:
    """A worker has sent its hello."""
    if task.lifecycle.script != "elastic":
        move(task, script="elastic")


def found_plain(task: Task) -> bool:
    """Workers have used the rendezvous' store. Return whether agents have changed since the last common grant."""
    changed = task.lifecycle.script == "changed"
    move(task, script="plain")
    return changed


def agents_changed(task: Task) -> None:
    """Record a change of the agents for the case that the script is a plain one; no other kind depends on it."""
    if task.lifecycle.script == "unknown":
        move(task, script="changed")


def regroup(task: Task) -> None:
    """All agents of a plain script are to stop and wait."""
    assert task.lifecycle.script == "plain", f"task {task.id!r}: {task.lifecycle} cannot regroup"
    move(task, slots="regrouping")


def restore(task: Task, *, waits: bool) -> None:
    """Continue with a stored task whose agents are all disconnected; without agents it ends, unless it ``waits``."""
    agents = "restoring" if task.agents else "absent" if waits else "present"
    join = "none" if task.lifecycle.join == "waiting" else task.lifecycle.join
    task.lifecycle = msgspec.structs.replace(task.lifecycle, agents=agents, join=join)


def end_waiting_for_siblings(task: Task) -> bool:
    """An epoch is published. Return whether candidates were waiting for their siblings."""
    waiting = task.lifecycle.join == "waiting"
    if task.lifecycle.join != "none":
        move(task, join="none")
    return waiting
