"""The threshold of silence follows the regularity of a connection."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from unicron_lightning.detection.silence import ISOLATION_SECONDS, NOT_ISOLATED, Lateness, Silence, SilenceLimits, ended

LIMITS = SilenceLimits(beat=0.5, least=1.2, most=4.5)


def after(*gaps: float) -> tuple[Silence, float]:
    now = 100.0
    silence = Silence(LIMITS, now)
    silence.beat(now)
    for gap in gaps:
        now += gap
        assert not silence.is_end(now), f"a false alarm after {gap} s, threshold {silence.threshold}"
        silence.beat(now)
    return silence, now


def test_a_quiet_connection_is_given_up_within_two_seconds_once_it_is_known_to_be_quiet() -> None:
    silence, now = after(*[0.5] * 100)
    assert not silence.is_end(now + 1.0)
    assert silence.is_end(now + 1.5)


def test_one_that_is_not_known_yet_has_more_time_but_less_than_five_seconds() -> None:
    silence, now = after(*[0.5] * 5)
    assert not silence.is_end(now + 3.0)
    assert silence.is_end(now + 4.6)
    assert Silence(LIMITS, 0.0).is_end(4.6)


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_machine_raises_no_alarm(seed: int) -> None:
    """Beats late by up to a second, and occasional stalls of up to 2.8 s."""
    chance = random.Random(seed)
    gaps = [0.5 + chance.random() for _ in range(30)]
    for _ in range(40):
        gaps += [0.5 + chance.random() for _ in range(20)] + [chance.uniform(1.5, 2.8)]
    silence, now = after(*gaps)
    assert silence.is_end(now + LIMITS.most + 0.1)


def test_a_stall_is_remembered_and_forgotten() -> None:
    silence, now = after(*[0.5] * 60, 1.1, *[0.5] * 100)
    assert silence.threshold > 1.4
    silence, _ = after(*[0.5] * 60, 1.1, *[0.5] * 5000)
    assert silence.threshold == LIMITS.least
    assert now > 0


def test_what_this_side_could_not_hear_is_excused() -> None:
    silence, now = after(*[0.5] * 100)
    late = Lateness(0.1, now)
    assert late.fired(now + 0.1) == pytest.approx(0.0)
    assert late.fired(now + 10.2) == pytest.approx(10.0)
    silence.excuse(10.0, now + 10.2)
    assert not silence.is_end(now + 10.2)
    silence.beat(now + 10.3)
    assert silence.threshold == LIMITS.least, "its own stall is not the other's"


def test_when_most_fall_silent_together_this_side_is_suspected() -> None:
    now = 100.0 + 50.0
    quiet = {key: after(*[0.5] * 100)[0] for key in "abcd"}
    assert dead(quiet, now + 2.0) == []
    assert dead(quiet, now + 4.6) == list("abcd")
    for key in "abc":
        quiet[key].beat(now + 1.9)
    assert dead(quiet, now + 2.0) == ["d"]
    assert dead({"a": quiet["d"]}, now + 2.0) == ["a"], "alone it has nobody to be compared with"


def dead(peers: Mapping[str, Silence], now: float) -> list[str]:
    """Return the dead of peers beside which another is heard."""
    return ended(peers, LIMITS, now, heard=now, isolated_until=NOT_ISOLATED)[0]


def test_when_none_is_heard_this_side_is_isolated() -> None:
    now = 150.0
    quiet = {"a": after(*[0.5] * 100)[0]}
    for seconds, heard, until, found in (
        (1.0, 0.0, NOT_ISOLATED, ([], NOT_ISOLATED)),
        (5.0, 0.0, NOT_ISOLATED, ([], now + 5.0 + ISOLATION_SECONDS)),
        (5.0, 4.9, NOT_ISOLATED, (["a"], NOT_ISOLATED)),
        (5.0, 4.9, now + 100.0, (["a"], NOT_ISOLATED)),
        (100.1, 0.0, now + 100.0, (["a"], now + 100.0)),
    ):
        assert ended(quiet, LIMITS, now + seconds, heard=now + heard, isolated_until=until) == found
