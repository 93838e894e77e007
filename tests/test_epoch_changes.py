"""Epochs as differences: a member built from them equals the whole, and a lost message leads to the whole."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from unicron_lightning import wire
from unicron_lightning.agent.workers.roster import Roster
from unicron_lightning.wire.epoch_changes import change_of, changed


def epoch(number: int, members: list[wire.Member]) -> wire.Epoch:
    about: dict[str, Any] = {"hold": number % 3 == 0, "incident": f"i{number}", "published_at": float(number)}
    store = wire.Address(host="h", port=number)
    return wire.Epoch(number=number, kind="fail", members=members, store=store, key=f"{number:032x}", **about)


def member(name: int) -> wire.Member:
    return wire.Member(worker=f"n{name}/0#1", agent=f"n{name}", node=f"n{name}", host="h", local_rank=0)


def history(chance: random.Random, length: int) -> list[wire.Epoch]:
    """Random memberships: members leave, come at any place, return, and are put in another order."""
    names, fresh, found = list(range(chance.randint(1, 12))), 100, []
    for number in range(1, length + 1):
        found.append(epoch(number, [member(name) for name in names]))
        match chance.choice(("leave", "leave", "come", "return", "order", "replace", "same")):
            case "leave":
                names = [name for name in names if chance.random() > 0.3] or names[:1]
            case "come":
                names, fresh = [*names, *range(fresh, fresh + chance.randint(1, 4))], fresh + 4
            case "return":
                names.insert(chance.randint(0, len(names)), fresh)
                fresh += 1
            case "order":
                chance.shuffle(names)
            case "replace":
                names, fresh = list(range(fresh, fresh + 5)), fresh + 5
    return found


@pytest.mark.parametrize("seed", range(60))
def test_a_member_built_from_differences_equals_the_whole(seed: int):
    roster, held = Roster(), 0
    chance = random.Random(seed)
    epochs = history(chance, 30)
    for before, after in zip([None, *epochs], epochs, strict=False):
        change = None if before is None else change_of(before, after)
        message = after if change is None else msgspec.json.decode(wire.encode(change), type=wire.EpochChange)
        if chance.random() < 0.15:
            continue  # the message is lost
        whole = roster.whole(message)
        if isinstance(message, wire.EpochChange) and held != message.base:
            assert whole is None, "it must request the whole"
            whole = roster.whole(after)
        assert whole == after
        roster.saw_epoch(whole)
        held = after.number


def test_the_size_of_a_change_depends_on_what_changed():
    before = epoch(1, [member(name) for name in range(1024)])
    change = change_of(before, epoch(2, [*before.members[:500], *before.members[501:]]))
    assert change is not None and change.left == [500] and not change.came
    assert len(wire.encode(change)) < 350 < 50_000 < len(wire.encode(before))
    grown = epoch(3, [*before.members, member(5000)])
    change = change_of(before, grown)
    assert change is not None and [arrival.rank for arrival in change.came] == [1024] and not change.left
    assert changed(before, change) == grown


def test_a_base_with_other_members_is_noticed():
    """A coordinator without its store may use a number again."""
    true, other = (epoch(4, [member(name) for name in names]) for names in ((1, 2, 3), (1, 2, 4)))
    change = change_of(true, epoch(5, true.members[1:]))
    assert change is not None
    roster = Roster()
    roster.saw_epoch(other)
    assert roster.whole(change) is None
    roster.saw_epoch(true)
    assert roster.whole(change) == epoch(5, true.members[1:])


def test_a_world_of_mostly_new_members_is_sent_whole():
    assert change_of(epoch(1, [member(1), member(2)]), epoch(2, [member(2), member(3), member(4)])) is None
