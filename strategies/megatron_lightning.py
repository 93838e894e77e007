"""Uses of the default process group in Lightning 2.6, which under Megatron is that of one epoch's grid."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl

logger = logging.getLogger(__name__)


def keep_to_itself(trainer: pl.Trainer) -> None:
    """Disable two broadcasts over all ranks: before every batch, and in the handler of SIGTERM.

    Spares are in no group, and ranks of broken replicas would hang. A SIGTERM is recorded, as without a process group,
    and handled between steps (`UnicronStrategy.boundary`).
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
    connector: Any = trainer._signal_connector

    def note(number: int, _: FrameType | None) -> None:
        logger.info("signal_noted signal=%s", signal.Signals(number).name)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note


def _nothing() -> None:
    """Replace the broadcast."""
