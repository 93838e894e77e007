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


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({digest([value])})"
