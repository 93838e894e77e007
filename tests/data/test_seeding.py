"""Random state by place."""

from __future__ import annotations

import random

import numpy
import torch

from unicron_lightning.data.seeding import place_seed, preserved, seed_all, seeded


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_a_place_has_one_seed_and_places_differ() -> None:
    seeds = [place_seed(1, e, s, m) for e in range(3) for s in range(10) for m in range(4)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert place_seed(1, 2, 3) == place_seed(1, 2, 3) != place_seed(2, 2, 3)
    assert place_seed(1, 23) != place_seed(12, 3)


def test_the_seed_is_the_same_on_every_machine() -> None:
    assert place_seed(1, 2, 3, 4) == 9187138123186481832


def test_seeding_covers_all_generators() -> None:
    seed_all(5)
    first = draw()
    seed_all(5)
    assert draw() == first


def test_preserved_and_seeded_leave_the_state_as_it_was() -> None:
    seed_all(1)
    expected = draw()
    seed_all(1)
    with preserved():
        draw()
    with seeded(3, 0, 1):
        inside = draw()
    assert draw() == expected
    with seeded(3, 0, 1):
        assert draw() == inside


def test_seeded_restores_the_state_within_preserved() -> None:
    with preserved():
        seed_all(1)
        expected = draw()
        seed_all(1)
        with seeded(3, 0, 1):
            draw()
        assert draw() == expected


def test_torch_is_seeded_as_by_its_own_function() -> None:
    with preserved():
        torch.manual_seed(2**40 + 7)
        expected = torch.rand(3)
        seed_all(2**40 + 7)
        assert torch.equal(torch.rand(3), expected)
