"""Messages about models that are spread over several workers: the replicas and the layout."""

from __future__ import annotations

import msgspec

from unicron_lightning.wire.fields import Count, Id, Key, Message, Size


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a replica of the model over workers."""

    tensor: Size
    """Tensor-parallel size (TP), or the number of shards (S)."""
    pipeline: Size
    """Pipeline stages (PP); 1 for shards."""
    sharded: bool = False
    """Whether each parameter is divided into shards (FSDP2)."""

    @property
    def workers(self) -> int:
        """Number of workers of a replica."""
        return self.tensor * self.pipeline

    def plain(self) -> dict[str, int]:
        """The layout for events and answers."""
        return {"shards": self.tensor} if self.sharded else {"tp": self.tensor, "pp": self.pipeline}

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.plain().items())


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The model's present layout, and the constraints on others."""

    layout: Layout
    ordered: bool
    """Whether the coordinator ordered the layout; otherwise it is the script's."""
    workers: Size
    """Workers of the declared world."""
    micro_batches: Size
    """M of a global batch."""
    tensor_divides: dict[Key, Count]
    """Sizes of the model, by name, that TP must divide."""
    pipeline_divides: dict[Key, Count]
    """Sizes of the model, by name, that PP must divide."""


class Replicas(Message, frozen=True, kw_only=True, tag="replicas"):
    """[from one worker for all] The replicas of the model in this epoch; members of none of them are spares.

    ``at_once``: number of replicas that may leave together without the loss of state; None: all but one.
    """

    worker: Id
    epoch: Count
    replicas: list[list[Id]]
    """The workers of each complete replica, oldest first."""
    at_once: Count | None = None
    spread: Spread | None = None
    """None until the model is built."""
