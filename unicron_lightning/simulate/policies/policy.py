"""What a system that heals each task by itself decides; `healing.Healing` asks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.trace import Fault
from unicron_lightning.simulate.workload import SimTask

Loses = Literal["nothing", "step", "memory", "checkpoint"]
"""What is to be done again: nothing; the present step; all since the newest checkpoint in memory, or of any kind that
outlives processes; all since the newest persistent checkpoint.
"""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """How a task stands when something is to be decided, in places.

    Attributes:
        task: what it is.
        costs: of the system.
        declared: places that it was started with.
        least: fewest with which it may run.
        alive: those that it has, with processes that live.
        dead: those that it has, whose processes died though the node is well.
        spares: healthy ones that nobody has.
        faults: since it last ran.
    """

    task: SimTask
    costs: Costs
    declared: int
    least: int
    alive: int
    dead: int
    spares: int
    faults: tuple[Fault, ...] = ()

    @property
    def whole(self) -> int:
        """Those it would have if the dead ones were started again."""
        return self.alive + self.dead

    @property
    def nobody_died(self) -> bool:
        """Whether only connections broke."""
        return bool(self.faults) and all(fault.severity == "SEV3" for fault in self.faults)


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """What is done.

    Attributes:
        places: with how many it goes on, living ones first, then dead ones started again, then spares; 0: it waits.
        seconds: for which it stands still.
        loses: what is to be done again.
    """

    places: int
    seconds: float = 0.0
    loses: Loses = "nothing"


class Policy:
    """Base of those systems. Stateless: everything it may go by is an argument."""

    name: ClassVar[str]
    starts_dead: ClassVar[bool] = True
    """Whether workers that died are started again while the others go on."""

    def notices(self, costs: Costs, fault: Fault) -> float:
        """Seconds from a fault, at which its task stops, to its being known."""
        return costs.detects(fault.kind)

    def reacts(self, now: Situation) -> Reaction:
        """Faults are known: what is done."""
        raise NotImplementedError

    def resumes(self, now: Situation) -> Reaction:
        """The task waits, and there may be nodes enough now: what is done; with 0 places it goes on waiting."""
        raise NotImplementedError

    def grows(self, now: Situation) -> Reaction | None:
        """The task runs; if it had so many places as are alive: what is done to take them in; None: it never does."""
        return None


class Restarting(Policy):
    """A task that runs with all its places or not at all: every change is a restart from a checkpoint."""

    def reacts(self, now: Situation) -> Reaction:
        return self._restart(now)

    def resumes(self, now: Situation) -> Reaction:
        return self._restart(now)

    def _restart(self, now: Situation) -> Reaction:
        if now.whole + now.spares < now.declared:
            return Reaction(places=0, loses="checkpoint")
        return Reaction(places=now.declared, seconds=now.costs.takes("restart"), loses="checkpoint")


class Shrinking(Policy):
    """A task that goes on with what lives, and grows again when nodes are ready. Below its minimum it waits."""

    shrink_loses: ClassVar[Loses] = "step"
    grow_loses: ClassVar[Loses] = "nothing"

    def reacts(self, now: Situation) -> Reaction:
        if now.nobody_died:
            return Reaction(places=now.alive, seconds=self.shrink_seconds(now.costs), loses=self.shrink_loses)
        if now.alive >= now.least:
            return Reaction(places=now.alive, seconds=self.shrink_seconds(now.costs), loses=self.shrink_loses)
        return self.resumes(now)

    def resumes(self, now: Situation) -> Reaction:
        there = min(now.declared, now.whole + now.spares)
        if there < now.least:
            return Reaction(places=0, loses="checkpoint")
        return Reaction(places=there, seconds=now.costs.takes("restart"), loses="checkpoint")

    def grows(self, now: Situation) -> Reaction | None:
        return Reaction(
            places=min(now.declared, now.alive), seconds=self.grow_seconds(now.costs), loses=self.grow_loses
        )

    def shrink_seconds(self, costs: Costs) -> float:
        """For which the others stand still without the dead."""
        return costs.takes("continue")

    def grow_seconds(self, costs: Costs) -> float:
        """For which all stand still to take others in."""
        return costs.takes("join")
