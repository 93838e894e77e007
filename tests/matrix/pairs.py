"""Cases that contain all pairs of values of two axes: a greedy covering array."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

Pair = frozenset[tuple[str, str]]
"""Two axes, each with a value."""
CANDIDATES = 12


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    """The pairs of values in a case."""
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def all_pairs(axes: Mapping[str, Sequence[str]], forbidden: Sequence[Mapping[str, str]]) -> set[Pair]:
    """All pairs of values of two axes but the forbidden ones."""
    pairs: set[Pair] = set()
    for (one, values), (other, others) in itertools.combinations(axes.items(), 2):
        pairs |= {frozenset(((one, a), (other, b))) for a in values for b in others}
    return pairs - {frozenset(pair.items()) for pair in forbidden}


def covering(
    axes: Mapping[str, Sequence[str]], forbidden: Sequence[Mapping[str, str]], seed: int
) -> list[dict[str, str]]:
    """Return cases that contain all pairs; each is the best of some random candidates.

    Args:
        axes: values by axis.
        forbidden: pairs that no case may contain.
        seed: of the candidates.
    """
    picks = random.Random(seed)
    missing = all_pairs(axes, forbidden)
    found: list[dict[str, str]] = []
    while missing:
        candidates = [_candidate(axes, forbidden, missing, picks) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        found.append({axis: best[axis] for axis in axes})
    return found


def _candidate(
    axes: Mapping[str, Sequence[str]],
    forbidden: Sequence[Mapping[str, str]],
    missing: set[Pair],
    picks: random.Random,
) -> dict[str, str]:
    """Start from a missing pair; give the other axes, in random order, the value that adds most missing pairs."""
    case = dict(picks.choice(sorted(sorted(pair) for pair in missing)))
    rest = [axis for axis in axes if axis not in case]
    picks.shuffle(rest)
    for axis in rest:
        allowed = [v for v in axes[axis] if not any(pair.items() <= (case | {axis: v}).items() for pair in forbidden)]
        gains = {v: sum(frozenset(((axis, v), item)) in missing for item in case.items()) for v in allowed}
        most = max(gains.values())
        case[axis] = picks.choice([v for v in allowed if gains[v] == most])
    return case
