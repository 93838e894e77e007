"""Do the workers of a task agree on what they train? Pure: compares what they say of themselves.

Each worker describes what must be the same on all: a name and a short text for each item. The workers that differ from
most (from the first, where there is no majority) are at fault.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from unicron_lightning.errors import UnicronError

Description = Mapping[str, str]
_SHOWN: Final = 80
"""Characters of a value in an error."""


class WorkersDiffer(UnicronError):
    """This worker does not train what the others train; the message names what differs, and the values."""


class ParametersDiffer(UnicronError):
    """The workers' parameters are not equal any more, and this worker ends by it.

    Attributes:
        stops: whether the task ends with the worker.
    """

    def __init__(self, message: str, *, stops: bool = False) -> None:
        super().__init__(message)
        self.stops = stops


def digest(items: Iterable[object]) -> str:
    """A short text that stands for many items, by their `repr`."""
    return hashlib.blake2b(repr(list(items)).encode(), digest_size=6).hexdigest()


def accepted(descriptions: Sequence[Description]) -> dict[str, str]:
    """The value of each item that most workers have; of several, the first worker's that has one of them."""
    names = dict.fromkeys(name for description in descriptions for name in description)
    found = {}
    for name in names:
        values = [description.get(name, "missing") for description in descriptions]
        number = Counter(values)
        most = max(number.values())
        found[name] = next(value for value in values if number[value] == most)
    return found


def check_agreement(mine: Description, descriptions: Sequence[Description], *, node: str) -> None:
    """Refuses to go on where this worker differs from the others.

    Args:
        mine: of this worker.
        descriptions: of all workers, in rank order.
        node: where this worker is.

    Raises:
        WorkersDiffer: naming each item, this worker's value and the value that is expected.
    """
    expected = accepted(descriptions)
    names = [name for name in dict.fromkeys([*mine, *expected]) if mine.get(name, "missing") != expected.get(name)]
    if not names:
        return
    items = [
        f"{name} is {_short(mine.get(name, 'missing'))}, expected {_short(expected.get(name, 'missing'))}"
        for name in names
    ]
    raise WorkersDiffer(
        f"the worker on node {node} differs from the others of its task: {'; '.join(items)}. All workers of a task run "
        "the same script with the same seed, data and settings"
    )


def odd_ranks(digests: Sequence[float]) -> list[int]:
    """The ranks whose parameters can't be right: those that differ from most; all, where no value is that of most.

    Args:
        digests: of the parameters, by rank; 0.0 of a rank that has made none.
    """
    made = [digest for digest in digests if digest]
    if len(set(made)) <= 1:
        return []
    value, number = Counter(made).most_common(1)[0]
    if 2 * number <= len(made):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest and digest != value]


def check_parameters(odd: Sequence[int], rank: int, nodes: Sequence[str], step: int, *, stops: bool = False) -> None:
    """Ends this worker if its parameters can't be right; its agent starts another, which gets those of the others.

    Args:
        odd: as `odd_ranks` gives them.
        rank: of this worker.
        nodes: of the workers, by rank.
        step: for which the digests were made.
        stops: whether any difference ends all workers, and the task.

    Raises:
        ParametersDiffer: naming the ranks and nodes that differ.
    """
    if not odd or not (stops or rank in odd):
        return
    where = ", ".join(f"rank {other} on node {nodes[other] if nodes else '?'}" for other in odd)
    if len(odd) == len(nodes):
        what = f"the parameters of the {len(nodes)} workers differ ({where}), and no value is that of most"
        follows = "The task starts anew from its newest checkpoint"
    else:
        what = f"the parameters of {where} differ from those of the other {len(nodes) - len(odd)} workers"
        follows = "The worker starts anew with theirs"
    if stops:
        follows = "The task ends, as on_divergence='stop'"
    raise ParametersDiffer(
        f"at step {step} {what}: expected equal ones, bit by bit. {follows}. Look at the node's memory and "
        "accelerator, and for code that changes parameters on some ranks only",
        stops=stops,
    )


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({digest([value])})"
