"""Determine which members hang. Pure: from the reported activities of an epoch's members.

When one rank hangs, all ranks are overdue: the others wait for it in a collective. So a rank blocked in a collective is
waiting, and a rank that is overdue elsewhere is the one that hangs. A rank that does not even report has no running
thread left. If all ranks wait in a collective, none of them hangs: the connections do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unicron_lightning import wire

LONG_WAIT: Final = 1.0
"""Seconds in one collective after which a member may not reach the others. A probe clarifies it at a low cost."""
ENDED_WAIT: Final = 4.0
"""Seconds after which nothing more arrives from a worker whose program has ended."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusion of `judge`.

    Attributes:
        culprits: members that hang.
        collective: whether the communicator hangs.
        mute: whether the culprits are those that have not answered.
    """

    culprits: tuple[str, ...] = ()
    collective: bool = False
    mute: bool = False


NOTHING = Verdict()


def hopeless(members: Sequence[str], said: Mapping[str, wire.ActivityReport], *, finished: bool) -> str:
    """Return why the collectives in which all members wait can't be completed; "" if they can.

    A collective that not all ranks have entered is never completed. The members of an epoch run the same operations in
    the same order, so one that waits in another operation has a script on another path.

    Args:
        members: live members of the training epoch.
        said: newest activity of each member that has reported in this epoch.
        finished: whether the programs of other members have ended.
    """
    reports = [said[member] for member in members if member in said]
    waits = min((report.waits for report in reports), default=0.0)
    if len(reports) < len(members) or waits < LONG_WAIT:
        return ""
    places = {(report.epoch, report.position) for report in reports}
    names = sorted({report.operation for report in reports})
    if len(places) == 1 and len(names) > 1 and "" not in names:
        return f"the members wait in different operations: {' and '.join(map(repr, names))}"
    if finished and waits >= ENDED_WAIT:
        return f"the members wait in {' and '.join(map(repr, names))} for workers whose program has ended"
    return ""


def judge(
    members: Sequence[str],
    said: Mapping[str, wire.ActivityReport],
    *,
    reachable: frozenset[str],
    asked: float,
    mute_time: float,
    collective_time: float,
    stall_time: float,
) -> Verdict:
    """Judge a task with an overdue member.

    Args:
        members: members of the training epoch.
        said: activity of each member that has reported since one was overdue.
        reachable: members whose agents are connected.
        asked: seconds since all members were first asked.
        mute_time: seconds after which a reachable member without an answer is silent: its agent inspects it.
        collective_time: seconds that all members may wait in a collective.
        stall_time: seconds that an overdue member may take while no other waits for it.
    """
    answers = [said[member] for member in members if member in said]
    waiting = [doing for doing in answers if doing.waiting]
    elsewhere = [doing for doing in answers if not doing.waiting]
    late = [doing for doing in elsewhere if doing.overdue]
    if waiting and late:
        return Verdict(culprits=tuple(doing.worker for doing in late))
    # No member waits for them: everything may be slow at the same time, or there is no other member.
    stalled = tuple(doing.worker for doing in late if doing.seconds > stall_time)
    if stalled:
        return Verdict(culprits=stalled)
    if elsewhere or not any(doing.overdue for doing in answers):
        return NOTHING
    mute = [member for member in members if member not in said]
    if not mute:
        return Verdict(collective=True) if asked >= collective_time else NOTHING
    if asked >= mute_time and reachable.issuperset(mute):
        return Verdict(culprits=tuple(mute), mute=True)
    return NOTHING
