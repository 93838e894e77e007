"""Which ranks have a connection, and which of two dials; pure.

Rank r is connected to the ranks at distance 1, 2, 4, ... in both directions, modulo the world: at most
2 * ceil(log2(world)) connections. Gathers and broadcasts take ceil(log2(world)) hops over them (Bruck et al., 1997, and
a binomial tree), and sums at most two more. Ranks between which bytes are transferred are connected, too.
"""

from __future__ import annotations


def distances(world: int) -> list[int]:
    """Return 1, 2, 4, ... below ``world``."""
    found, distance = [], 1
    while distance < world:
        found.append(distance)
        distance *= 2
    return found


def peers(rank: int, world: int) -> set[int]:
    """Return the ranks that ``rank`` is connected to."""
    return {(rank + sign * distance) % world for distance in distances(world) for sign in (1, -1)}


def dials(rank: int, peer: int, world: int) -> bool:
    """Whether ``rank`` dials, and ``peer`` accepts: the one behind dials; if both are behind, or none, the lower."""
    apart = set(distances(world))
    forward, backward = (peer - rank) % world in apart, (rank - peer) % world in apart
    return rank < peer if forward == backward else forward
