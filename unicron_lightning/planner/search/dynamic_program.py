"""Loops of the dynamic program: tables of the best sums of keys, and the plans behind them.

    S(i,j) = max over k <= j of  S(i-1, j-k) + key_i(k)             the paper's recursion, at most j units in all

Row i of the *prefix* table covers the tasks before i, row i of the *suffix* table the tasks from i on. A row is kept
only for a window of j, ``low`` to ``high``. Smaller budgets are infeasible or leave more than the other tasks can use;
larger ones have the value at ``high``.

The loops are interpreted until a problem is large. A plan for 128 units and 6 tasks takes 4 ms interpreted. Importing
numba takes most of a second, and compiling several, once per machine. Large problems take minutes interpreted, and
milliseconds compiled.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from unicron_lightning.planner.arrays import IntArray


logger = logging.getLogger(__name__)


Function = TypeVar("Function", bound=Callable[..., Any])

INTERPRETED: Final = 8192
"""Largest number of units x tasks that is planned interpreted: at most 0.3 s, with the plans made ahead 0.6 s."""

_LOCK = threading.Lock()
_INTERPRETED: list[Callable[..., Any]] = []
_REPORTED: list[int] = []


def compilable(function: Function) -> Function:
    """Register a function of a module, which other modules must call as an attribute of that module."""
    _INTERPRETED.append(function)
    return function


def prepare(size: int) -> None:
    """Compile all registered functions if a problem is large.

    Without numba it warns once, and everything stays interpreted.

    Args:
        size: units x tasks.
    """
    if size <= INTERPRETED or not _INTERPRETED or compile_all() or _REPORTED:
        return
    _REPORTED.append(size)
    logger.warning(
        "planning_is_interpreted units_x_tasks=%d: plans of this size can take minutes without numba; "
        "install unicron-lightning[plan]",
        size,
    )


def compile_all() -> bool:
    """Replace the registered functions in their modules by compiled ones; return False without numba."""
    with _LOCK:
        if _INTERPRETED and importlib.util.find_spec("numba") is None:
            return False
        while _INTERPRETED:
            function: Any = _INTERPRETED[0]
            setattr(sys.modules[function.__module__], function.__name__, machine_code(function))
            del _INTERPRETED[0]
    return True


def machine_code(function: Function) -> Function:
    """Compile a function at its first call; cache the code on disk for other processes.

    If neither the installed package nor the user's cache folder is writable, every process compiles for itself. The
    code runs without the interpreter's lock: planning ahead does not stop other threads.
    """
    import numba

    try:
        made = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = numba.njit(nogil=True)(function)
    return cast("Function", made)


NEVER = -(1 << 62)
"""Value of an infeasible entry."""

_LONG_RUN = 96
"""Number of options in a concave stretch from which on exploiting the concavity pays."""

LOOKS = 32
"""Options per budget up to which it pays to look for one that cannot be improved, instead of at all of them."""

_BLOCK = 2048
"""Entries of a row that are processed at once: two such blocks fit into a processor's first cache."""


@compilable
def add_options(row: IntArray, low: int, units: IntArray, keys: IntArray, out: IntArray, out_low: int) -> None:
    """out(j) = max(out(j), row(j - k) + key) for each option, in O(options x window)."""
    for block in range(0, len(out), _BLOCK):
        block_end = min(len(out), block + _BLOCK)
        for n in range(len(units)):
            shift = units[n] + low - out_low
            first, end = max(block, shift), min(block_end, shift + len(row))
            if first < end:
                source, target, key = row[first - shift : end - shift], out[first:end], keys[n]
                for j in range(end - first):
                    target[j] = max(target[j], source[j] + key)


@compilable
def add_concave(
    row: IntArray, low: int, units: IntArray, keys: IntArray, step: int, out: IntArray, out_low: int
) -> None:
    """Do as `add_options` for options ``step`` apart with concave keys, in O((options + window) log window).

    The best entry of ``row`` for out(j) rises with j within a residue class modulo ``step`` (the matrix row(l) + key(j
    - l)
    is inverse Monge where it is defined), so the best entries of every second j bound those in between.
    """
    count = len(units)
    base = low + units[0] - out_low  # row[c] with option t is for out[base + c + step * t]
    best = np.empty(len(out) // step + 3, dtype=np.int64)
    for residue in range(min(step, len(row))):
        columns = (len(row) - residue + step - 1) // step
        # out[base + residue + step * q]  =  row[residue + step * c] + keys[q - c],   0 <= q - c < count
        offset = base + residue
        q_first = max(0, (-offset + step - 1) // step)
        q_end = min(columns + count - 1, (len(out) - offset + step - 1) // step)
        num = q_end - q_first
        if num <= 0:
            continue
        stride = 1
        while stride < num:
            stride *= 2
        while stride >= 1:
            for n in range(stride - 1, num, 2 * stride):
                q = q_first + n
                c_from = max(0, q - count + 1)
                c_to = min(columns - 1, q)
                if n >= stride:
                    c_from = max(c_from, best[n - stride])
                if n + stride < num:
                    c_to = min(c_to, best[n + stride])
                top, at = NEVER, c_from
                for c in range(c_from, c_to + 1):
                    value = row[residue + step * c] + keys[q - c]
                    if value > top:
                        top, at = value, c
                best[n] = at
                j = offset + step * q
                out[j] = max(out[j], top)
            stride //= 2


@compilable
def _add_line(row: IntArray, low: int, units: IntArray, keys: IntArray, out: IntArray, out_low: int) -> None:
    """Do as `add_options` for options whose keys are on one line: the faster, the more sums are equal.

    With row'(l) = row(l) - slope l, an option k gives out(j) = row'(j - k) + constant + slope j: only row' depends on
    k, so an option that reaches the largest row' is a best one. Where few do, `add_options` does the rest.
    """
    count, size = len(units), len(row)
    slope = (keys[count - 1] - keys[0]) // (units[count - 1] - units[0])
    base = keys[0] - slope * units[0]
    level = np.empty(size, dtype=np.int64)
    largest = np.empty(size, dtype=np.int64)
    for c in range(size):
        level[c] = row[c] - slope * (low + c) if row[c] > NEVER // 2 else NEVER
        largest[c] = level[c] if c == 0 else max(level[c], largest[c - 1])
    looks = LOOKS * len(out)
    begin = 0
    for j in range(len(out)):
        most = out_low + j - low  # index in the row of the budget that is left if this task takes no unit
        if most < units[0]:
            continue
        top = largest[min(size - 1, most - units[0])]
        while begin < count and most - units[begin] >= size:
            begin += 1
        best = NEVER
        for n in range(begin, count):
            looks -= 1
            if units[n] > most or best == top:
                break
            best = max(best, level[most - units[n]])
        if best != NEVER:
            out[j] = max(out[j], best + base + slope * (out_low + j))
        if looks < 0:
            add_options(row, low, units, keys, out[j + 1 :], out_low + j + 1)
            return


@compilable
def add_rest(row: IntArray, low: int, units: IntArray, keys: IntArray, out: IntArray, out_low: int) -> None:
    """Do as `add_options`, with `_add_line` if nearly all keys are on one line."""
    count = len(units)
    if count >= _LONG_RUN:
        a, b = count // 3, 2 * count // 3
        width, rise = units[b] - units[a], keys[b] - keys[a]
        on_line = keys - keys[a] == rise // width * (units - units[a])
        if rise % width == 0 and 10 * np.sum(on_line) > 9 * count:
            _add_line(row, low, units[on_line], keys[on_line], out, out_low)
            add_options(row, low, units[~on_line], keys[~on_line], out, out_low)
            return
    add_options(row, low, units, keys, out, out_low)


@compilable
def extend(row: IntArray, low: int, units: IntArray, keys: IntArray, out: IntArray, out_low: int) -> None:
    """Compute one step of the recursion: ``out`` is the row with one more task, whose options are given."""
    out[:] = NEVER
    high = low + len(row) - 1
    for n in range(len(units)):
        if high + units[n] < out_low:  # even if the others use all they can, more than this is left
            out[0] = max(out[0], row[len(row) - 1] + keys[n])
    begin = 0
    pending = 0
    while begin < len(units):
        end = begin + 1
        step = units[end] - units[begin] if end < len(units) else 1
        while (
            end < len(units)
            and units[end] - units[end - 1] == step
            and (end - begin < 2 or keys[end] - keys[end - 1] <= keys[end - 1] - keys[end - 2])
        ):
            end += 1
        if end - begin >= _LONG_RUN:
            add_rest(row, low, units[pending:begin], keys[pending:begin], out, out_low)
            add_concave(row, low, units[begin:end], keys[begin:end], step, out, out_low)
            pending = end
        begin = end
    add_rest(row, low, units[pending:], keys[pending:], out, out_low)
    for j in range(1, len(out)):
        out[j] = max(out[j], out[j - 1])


@compilable
def fill(
    starts: IntArray,
    units: IntArray,
    keys: IntArray,
    first: int,
    last: int,
    lows: IntArray,
    row_starts: IntArray,
    values: IntArray,
) -> None:
    """Fill the rows after ``first`` up to ``last``, each from the one before.

    Args:
        starts: int64, index of each task's first option.
        units: of each option.
        keys: of each option.
        first: the row that is already filled.
        last: the last row to fill; below ``first`` for rows of the suffix table, downwards.
        lows: the first j of each row's window.
        row_starts: index of each row's first entry in ``values``, and the end of the last row.
        values: the rows, one after another.
    """
    direction = 1 if last >= first else -1
    for _ in range(abs(last - first)):
        task = first if direction == 1 else first - 1
        options = slice(starts[task], starts[task + 1])
        row = values[row_starts[first] : row_starts[first + 1]]
        first += direction
        out = values[row_starts[first] : row_starts[first + 1]]
        extend(row, lows[first - direction], units[options], keys[options], out, lows[first])


@compilable
def combine(
    before: IntArray, before_low: int, after: IntArray, after_low: int, units: IntArray, keys: IntArray, num_units: int
) -> tuple[int, int, int]:
    """Best combination of one option of a task, a row of the tasks before it, and a row of those after it; N units in
    all.

    Returns:
        The sum of keys, ``NEVER`` if nothing is feasible; the index of the best option with fewest units; and the
        largest budget of the tasks before it.
    """
    top, option, budget = NEVER, -1, -1
    before_high, after_high = before_low + len(before) - 1, after_low + len(after) - 1
    for n in range(len(units)):
        rest = num_units - units[n]
        for j in range(min(before_high, rest - after_low), before_low - 1, -1):
            value = before[j - before_low] + after[min(rest - j, after_high) - after_low] + keys[n]
            if value > top:
                top, option, budget = value, n, j
    return top, option, budget


@compilable
def trace(
    starts: IntArray,
    units: IntArray,
    keys: IntArray,
    row: int,
    last: int,
    budget: int,
    lows: IntArray,
    row_starts: IntArray,
    values: IntArray,
    found: NDArray[np.int32],
    chosen: IntArray,
) -> int:
    """Find the options behind the value of ``row`` with ``budget``.

    Among equals, each task in turn takes fewest units in a prefix table, where the last comes first, and most units in
    a suffix table: earlier tasks come off best in both.

    Args:
        starts: as in `fill`, like ``units``, ``keys``, ``lows``, ``row_starts`` and ``values``.
        units: of each option.
        keys: of each option.
        row: first row.
        last: the row without tasks.
        budget: units.
        lows: of each row.
        row_starts: of each row.
        values: of all rows.
        found: int32, like ``values``: one more than the number of the option within its task that earlier calls found
            for a budget within the window, 0 if none did. Plans of several variants have most of their ends in common.
        chosen: int64 [num_tasks]; output for the units of the tasks between the rows.

    Returns:
        Number of units of these tasks; -1 if the tables are inconsistent.
    """
    direction = 1 if last >= row else -1
    total = 0
    while row != last:
        task = row if direction == 1 else row - 1
        first, count = starts[task], starts[task + 1] - starts[task]
        high = lows[row] + row_starts[row + 1] - row_starts[row] - 1
        at = row_starts[row] + min(budget, high) - lows[row]
        target = values[at]
        row += direction
        low, start = lows[row], row_starts[row]
        known = found[at] - 1 if budget <= high else -1
        if known < 0:
            high_after = low + row_starts[row + 1] - start - 1
            for m in range(count):
                n = count - 1 - m if direction == 1 else m
                left = min(budget - units[first + n], high_after)
                if left >= low and values[start + left - low] + keys[first + n] == target:
                    known = n
                    break
            if known < 0:
                return -1
            if budget <= high:
                found[at] = known + 1
        chosen[task] = units[first + known]
        total += chosen[task]
        budget -= chosen[task]
    return total
