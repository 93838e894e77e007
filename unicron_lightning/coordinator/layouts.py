"""The spread of a task's model over workers; a part of `state.Task`. The rules are in `relayout`."""

from __future__ import annotations

import msgspec

from unicron_lightning import wire


class Layouts(msgspec.Struct, kw_only=True):
    """Layouts of one task; empty for tasks whose workers hold the whole model."""

    spread: wire.Spread | None = None
    """Spread reported last by workers of this life."""
    in_force: wire.Layout | None = None
    """Layout set by an operator's order; None: the script's own layout."""
    ordered: wire.Layout | None = None
    """Layout of an order for which the workers have not written the checkpoint yet."""
    untried: bool = False
    """Whether the present life is the first in this layout and has finished no step yet."""
    before: wire.Layout | None = None
    """Layout in force before an untried one."""
