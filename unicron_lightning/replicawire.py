"""What is said of a model that is spread over several workers: who is in which replica, and how it is spread.

Part of `wire`, which is where it is used from.
"""

from __future__ import annotations

import msgspec

from unicron_lightning.fields import Count, Id, Key, Size
from unicron_lightning.message import Message


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica of the model is spread over workers."""

    tensor: Size
    """Tensor-parallel size (TP)."""
    pipeline: Size
    """Pipeline stages (PP)."""

    @property
    def workers(self) -> int:
        """Of a replica."""
        return self.tensor * self.pipeline

    def plain(self) -> dict[str, int]:
        """For events and answers."""
        return {"tp": self.tensor, "pp": self.pipeline}

    def __str__(self) -> str:
        return f"tp={self.tensor}, pp={self.pipeline}"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is spread, and what another layout has to fit."""

    layout: Layout
    ordered: bool
    """Whether the coordinator has said so; else it is the script's."""
    workers: Size
    """Of the declared world."""
    micro_batches: Size
    """M of a global batch."""
    tensor_divides: dict[Key, Count]
    """Sizes of the model, by name, of which TP is a divisor."""
    pipeline_divides: dict[Key, Count]
    """And PP."""


class Replicas(Message, frozen=True, kw_only=True, tag="replicas"):
    """[of one worker for all] Who is in which replica of the model in this epoch; members that are in none are spares.

    ``at_once``: how many replicas may leave at a time without state that nobody else has; None: all but one.
    """

    worker: Id
    epoch: Count
    replicas: list[list[Id]]
    """The workers of each that is whole, oldest first."""
    at_once: Count | None = None
    spread: Spread | None = None
    """None before the model is built."""
