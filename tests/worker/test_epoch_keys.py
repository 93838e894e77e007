"""The keys of epochs, by which members prove their membership."""

from __future__ import annotations

from typing import Any

from coordinator.driver import World, running, settle


def keys(**limits: Any) -> list[str]:
    """Keys of the epochs of a task that loses two workers, one after the other."""
    world = World(**limits)
    agents = running(world, 3)
    for agent in agents[:2]:
        agent.die(code=1)
        settle(world)
    return [epoch.key for epoch in world.oracles["t"].epochs.values()]


def test_keys_differ_by_epoch_and_by_coordinator() -> None:
    first, second = keys(secret=b"one"), keys(secret=b"two")
    assert len(first) == 3 and len({*first, *second}) == len(first) + len(second)
    assert all(len(key) == 32 for key in first)
    assert keys(secret=b"one") == first, "the machine decides nothing by chance"
