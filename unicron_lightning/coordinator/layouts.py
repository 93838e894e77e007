"""What is known of how a task's model is spread over workers; a part of `state.Task`. The rules are in `relayout`."""

from __future__ import annotations

import msgspec

from unicron_lightning import wire


class Layouts(msgspec.Struct, kw_only=True):
    """Of one task; nothing but empty for those whose workers hold the whole model."""

    spread: wire.Spread | None = None
    """As workers of this life told last."""
    in_force: wire.Layout | None = None
    """By an operator's order; None: what the script says."""
    ordered: wire.Layout | None = None
    """By an order of which the workers have not written the checkpoint yet."""
    untried: bool = False
    """The life that has just begun is the first one in this layout, and has finished no step yet."""
    before: wire.Layout | None = None
    """What was in force before an untried one."""
