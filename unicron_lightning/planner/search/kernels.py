"""Loops of the solver: keys of options, their upper hulls, the price of a unit, and the relevant options.

Everything is exact in 64-bit integers. With a price p >= 0 per unit, a plan with keys g_i and units k_i, at most N, has

    sum g_i  <=  p N + sum max_k (g_i(k) - p k)  -  sum r_i(k_i),    r_i(k) = max_k' (g_i(k') - p k') - (g_i(k) - p k)

An option whose reduced cost r_i(k) exceeds the distance between the bound and a known plan is in no plan that is as
good (Lagrangian relaxation; Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", European Journal
of Operational Research 83, 1995, removes options in this way). The price is the least at which the tasks take no more
than N units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search.compiler import compilable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

STICKY = 0.75
"""Largest difference, in quanta, between successive increments of F * D that are rounded to the same number."""


@compilable
def keys_of(
    workers: Ints,
    waf: NDArray[np.float64],
    layouts: Ints,
    scale: float,
    cost: int,
    before: int,
    left: int,
    unit: int,
    price: int,
    may_pause: bool,
    layout: int,
    cost_elsewhere: int,
) -> tuple[Ints, Ints]:
    """Units and key of each option of a task.

    Args:
        workers: int64 [n], rising.
        waf: float64 [n], F at each number of workers.
        layouts: int64 [n], a number for TP x PP of each, 0 if unknown; or empty if it is of no concern.
        scale: D_running / quantum.
        cost: F(t,x) * D_transition in quanta.
        before: x, the number of workers that is kept without cost; -1 if the task is affected.
        left: number of workers that the task still has.
        unit: workers per unit.
        price: quanta that a moved unit costs.
        may_pause: whether zero workers are an option.
        layout: a number for TP x PP of the task's x workers; 0 if unknown.
        cost_elsewhere: ``cost`` of a change into another TP x PP.
    """
    first = 1 if may_pause else 0
    units = np.zeros(first + len(workers), dtype=np.int64)
    keys = np.zeros(first + len(workers), dtype=np.int64)
    if may_pause:
        keys[0] = -price * ((left + unit - 1) // unit) - (cost if before != 0 else 0)
    value = 0
    increment = 0
    reached = 0.0
    for n in range(len(workers)):
        exact = waf[n] * scale
        step = exact - reached
        # Repeating the increment keeps a straight line straight and a concave curve concave.
        if n == 0 or abs(step - increment) > STICKY:
            increment = int(np.rint(step))
        reached = exact
        value += increment
        moved = abs(workers[n] - left)
        units[first + n] = workers[n] // unit
        gain = value - (cost if workers[n] != before else 0)
        if layout != 0 and len(layouts) > 0 and layouts[n] != 0 and layouts[n] != layout:
            gain = value - cost_elsewhere
        keys[first + n] = gain - price * ((moved + unit - 1) // unit)
    return units, keys


@compilable
def steeper(gain: int, width: int, other_gain: int, other_width: int) -> bool:
    """Whether gain / width > other_gain / other_width, exactly and without leaving 64 bits."""
    product, other = float(gain) * other_width, float(other_gain) * width
    margin = 1e-12 * (abs(product) + abs(other))
    if product > other + margin:
        return True
    if product < other - margin:
        return False
    whole, other_whole = gain // width, other_gain // other_width
    if whole != other_whole:
        return whole > other_whole
    return (gain - whole * width) * other_width > (other_gain - other_whole * other_width) * width


@compilable
def hulls(starts: Ints, units: Ints, keys: Ints) -> tuple[Ints, Ints]:
    """The upper hull of each column, as indices of options: where its vertices start, and the vertices."""
    hull_starts = np.zeros(len(starts), dtype=np.int64)
    vertices = np.empty(len(units), dtype=np.int64)
    top = 0
    for i in range(len(starts) - 1):
        bottom = top
        for n in range(starts[i], starts[i + 1]):
            while top - bottom >= 2:
                b, a = vertices[top - 1], vertices[top - 2]
                if steeper(keys[b] - keys[a], units[b] - units[a], keys[n] - keys[b], units[n] - units[b]):
                    break
                top -= 1
            vertices[top] = n
            top += 1
        hull_starts[i + 1] = top
    return hull_starts, vertices[:top].copy()


@compilable
def best_vertex(first: int, end: int, vertices: Ints, units: Ints, keys: Ints, price: int) -> int:
    """The first of the vertices [first, end) with the greatest key - price * units."""
    low, high = first, end - 1
    while low < high:
        middle = (low + high) // 2
        a, b = vertices[middle], vertices[middle + 1]
        if keys[b] - keys[a] > price * (units[b] - units[a]):
            low = middle + 1
        else:
            high = middle
    return low


@compilable
def halve(
    vertices: Ints, units: Ints, keys: Ints, price: int, num_units: int, lows: Ints, highs: Ints, at: Ints, taken: int
) -> bool:
    """Narrow the best vertices of some columns to those at prices up to ``price``, or above it.

    Args:
        vertices: see `hulls`.
        units: of each option.
        keys: of each option.
        price: per unit.
        num_units: N.
        lows: int64, the first vertex in question of each column; narrowed here.
        highs: int64, the last one; narrowed here.
        at: int64, overwritten.
        taken: units of all other columns.

    Returns:
        Whether all columns together take at most N units at ``price``.
    """
    for i in range(len(lows)):
        at[i] = best_vertex(lows[i], highs[i] + 1, vertices, units, keys, price)
        taken += units[vertices[at[i]]]
    fits = bool(taken <= num_units)
    if fits:
        lows[:] = at[: len(lows)]
    else:
        highs[:] = at[: len(lows)]
    return fits


@compilable
def find_price(
    hull_starts: Ints,
    vertices: Ints,
    units: Ints,
    keys: Ints,
    num_tasks: int,
    skip: int,
    own: int,
    num_units: int,
    most: int,
    near: int,
) -> tuple[int, int, int]:
    """Find the least price, up to ``most``, at which tasks [0, num_tasks) without ``skip``, and column ``own``, take no
    more than N units.

    The vertices that a column can take are narrowed with the price, so that most columns are soon settled.

    Args:
        hull_starts: see `hulls`.
        vertices: see `hulls`.
        units: of each option.
        keys: of each option.
        num_tasks: number of the tasks' columns.
        skip: column to leave out; -1 if none.
        own: further column.
        num_units: N.
        most: highest price.
        near: a guess of the price; -1 if none.

    Returns:
        The price, the bound on the sum of keys, and the sum of keys of the tasks' choice, which is a plan. The price is
        -1 and the rest meaningless if the tasks take more units even at ``most``.
    """
    tasks = np.arange(num_tasks + 1)
    tasks[num_tasks] = own
    tasks = tasks[tasks != skip]
    lows, highs, at = hull_starts[tasks], hull_starts[tasks + 1] - 1, np.empty(len(tasks), dtype=np.int64)
    if not halve(vertices, units, keys, most, num_units, lows, highs, at, 0):
        return -1, 0, 0
    low, high, taken, value = 0, most, 0, 0
    guessed = 0 <= near < most
    middle, stride = (near, max(1, near >> 20)) if guessed else (most // 2, 0)
    below = True
    while low < high:
        fits = halve(vertices, units, keys, middle, num_units, lows, highs, at, taken)
        if fits:
            high = middle
        else:
            low = middle + 1
        count = 0
        for i in range(len(lows)):
            if lows[i] < highs[i]:
                lows[count], highs[count] = lows[i], highs[i]
                count += 1
            else:
                taken += units[vertices[lows[i]]]
                value += keys[vertices[lows[i]]]
        lows, highs = lows[:count], highs[:count]
        if not count:
            break
        below = fits if guessed else below
        guessed = False
        if stride and fits == below:  # away from the guess in growing strides, until the price is passed
            middle = max(low, high - stride) if fits else min(high - 1, low + stride)
            stride = min(8 * stride, 1 << 58)
        else:
            middle, stride = (low + high) // 2, 0
    for i in range(len(lows)):
        taken += units[vertices[lows[i]]]
        value += keys[vertices[lows[i]]]
    return low, value + low * (num_units - taken), value


@compilable
def near_hull(
    hull_starts: Ints,
    vertices: Ints,
    starts: Ints,
    units: Ints,
    keys: Ints,
    prices: Ints,
    spreads: Ints,
    limits: Ints,
    mask: NDArray[np.bool_],
) -> None:
    """Mark each option whose reduced cost can be within its column's limit at a price near its column's.

    The best key - price * units is convex in the price. So if the best option k* at a price p has r(k) = 0, then at p +
    d the reduced cost of another option k is at least r(k) - abs(d) abs(k - k*).

    Args:
        hull_starts: see `hulls`.
        vertices: see `hulls`.
        starts: index of each column's first option.
        units: of each option.
        keys: of each option.
        prices: p of each column.
        spreads: the largest abs(d) of each column.
        limits: the largest reduced cost of each column.
        mask: of each option; set here.
    """
    for i in range(len(starts) - 1):
        price, spread, limit = prices[i], spreads[i], limits[i]
        best = vertices[best_vertex(hull_starts[i], hull_starts[i + 1], vertices, units, keys, price)]
        top_key, top_units = keys[best], units[best]
        for n in range(starts[i], starts[i + 1]):
            more = units[n] - top_units
            if top_key - keys[n] + price * more <= limit + spread * abs(more):
                mask[n] = True


@compilable
def mark(
    hull_starts: Ints,
    vertices: Ints,
    units: Ints,
    keys: Ints,
    first_column: int,
    end_column: int,
    skip: int,
    price: int,
    most_cost: int,
    mask: NDArray[np.bool_],
    marked: int,
    most_marked: int,
) -> int:
    """Mark the options of some columns whose reduced cost at ``price`` is at most ``most_cost``.

    Args:
        hull_starts: see `hulls`.
        vertices: see `hulls`.
        units: of each option.
        keys: of each option.
        first_column: the first column.
        end_column: the column after the last one.
        skip: column to leave out; -1 if none.
        price: per unit.
        most_cost: the largest reduced cost.
        mask: of each option; set here.
        marked: number of options marked before.
        most_marked: number of marked options beyond which marking stops.

    Returns:
        Number of marked options, including ``marked`` from before; above ``most_marked`` if marking was stopped.
    """
    for task in range(first_column, end_column):
        if task == skip:
            continue
        first, end = hull_starts[task], hull_starts[task + 1]
        best = best_vertex(first, end, vertices, units, keys, price)
        top_key, top_units = keys[vertices[best]], units[vertices[best]]
        # The hull's own reduced cost rises to both sides of the best vertex, and no option is above the hull.
        left = best
        while left > first:
            n = vertices[left]
            if top_key - keys[n] + price * (units[n] - top_units) > most_cost:
                break
            left -= 1
        right = best
        while right < end - 1:
            n = vertices[right]
            if top_key - keys[n] + price * (units[n] - top_units) > most_cost:
                break
            right += 1
        for n in range(vertices[left], vertices[right] + 1):
            if not mask[n] and top_key - keys[n] + price * (units[n] - top_units) <= most_cost:
                mask[n] = True
                marked += 1
        if marked > most_marked:
            return marked
    return marked
