import asyncio

import pytest

from unicron_lightning.coordinator import events
from unicron_lightning.coordinator.events import AbsencesDue, TimerFired, TimerKey
from unicron_lightning.coordinator.server import timers as timers_module
from unicron_lightning.coordinator.server.timers import Liveness, Timers
from unicron_lightning.detection import silence
from unicron_lightning.detection.silence import SilenceLimits, outdated


def test_limits_are_renewed_when_the_number_of_agents_has_doubled() -> None:
    limits = SilenceLimits(beat=0.5, least=1.2, most=4.5)
    liveness = Liveness(limits, lambda _: None, Timers(lambda _: None))
    assert not any(liveness.beat(conn) for conn in range(1_001))
    assert not liveness.beat(0), "a thousand agents have the beat of one"
    renewed = {conn for conn in range(1_001, 10_000) if liveness.beat(conn)}
    assert not renewed, "a first beat has the limits of its time"
    assert liveness.beat(0) and not liveness.beat(0)
    assert liveness.beat(1_500) and not liveness.beat(9_999)
    for conn in range(1_000, 10_000):
        liveness.forget(conn)
    assert liveness.beat(0) and not liveness.beat(0), "fewer agents, too"


@pytest.mark.parametrize(("heard", "limit", "lost"), [(True, 60.0, [0]), (False, 60.0, []), (False, 0.2, [0, 1])])
def test_nobody_is_lost_while_nobody_is_heard(
    heard: bool, limit: float, lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the limit of isolation; of two agents one is lost if the other is heard."""
    monkeypatch.setattr(silence, "ISOLATION_SECONDS", limit)

    async def watch() -> tuple[list[int], bool]:
        found: list[int] = []
        timers = Timers(lambda _: None)
        limits = SilenceLimits(beat=0.1, least=0.25, most=0.5)
        liveness = Liveness(limits, found.append, timers)
        for conn in range(2):
            liveness.beat(conn)
        liveness.start()
        for _ in range(75):
            await asyncio.sleep(0.02)
            if heard:
                liveness.heard(1)
        liveness.close()
        return found, timers.excusing()

    found, excused = asyncio.run(watch())
    assert sorted(found) == lost
    assert excused != heard, "those that were away have time to come again"


@pytest.mark.parametrize(("others", "heard", "gives"), [(0, True, True), (1, True, False), (0, False, False)])
def test_a_leader_gives_way_if_all_agents_that_it_has_heard_are_silent(
    others: int, heard: bool, gives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers_module, "GIVES_WAY_SECONDS", 0.6)
    given: list[int] = []

    async def watch() -> None:
        limits, timers = SilenceLimits(beat=0.1, least=0.25, most=0.5), Timers(lambda _: None)
        liveness = Liveness(limits, lambda _: None, timers, lambda: given.append(0))
        liveness.start(awaited=True)
        if heard:
            liveness.beat(0)
        for _ in range(60):
            await asyncio.sleep(0.02)
            for conn in range(1, 1 + others):
                liveness.beat(conn)
        liveness.close()

    asyncio.run(watch())
    assert bool(given) == gives


@pytest.mark.parametrize("awaited", [True, False])
def test_a_process_that_awaits_agents_declares_none_absent_before_it_hears_one(
    awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links that break meanwhile are to blame for it."""
    monkeypatch.setattr(events, "RETURN_SECONDS", 0.3)
    fired: list[TimerFired | AbsencesDue] = []

    async def watch() -> tuple[int, int]:
        timers = Timers(fired.append)
        liveness = Liveness(SilenceLimits(beat=0.1, least=0.25, most=0.5), lambda _: None, timers)
        liveness.start(awaited=awaited)
        timers.set(TimerKey("restore", "task"), 0.1)
        await asyncio.sleep(1.0)
        assert not timers.excusing()
        before = len(fired)
        liveness.heard(0)
        await asyncio.sleep(1.0)
        liveness.close()
        timers.close()
        return before, len(fired)

    assert asyncio.run(watch()) == (0 if awaited else 1, 1)


def test_outdated_limits() -> None:
    def limits(beat: float) -> SilenceLimits:
        return SilenceLimits(beat=beat, least=2 * beat, most=3 * beat)

    assert not outdated(limits(1.0), limits(1.9)) and not outdated(limits(1.9), limits(1.0))
    assert outdated(limits(1.0), limits(2.0)) and outdated(limits(2.0), limits(1.0))
