"""Resolution of rewards.

Rewards are rounded to whole multiples of a quantum, so that sums are exact in any order: ties are exact, the order of
tasks has no effect, and a plan made ahead equals the plan that would be made later. The reward and the number of moved
workers form one 64-bit integer, a *key*:

    key = round(G / quantum) * W  -  moved units,      W > any sum of moved units

Among plans of equal reward the one with fewer moved workers thus has the greater key. F * D_running is rounded by its
*increments* from size to size (`search.kernels.keys_of`), by at most 0.75 quanta each, which keeps
concave stretches concave. The rounding error of a plan of n' units on m tasks is hence below 0.75 n' + 0.5 m quanta,
and the chosen plan's value is at most twice this error below the best one's. The quantum is a small power of two: with
the default, this bound, as a share of the largest possible reward of n' units, is below 3e-13 for 6 tasks on 128 units
and below 2e-9 for 256 tasks on 12,500 units.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicron_lightning.planner.state import ClusterState

KEY_BITS = 60
"""Number of bits of any sum of keys, so that differences and the solver's bounds stay within 64 bits."""


def moves_factor(state: ClusterState) -> int:
    """W: a power of two above the number of units that any plan can move.

    A task moves at most as many units as it has or gets, rounded up.
    """
    num_units = -(-max(state.num_workers, sum(state.allocation.values())) // state.unit)
    return 1 << (2 * num_units + 2 * (len(state.tasks) + len(state.queued)) + 2).bit_length()


def choose(state: ClusterState) -> float:
    """The quantum [FLOP]: the given one if it is large enough, else the smallest that leaves room for a doubling.

    A state derived from another keeps its quantum, so that their plans can be compared.
    """
    curves = (*state.tasks, *state.queued)
    per_unit = max((curve.waf_per_unit for curve in curves), default=0.0)
    waf = min(per_unit * (state.num_workers / state.unit), math.fsum(curve.waf_peak for curve in curves))
    had = ((curve, state.allocation.get(curve.task.name, 0)) for curve in state.tasks)
    lost = math.fsum(curve.waf_at(x) * curve.task.longest_seconds for curve, x in had if x)
    largest = waf * state.duration_seconds + lost
    if largest <= 0.0:
        return state.quantum_flop or 1.0
    # Rounding adds up to 0.75 quanta per unit; this room is kept free as well.
    room = (1 << KEY_BITS) // moves_factor(state) - 2 * (state.num_workers // state.unit) - 2 * len(curves)
    needed = math.ldexp(1.0, math.frexp(largest / room)[1])
    return state.quantum_flop if state.quantum_flop >= needed else 2 * needed
