"""Resolution of rewards, and the price of a move.

Rewards are rounded to whole multiples of a quantum, so that sums are exact in any order: ties are exact, the order of
tasks has no effect, and a plan made ahead equals the plan that would be made later. The solver maximises a sum of
*keys*, 64-bit integers:

    key = round(G / quantum)  -  c * moved units,      c > the difference between the rounded rewards of equal plans

F * D_running is rounded by its *increments* from size to size (`search.kernels.keys_of`), by at most 0.75 quanta each,
which keeps concave stretches concave. The rounding error of a plan of n' units on m tasks is hence below 0.75 n' + 0.75
m quanta. Rewards that are equal as real numbers can differ by as much again in floating point, by a quantum for each
task. So among plans of equal reward the one that moves fewest units has the greatest key. In return a plan that moves
one unit less is preferred to one whose reward is up to c quanta greater, about 1e-16 (4 n' + 8 m) of the largest
possible reward: 2e-12 for 6 tasks on 128 units, 6e-11 for 256 tasks on 12,500.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicron_lightning.planner.state import ClusterState

REWARD_BITS = 51
"""Number of bits of any sum of rewards in quanta: floating point is accurate to a quarter of a quantum up to here."""


def move_price(state: ClusterState) -> int:
    """c: quanta that a moved unit costs, a power of two above the difference that rounding makes."""
    num_tasks = len(state.tasks) + len(state.queued)
    return 1 << (2 * (state.num_workers // state.unit) + 4 * num_tasks).bit_length()


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
    needed = math.ldexp(1.0, math.frexp(largest)[1] - REWARD_BITS)
    return state.quantum_flop if state.quantum_flop >= needed else 2 * needed
