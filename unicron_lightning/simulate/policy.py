"""The systems that recover each task by itself: their decisions, which `healing.Healing` requests.

Facts are from their papers and sources; a system is idealised only in its favour, and its docstring states it. Their
times are in the costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from unicron_lightning.simulate.costs import Change, Costs
from unicron_lightning.simulate.trace import SimTask, TraceFault

_Loses = Literal["nothing", "step", "memory", "checkpoint"]
"""Work to be repeated: none; the present step; all since the newest checkpoint in memory, or of any kind that outlives
processes; all since the newest persistent checkpoint.
"""


@dataclass(frozen=True, kw_only=True)
class TaskSituation:
    """State of a task when a decision is due, in places.

    Attributes:
        task: the task.
        costs: costs of the system.
        declared: places that it was started with.
        size: places that it last ran with; fewer than ``declared`` after operators have scaled it down.
        least: fewest with which it may run.
        alive: its places with live processes.
        dead: its places whose processes died though the node is healthy.
        spares: healthy places that no task has.
        faults: faults since it last ran.
    """

    task: SimTask
    costs: Costs
    declared: int
    size: int
    least: int
    alive: int
    dead: int
    spares: int
    faults: tuple[TraceFault, ...] = ()

    @property
    def whole(self) -> int:
        """Places it would have if the dead ones were started again."""
        return self.alive + self.dead

    @property
    def nobody_died(self) -> bool:
        """Whether only connections broke."""
        return bool(self.faults) and all(fault.severity == "SEV3" for fault in self.faults)


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """A decision.

    Attributes:
        places: number of places to continue with, live ones first, then restarted dead ones, then spares; 0: it waits.
        seconds: seconds that it is interrupted.
        loses: work to be repeated.
    """

    places: int
    seconds: float = 0.0
    loses: _Loses = "nothing"


class Policy:
    """Base class of those systems, and of users' own. Stateless: all inputs are arguments."""

    name: ClassVar[str]
    """Name in tables."""
    costs_of: ClassVar[str] = ""
    """System whose costs it has; "" for those under its own name."""
    starts_dead: ClassVar[bool] = True
    """Whether workers that died are started again while the others continue."""

    @classmethod
    def costs_name(cls) -> str:
        """Return the name of its costs in the configuration."""
        return cls.costs_of or cls.name

    def notices(self, costs: Costs, fault: TraceFault) -> float:
        """Return the seconds from a fault, at which its task stops, to its detection."""
        return costs.detects(fault.kind)

    def reacts(self, now: TaskSituation) -> Reaction:
        """Decide on the reaction to detected faults."""
        raise NotImplementedError

    def resumes(self, now: TaskSituation) -> Reaction:
        """Decide for a waiting task that may have enough nodes now; with 0 places it keeps waiting.

        By default it restarts from a checkpoint with the places that there are, if they are enough.
        """
        there = min(now.declared, now.whole + now.spares)
        if there < now.least:
            return Reaction(places=0, loses="checkpoint")
        return Reaction(places=there, seconds=now.costs.takes("restart"), loses="checkpoint")

    def grows(self, now: TaskSituation) -> Reaction | None:
        """Decide how a running task admits places, assuming all that are alive; None: it never does."""
        return None

    def patience(self, costs: Costs) -> float:
        """Return the seconds that a task waits for nodes until operators scale it down by hand; inf: for ever."""
        return math.inf

    def scaled_down(self, now: TaskSituation) -> Reaction:
        """Decide how operators restart a task that has waited for `patience`; with 0 places it keeps waiting."""
        return Policy.resumes(self, now)


class Restarting(Policy):
    """A task that runs with the places that it was given or not at all: every change is a restart from a checkpoint.

    ``extra["scale_down_hours"]``, if given, is the time after which operators restart it by hand with the places that
    are left. They also restart it by hand, from a checkpoint written for that, as soon as nodes return.
    """

    def reacts(self, now: TaskSituation) -> Reaction:
        there = min(now.declared, now.whole + now.spares)
        if there < now.size:
            return Reaction(places=0, loses="checkpoint")
        return Reaction(places=there, seconds=now.costs.takes("restart"), loses="checkpoint")

    def resumes(self, now: TaskSituation) -> Reaction:
        return self.reacts(now)

    def grows(self, now: TaskSituation) -> Reaction | None:
        if math.isinf(self.patience(now.costs)):
            return None
        there = min(now.declared, now.alive + now.spares)
        return Reaction(places=there, seconds=now.costs.takes("restart"))

    def patience(self, costs: Costs) -> float:
        return costs.extra.get("scale_down_hours", math.inf) * 3600.0


class _Shrinking(Policy):
    """A task that continues with its live places, and grows again when nodes are ready. Below its minimum it waits."""

    shrink_takes: ClassVar[Change] = "continue"
    """Operation, in the costs, by which the others continue without the dead."""
    shrink_loses: ClassVar[_Loses] = "step"
    grow_takes: ClassVar[Change] = "join"
    """Operation by which all admit others."""
    grow_loses: ClassVar[_Loses] = "nothing"

    def reacts(self, now: TaskSituation) -> Reaction:
        if now.nobody_died or now.alive >= now.least:
            return Reaction(places=now.alive, seconds=self.shrink_seconds(now.costs), loses=self.shrink_loses)
        return self.resumes(now)

    def grows(self, now: TaskSituation) -> Reaction | None:
        there = min(now.declared, now.alive)
        return Reaction(places=there, seconds=self.grow_seconds(now.costs), loses=self.grow_loses)

    def shrink_seconds(self, costs: Costs) -> float:
        """Return the seconds that the others are interrupted to continue without the dead."""
        return costs.takes(self.shrink_takes)

    def grow_seconds(self, costs: Costs) -> float:
        """Return the seconds that all are interrupted to admit others."""
        return costs.takes(self.grow_takes)


class Megatron(Restarting):
    """Megatron-LM in its usual operation: a collective's time-out, then a restart from the last persistent checkpoint.

    A task needs all its nodes. A spare node replaces one that is down, else the task waits for the repair.
    """

    name = "megatron"


class Oobleck(_Shrinking):
    """Oobleck (SOSP '23): precomputed pipeline templates; a task gets a new layout without the lost node.

    The iteration is repeated; layers are copied from nodes that hold them. Nodes that return are admitted in the same
    way. Idealised: a process's death counts as its node's, which the prototype does not detect at all.
    """

    name = "oobleck"
    shrink_takes = grow_takes = "migrate"


class Varuna(_Shrinking):
    """Varuna (EuroSys '22): job morphing: every change is a restart from a checkpoint, in a new configuration."""

    name = "varuna"
    shrink_takes = grow_takes = "migrate"
    shrink_loses: ClassVar[_Loses] = "checkpoint"
    grow_loses: ClassVar[_Loses] = "checkpoint"


class Bamboo(_Shrinking):
    """Bamboo (NSDI '23): every node computes its neighbour's layers as well, and takes over when it fails.

    Redundancy costs throughput all the time. Idealised: no two neighbours ever fail together.
    """

    name = "bamboo"
    shrink_loses: ClassVar[_Loses] = "nothing"
    grow_takes = "migrate"


class TorchFT(_Shrinking):
    """torchft: a quorum per step over replica groups; the step in which one fails is discarded by all.

    A place is a replica group; it restarts by itself and copies its state from a live peer.
    """

    name = "torchft"


class _InProcess(Policy):
    """NVIDIA's in-process restart: all ranks enter the training function again, without the dead, from a checkpoint.

    Ranks that died stay away. The job is restarted with all healthy places when more than ``extra["tolerated_loss"]``
    of the declared ones are missing, too few are left, or a node has returned.
    """

    name = "inprocess"
    starts_dead: ClassVar[bool] = False

    def reacts(self, now: TaskSituation) -> Reaction:
        if now.nobody_died:
            return Reaction(places=now.alive, seconds=now.costs.takes("continue"), loses="memory")
        missing = now.declared - now.alive
        tolerated = now.costs.extra.get("tolerated_loss", 0.0) * now.declared
        if now.alive >= now.least and missing <= tolerated:
            return Reaction(places=now.alive, seconds=now.costs.takes("continue"), loses="memory")
        return self.resumes(now)

    def grows(self, now: TaskSituation) -> Reaction | None:
        there = min(now.declared, now.whole)
        return Reaction(places=there, seconds=now.costs.takes("restart"), loses="memory")


SYSTEMS: tuple[type[Policy], ...] = (Megatron, Oobleck, Varuna, Bamboo, TorchFT, _InProcess)
