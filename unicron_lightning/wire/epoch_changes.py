"""Epochs as differences: what the coordinator sends agents that have the epoch before. Pure.

A failure among n members costs each agent a message whose size depends on the number of members that left and came,
not on n. The digest of the whole list protects against a base that differs, e.g. after a coordinator has lost its
store: the agent then requests the whole.
"""

from __future__ import annotations

import hashlib

import msgspec

from unicron_lightning.errors import UnicronError
from unicron_lightning.wire import Arrival, Epoch, EpochChange, Member

_encode = msgspec.json.Encoder().encode


class EpochMissed(UnicronError):
    """A change cannot be applied: its base is not the epoch at hand, or has other members."""


def digest_of(members: list[Member]) -> str:
    """Return 128 bits of the SHA-256 of a list of members, in hexadecimal digits."""
    return hashlib.sha256(_encode(members)).hexdigest()[:32]


def change_of(base: Epoch, epoch: Epoch) -> EpochChange | None:
    """Describe an epoch by its difference from another; None if more than half of its members are new.

    A member that is before another one which it followed in the base counts as one that left and came.
    """
    places = {member: rank for rank, member in enumerate(base.members)}
    stayed: set[int] = set()
    came: list[Arrival] = []
    last = -1
    for rank, member in enumerate(epoch.members):
        place = places.get(member, -1)
        if place > last:
            stayed.add(place)
            last = place
        else:
            came.append(Arrival(rank=rank, member=member))
    if 2 * len(came) > len(epoch.members):
        return None
    return EpochChange(
        base=base.number,
        left=[rank for rank in range(len(base.members)) if rank not in stayed],
        came=came,
        digest=digest_of(epoch.members),
        number=epoch.number,
        kind=epoch.kind,
        store=epoch.store,
        hold=epoch.hold,
        incident=epoch.incident,
        published_at=epoch.published_at,
        key=epoch.key,
    )


def changed(base: Epoch | None, change: EpochChange) -> Epoch:
    """Return the epoch that a change describes.

    Args:
        base: the newest epoch at hand; None if there is none.
        change: as received.

    Raises:
        EpochMissed: it describes a change of another epoch.
    """
    if base is None or base.number != change.base:
        raise EpochMissed(f"expected epoch {change.base} as the base, have {base and base.number}")
    left = set(change.left)
    members = [member for rank, member in enumerate(base.members) if rank not in left]
    for arrival in change.came:
        members.insert(arrival.rank, arrival.member)
    if digest_of(members) != change.digest:
        raise EpochMissed(f"the members of epoch {change.number} differ from the coordinator's")
    return Epoch(
        number=change.number,
        kind=change.kind,
        members=members,
        store=change.store,
        hold=change.hold,
        incident=change.incident,
        published_at=change.published_at,
        key=change.key,
    )
