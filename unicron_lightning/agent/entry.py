"""Target of the entry point ``torchrun.handlers``.

It is loaded by every process that imports ``torch.distributed.elastic``, workers and other back-ends included:
nothing heavy may be imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous handler, which is the agent, for torchrun's options."""
    from unicron_lightning.agent.handler import UnicronRendezvousHandler

    return UnicronRendezvousHandler(parameters)


def get_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator: torch calls the entry point with no arguments and registers the result."""
    return create_handler
