"""The agent's first message on each connection: all data that a coordinator without state needs to continue."""

from __future__ import annotations

import os

from unicron_lightning import wire
from unicron_lightning.agent.options import AgentOptions
from unicron_lightning.agent.roster import Roster
from unicron_lightning.agent.view import RoundView


def registration(
    options: AgentOptions, view: RoundView, roster: Roster, reading: wire.NodeReading | None, secret: str
) -> wire.Register:
    """Describe the agent and its workers as of now."""
    return wire.Register(
        protocol=wire.PROTOCOL_VERSION,
        task=options.task,
        agent=options.agent,
        node=options.node,
        host=options.host,
        pid=os.getpid(),
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        round=view.number,
        waiting=view.waiting,
        granted=view.grant is not None and not view.grant.warm,
        store=view.store,
        local_world=view.local_world,
        workers=roster.infos(),
        epoch=roster.epoch,
        slot=options.slot,
        weight=options.weight,
        warm=view.grant is not None and view.grant.warm,
        reading=reading,
        secret=secret,
    )
