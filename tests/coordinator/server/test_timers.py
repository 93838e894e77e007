"""Timers: set, replaced, cancelled; grace periods are prolonged after the loop could not run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from unicron_lightning.coordinator import events
from unicron_lightning.coordinator.events import AbsencesDue, TimerFired, TimerKey
from unicron_lightning.coordinator.server import timers
from unicron_lightning.coordinator.server.timers import Timers

Fired = TimerFired | AbsencesDue
Made = tuple[Timers, list[Fired]]
LOST, PLAN = TimerKey("lost", "task", "agent"), TimerKey("plan", "task")
LOST_DUE, PLAN_DUE = AbsencesDue(keys=(LOST,)), TimerFired(key=PLAN)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(events, "RETURN_SECONDS", 1.0)


@pytest.fixture
async def made() -> AsyncIterator[Made]:
    fired: list[Fired] = []
    running = Timers(fired.append)
    yield running, fired
    running.close()


async def test_timers_expire_once_and_are_replaced(made: Made) -> None:
    running, fired = made
    running.set(LOST, 60)
    running.set(LOST, 0.01)
    running.set(PLAN, 0.01)
    running.cancel(PLAN)
    await asyncio.sleep(0.1)
    assert fired == [LOST_DUE]


async def test_a_grace_period_that_ended_during_a_stall_is_prolonged(made: Made) -> None:
    running, fired = made
    running.set(LOST, 0.05)
    running.set(PLAN, 0.05)
    time.sleep(0.5)  # noqa: ASYNC251 - the loop stands still
    await asyncio.sleep(0.1)
    assert fired == [PLAN_DUE]
    running.cancel(LOST)  # the agent has registered
    await asyncio.sleep(1.2)
    assert fired == [PLAN_DUE]


async def test_a_grace_period_that_begins_after_a_stall_is_prolonged_and_ends(made: Made) -> None:
    running, fired = made
    running.stalled()
    running.set(LOST, 0.05)
    await asyncio.sleep(0.3)
    assert fired == []
    await asyncio.sleep(1.0)
    assert fired == [LOST_DUE]


async def test_an_agent_known_to_be_dead_gets_no_allowance(made: Made) -> None:
    running, fired = made
    running.stalled()
    running.set(LOST, 0.05)
    running.expire_now("lost", "task", "another")
    assert fired == []
    running.expire_now("lost", "task", "agent")
    assert fired == [TimerFired(key=LOST)]


async def test_many_that_are_away_get_longer_and_are_lost_together(made: Made) -> None:
    running, fired = made
    away = [TimerKey("lost", "task", f"agent{number}") for number in range(60)]
    for key in away:
        running.set(key, 0.05)
    await asyncio.sleep(0.4)
    assert fired == [], "the coordinator has to take 60 agents in again"
    for key in away[2:]:
        running.cancel(key)
    await asyncio.sleep(0.3)
    assert fired == [AbsencesDue(keys=tuple(away[:2]))]
