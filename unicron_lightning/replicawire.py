"""The message about replicas of a model that is spread over several workers.

Part of `wire`, which is where it is used from.
"""

from __future__ import annotations

from unicron_lightning.message import Message


class Replicas(Message, frozen=True, kw_only=True, tag="replicas"):
    """[of one worker for all] Who is in which replica of the model in this epoch; members that are in none are spares.

    ``at_once``: how many replicas may leave at a time without state that nobody else has; None: all but one.
    """

    worker: str
    epoch: int
    replicas: list[list[str]]
    """The workers of each that is whole, oldest first."""
    at_once: int | None = None
