"""Who hangs? Pure: from what the members of an epoch say that they are doing.

When one rank hangs, all ranks are overdue: the others wait for it in a collective. So whoever waits there is a victim,
and whoever is overdue elsewhere the culprit. Whoever does not even say what it does has no thread left that runs.
If all wait in a collective, none of them hangs: the connections do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unicron_lightning import wire


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be done.

    Attributes:
        culprits: members that hang.
        collective: whether it is the communicator that does.
        mute: whether the culprits are those that have not answered.
    """

    culprits: tuple[str, ...] = ()
    collective: bool = False
    mute: bool = False


NOTHING = Verdict()


def judge(
    members: Sequence[str],
    said: Mapping[str, wire.Doing],
    *,
    reachable: frozenset[str],
    asked: float,
    mute_time: float,
    collective_time: float,
    stall_time: float,
) -> Verdict:
    """Judges a task in which somebody is overdue.

    Args:
        members: of the epoch that trains.
        said: what each does, as far as it has said so since somebody was overdue.
        reachable: members whose agents are connected.
        asked: seconds since all were asked for the first time.
        mute_time: a reachable member that has not answered for so long is silent: its agent looks whether it hangs.
        collective_time: so long all may wait in a collective.
        stall_time: so long nobody may wait for anybody, though some are overdue.
    """
    answers = [said[member] for member in members if member in said]
    waiting = [doing for doing in answers if doing.waiting]
    elsewhere = [doing for doing in answers if not doing.waiting]
    late = [doing for doing in elsewhere if doing.overdue]
    if waiting and late:
        return Verdict(culprits=tuple(doing.worker for doing in late))
    # Nobody is held up by them: it may be that everything is slow at once, or that there is nobody else.
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
