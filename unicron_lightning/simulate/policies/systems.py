"""The systems that recover each task by itself. Their times are in the costs; their behaviour is here.

Facts are from their papers and sources; a system is idealised only in its favour, and its docstring states it.
"""

from __future__ import annotations

from typing import ClassVar

from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.policies.policy import Loses, Policy, Reaction, Restarting, Shrinking, TaskSituation


class Megatron(Restarting):
    """Megatron-LM in its usual operation: a collective's time-out, then a restart from the last persistent checkpoint.

    A task needs all its nodes. A spare node replaces one that is down, else the task waits for the repair.
    """

    name = "megatron"


class Oobleck(Shrinking):
    """Oobleck (SOSP '23): precomputed pipeline templates; a task gets a new layout without the lost node.

    The iteration is repeated; layers are copied from nodes that hold them. Nodes that return are admitted in the same
    way. Idealised: a process's death counts as its node's, which the prototype does not detect at all.
    """

    name = "oobleck"

    def shrink_seconds(self, costs: Costs) -> float:
        return costs.takes("migrate")

    def grow_seconds(self, costs: Costs) -> float:
        return costs.takes("migrate")


class Varuna(Shrinking):
    """Varuna (EuroSys '22): job morphing: every change is a restart from a checkpoint, in a new configuration."""

    name = "varuna"
    shrink_loses: ClassVar[Loses] = "checkpoint"
    grow_loses: ClassVar[Loses] = "checkpoint"

    def shrink_seconds(self, costs: Costs) -> float:
        return costs.takes("migrate")

    def grow_seconds(self, costs: Costs) -> float:
        return costs.takes("migrate")


class Bamboo(Shrinking):
    """Bamboo (NSDI '23): every node computes its neighbour's layers as well, and takes over when it fails.

    Redundancy costs throughput all the time. Idealised: no two neighbours ever fail together.
    """

    name = "bamboo"
    shrink_loses: ClassVar[Loses] = "nothing"

    def grow_seconds(self, costs: Costs) -> float:
        return costs.takes("migrate")


class TorchFT(Shrinking):
    """torchft: a quorum per step over replica groups; the step in which one fails is discarded by all.

    A place is a replica group; it restarts by itself and copies its state from a live peer.
    """

    name = "torchft"


class InProcess(Policy):
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


SYSTEMS: tuple[type[Policy], ...] = (Megatron, Oobleck, Varuna, Bamboo, TorchFT, InProcess)
