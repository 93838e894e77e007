"""Checks that the workers of a task train the same thing: comparisons of descriptions, and digests of their states.

Each worker describes everything that must be equal on all workers, as a name and a short text for each item. Workers
whose values differ from the most frequent one (from the first worker's, if none is most frequent) are at fault.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import torch
from torch import Tensor

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


def odd_ranks(digests: Sequence[float], joined: Collection[int] = ()) -> list[int]:
    """The ranks with a possibly wrong state: those that differ from the majority; all ranks without a majority.

    Args:
        digests: of the state, by rank; 0.0 for a rank without a digest.
        joined: ranks that have just joined: the others decide what is right.
    """
    made = [digest for rank, digest in enumerate(digests) if digest and rank not in joined]
    made = made or [digest for digest in digests if digest]
    if len({digest for digest in digests if digest}) <= 1:
        return []
    value, number = Counter(made).most_common(1)[0]
    if 2 * number <= len(made):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest and digest != value]


def odd_holders(digests: Sequence[float], parts: Sequence[Sequence[int]], joined: Collection[int] = ()) -> list[int]:
    """`odd_ranks` of a model in parts: those that differ from the majority of their part's holders; all ranks if a part
    has no majority.

    Args:
        digests: of each rank's part.
        parts: the ranks that hold each part.
        joined: as for `odd_ranks`.
    """
    found: set[int] = set()
    for holders in parts:
        late = [place for place, rank in enumerate(holders) if rank in joined]
        odd = odd_ranks([digests[rank] for rank in holders], late)
        if odd and len(odd) == len(holders):
            return list(range(len(digests)))
        found.update(holders[place] for place in odd)
    return sorted(found)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The workers whose state differs, and where.

    Attributes:
        odd: result of `odd_ranks`.
        joined: ranks that have just joined.
        first: name of the first part of the state that is not equal on all workers.
    """

    odd: Sequence[int]
    joined: Collection[int]
    first: str


def first_unequal(parts: Sequence[Mapping[str, int]]) -> str:
    """Return the name of the first part that is not equal on all ranks that have it, or else that some rank lacks;
    empty if there is none.

    Args:
        parts: of the ranks' states, see `digest.StateDigest`; empty for a rank without a digest.
    """
    made = [each for each in parts if each]
    names = dict.fromkeys(name for each in made for name in each)
    unequal = (name for name in names if len({each[name] for each in made if name in each}) > 1)
    lacking = (name for name in names if any(name not in each for each in made))
    return next(chain(unequal, lacking), "")


def check_parameters(
    difference: Difference | None, rank: int, nodes: Sequence[str], step: int, *, stops: bool = False
) -> None:
    """Stop this worker if its state may be wrong; its replacement receives the other workers' state.

    Args:
        difference: found in a step; None without one.
        rank: of this worker.
        nodes: of the workers, by rank.
        step: step of the digests.
        stops: whether any difference ends all workers, and the task.

    Raises:
        ParametersDiffer: this rank is odd, or any is and ``stops``; the message contains the odd ranks and their nodes.
    """
    if difference is None or not (stops or rank in difference.odd):
        return
    odd = difference.odd
    where = ", ".join(f"rank {other} on node {nodes[other] if nodes else '?'}" for other in odd)
    if len(odd) == len(nodes):
        what = f"the parameters of the {len(nodes)} workers differ ({where}), and no value has a majority"
        follows = "The task restarts from its newest checkpoint"
    else:
        what = f"the parameters of {where} differ from those of the other {len(nodes) - len(odd)} workers"
        follows = "The worker is restarted with their parameters"
    if stops:
        follows = "The task ends because of on_divergence='stop'"
    advice = _OF_JOINERS if set(odd) <= set(difference.joined) else _OF_MEMBERS
    raise ParametersDiffer(
        f"at step {step} {what}: expected bitwise equality, and {difference.first} differs. {follows}. {advice}",
        stops=stops,
    )


_OF_JOINERS: Final = (
    "All workers that differ have joined before this step: look for hooks that behave otherwise in a worker that "
    "starts later, and for state of a callback or module that its state_dict does not have (docs/differences.md)"
)
_OF_MEMBERS: Final = (
    "Check the node's memory and accelerator, and for code that changes parameters on some ranks only. Unequal "
    "processors may round an optimizer's step differently: set ATEN_CPU_CAPABILITY to the same value on all nodes, "
    "or digest_every=0 to train with such differences, as ddp does"
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


_MIX: Final = 0x9E3779B97F4A7C15
"""An odd number of 64 bits, which makes the digest depend on the order of tensors."""
_WORD: Final = (1 << 64) - 1
_EXACT: Final = 52
"""Bits of a digest, which a float64 represents exactly."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class StateDigest:
    """A worker's state as it is compared with the others': numbers by the names of its parts, equal for equal bits.

    A digest sums the bits of tensors as integers, so that neither the order of additions nor the kind of device
    matters. It takes one pass over the tensors' memory.

    Attributes:
        parts: parameters, buffers and the optimizers' settings; empty: nothing is compared.
        further: the rest of the state; empty: it is not compared.
        joined: whether the worker has joined since the last comparison.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    further: Mapping[str, int] = field(default_factory=dict)
    joined: bool = False

    @property
    def row(self) -> tuple[float, float, float]:
        """The two digests, each 0.0 without parts, and whether the worker has joined."""
        return _folded(self.parts), _folded(self.further), float(self.joined)


NO_DIGEST: Final = StateDigest()


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of the words of each tensor, modulo 2**64, by its name.

    A change of one bit in one tensor always changes its sum, and a digest of sums with probability 1 - 2**-52.
    """
    return dict(zip(tensors, _numbers([_sum(tensor.detach()) for tensor in tensors.values()]), strict=True))


def part_of(value: object) -> int:
    """Return a number for plain data, by its `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def _folded(parts: Mapping[str, int]) -> float:
    """A whole number from 1 to 2**52; 0.0 without parts."""
    total = 0
    for place, (_, value) in enumerate(sorted(parts.items())):
        total = (total ^ (((value + place + 1) * _MIX) & _WORD)) * _MIX & _WORD
    return float(1 + (total >> (64 - _EXACT))) if parts else 0.0


def _sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's words as integers, modulo 2**64."""
    return words_of(tensor).sum(dtype=torch.int64)


def words_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers of their size, in one dimension; a complex one is two."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    integer = _INTEGERS.get(flat.element_size())
    if integer is None or flat.dtype == torch.bool:
        flat, integer = flat.to(torch.uint8), torch.uint8
    return flat.view(integer)


def _numbers(sums: list[Tensor]) -> list[int]:
    """The values of scalars, fetched in one transfer if they are on one device."""
    if not sums:
        return []
    if len({each.device for each in sums}) == 1:
        numbers: list[int] = torch.stack(sums).tolist()
        return numbers
    return [int(each) for each in sums]
