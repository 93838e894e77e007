"""Checks that the workers of a task train the same thing. Pure: compares the workers' descriptions of themselves.

Each worker describes everything that must be equal on all workers, as a name and a short text for each item. Workers
whose values differ from the most frequent one (from the first worker's, if none is most frequent) are at fault.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from unicron_lightning.errors import UnicronError

Description = Mapping[str, str]
_SHOWN: Final = 80
"""Number of characters of a value that an error shows."""
_KIND: Final = re.compile(r"\w{1,40}\(")


class WorkersDiffer(UnicronError):
    """This worker trains something else than the others; the message contains the items that differ and their
    values.
    """


class ParametersDiffer(UnicronError):
    """The workers' parameters are no longer equal, and this worker ends because of it.

    Attributes:
        stops: whether the task ends with the worker.
    """

    def __init__(self, message: str, *, stops: bool = False) -> None:
        super().__init__(message)
        self.stops = stops


def digest(items: Iterable[object]) -> str:
    """A short digest of many items, by their `repr`."""
    return hashlib.blake2b(repr(list(items)).encode(), digest_size=6).hexdigest()


def accepted(descriptions: Sequence[Description]) -> dict[str, str]:
    """The most frequent value of each item; among equally frequent ones, the one of the lowest rank."""
    names = dict.fromkeys(name for description in descriptions for name in description)
    found = {}
    for name in names:
        values = [description.get(name, "missing") for description in descriptions]
        number = Counter(values)
        most = max(number.values())
        found[name] = next(value for value in values if number[value] == most)
    return found


def check_agreement(mine: Description, descriptions: Sequence[Description], *, node: str) -> None:
    """Reject this worker if it differs from the others.

    Args:
        mine: description of this worker.
        descriptions: of all workers, in rank order.
        node: node of this worker.

    Raises:
        WorkersDiffer: an item differs; the message states this worker's and the expected value of each such item.
    """
    expected = accepted(descriptions)
    names = [name for name in dict.fromkeys([*mine, *expected]) if mine.get(name, "missing") != expected.get(name)]
    if not names:
        return
    pairs = ((name, mine.get(name, "missing"), expected.get(name, "missing")) for name in names)
    items = [f"{name} is {_shown(value, right)}, expected {_shown(right, value)}" for name, value, right in pairs]
    raise WorkersDiffer(
        f"the worker on node {node} differs from the others of its task: {'; '.join(items)}. All workers of a task run "
        "the same script with the same seed, data and settings"
    )


def odd_ranks(digests: Sequence[float]) -> list[int]:
    """The ranks with possibly wrong parameters: those that differ from the majority; all ranks without a majority.

    Args:
        digests: of the parameters, by rank; 0.0 for a rank without a digest.
    """
    made = [digest for digest in digests if digest]
    if len(set(made)) <= 1:
        return []
    value, number = Counter(made).most_common(1)[0]
    if 2 * number <= len(made):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest and digest != value]


def check_parameters(odd: Sequence[int], rank: int, nodes: Sequence[str], step: int, *, stops: bool = False) -> None:
    """Stop this worker if its parameters may be wrong; its replacement receives the other workers' parameters.

    Args:
        odd: result of `odd_ranks`.
        rank: of this worker.
        nodes: of the workers, by rank.
        step: step of the digests.
        stops: whether any difference ends all workers, and the task.

    Raises:
        ParametersDiffer: this rank is odd, or any is and ``stops``; the message contains the odd ranks and their nodes.
    """
    if not odd or not (stops or rank in odd):
        return
    where = ", ".join(f"rank {other} on node {nodes[other] if nodes else '?'}" for other in odd)
    if len(odd) == len(nodes):
        what = f"the parameters of the {len(nodes)} workers differ ({where}), and no value has a majority"
        follows = "The task restarts from its newest checkpoint"
    else:
        what = f"the parameters of {where} differ from those of the other {len(nodes) - len(odd)} workers"
        follows = "The worker is restarted with their parameters"
    if stops:
        follows = "The task ends because of on_divergence='stop'"
    raise ParametersDiffer(
        f"at step {step} {what}: expected bitwise equality. {follows}. Check the node's memory and "
        "accelerator, and for code that changes parameters on some ranks only",
        stops=stops,
    )


def _shown(value: str, other: str) -> str:
    """Shorten a value to its kind, e.g. ``SGD(``, and the part from the word in which it differs from the other."""
    if len(value) <= _SHOWN:
        return value
    pairs = enumerate(zip(value, other, strict=False))
    first = next((place for place, (one, two) in pairs if one != two), min(len(value), len(other)))
    start = 0 if first < _SHOWN // 2 else max(value.rfind(" ", 0, first) + 1, first - _SHOWN // 2)
    part = value[start : start + _SHOWN]
    kind = _KIND.match(value[:start])
    return f"{kind[0] if kind else ''}{'...' if start else ''}{part}{'...' if start + _SHOWN < len(value) else ''}"
