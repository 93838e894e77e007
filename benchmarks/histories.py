"""Checks histories of coordinators that replace each other: the log of events, clients' orders, workers' notes.

Each rule returns one sentence for each violation:

- an order that was confirmed is known at the end;
- an epoch number has one list of members, and numbers of a task never go back;
- no more agents of a task have places than there are, so that none is granted to two;
- workers that finish steps in one epoch agree on the size of its world, and no worker returns to an older epoch;
- the log's own numbers increase.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Order(NamedTuple):
    """A job that a client has submitted; ``confirmed``: the answer confirmed it."""

    name: str
    confirmed: bool


def violations(
    events: Sequence[Mapping[str, Any]],
    orders: Iterable[Order] = (),
    known: Iterable[str] = (),
    steps: Iterable[Mapping[str, Any]] = (),
) -> list[str]:
    """Return all violations.

    Args:
        events: the final log, as `storage.LoggedEvent`.
        orders: by all clients.
        known: names of the jobs that the last coordinator knows.
        steps: notes of workers about finished steps, each worker's in order: ``pid``, ``epoch``, ``world``.
    """
    return [*_lost(orders, known), *_epochs(events), *_slots(events), *_worlds(steps), *_numbers(events)]


def _lost(orders: Iterable[Order], known: Iterable[str]) -> list[str]:
    there = set(known)
    return [
        f"order {each.name} was confirmed and is lost" for each in orders if each.confirmed and each.name not in there
    ]


def _epochs(events: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    members: dict[tuple[str, int], list[str]] = {}
    newest: dict[str, int] = {}
    for event in events:
        if event["name"] != "epoch_published":
            continue
        task, number = event["task"], event["fields"]["number"]
        given = sorted(event["fields"]["members"])
        if members.setdefault((task, number), given) != given:
            found.append(f"epoch {number} of {task} has two lists of members: {members[task, number]} and {given}")
        if number < newest.get(task, number):
            found.append(f"epoch {number} of {task} follows epoch {newest[task]}")
        newest[task] = max(number, newest.get(task, number))
    return found


def _slots(events: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    holders: dict[str, set[str]] = defaultdict(set)
    for event in events:
        task, fields = event["task"], event["fields"]
        if event["name"] == "slot_granted":
            holders[task].add(fields["agent"])
            if len(holders[task]) > fields["group_world"]:
                found.append(f"{sorted(holders[task])} have places of {task}, which has {fields['group_world']}")
        elif event["name"] in _ENDS:
            holders[task].discard(fields.get("agent"))
            holders[task].discard(str(fields.get("worker", "")).partition("/")[0])
    return found


_ENDS = frozenset({"agent_lost", "agent_left", "agent_departs", "slot_revoked", "slot_passed_on", "worker_died"})
"""Events after which an agent has no place, until it is granted one again."""


def _worlds(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    found = []
    sizes: dict[int, int] = {}
    newest: dict[int, int] = {}
    for step in steps:
        pid, epoch, world = step["pid"], step["epoch"], step["world"]
        if sizes.setdefault(epoch, world) != world:
            found.append(f"epoch {epoch} has workers in worlds of {sizes[epoch]} and {world}")
        if epoch < newest.get(pid, epoch):
            found.append(f"worker {pid} returned from epoch {newest[pid]} to {epoch}")
        newest[pid] = epoch
    return sorted(set(found))


def _numbers(events: Sequence[Mapping[str, Any]]) -> list[str]:
    pairs = itertools.pairwise(events)
    return [f"event {b['seq']} follows event {a['seq']}" for a, b in pairs if b["seq"] <= a["seq"]]
