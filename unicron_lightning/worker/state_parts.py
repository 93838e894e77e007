"""Divides a state into equal parts, and joins them again. Pure; the form of the bytes is that of `codec`.

The large tensors of the module and its optimizers are equal on all workers of a shard, which without shards are all
members. Their bytes follow each other and are cut into ranges of equal size, one for each of these workers. The rest,
the *root*, need not be equal (random state): the shard's first part begins with that of one worker. Each part begins
with the length of its root. The parts of a version are those of its first shard, then those of the second one, etc.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import pack_parts, unpack_parts

LARGE: Final = 1 << 10
"""Bytes from which a tensor is divided among the parts."""
_EQUAL: Final = (
    "value['checkpoint']['state_dict']",
    "value['checkpoint']['optimizer_states']",
    "value['shard']",
    "value['models']",
    "value['optimizers']",
)
"""Paths of the tensors that are equal on all workers of a shard, in a joiner's state, that of a shard, and that
of a loop.
"""
_LENGTH: Final = 8


@dataclass(frozen=True)
class DividedState:
    """A state whose large tensors are still the training's own: they are copied by `write`, before the next step.

    Attributes:
        root: tree and small tensors, as bytes.
        large: the large tensors, on any device.
        equal: for each of them, whether all workers of the shard have the same one.
        layout: SHA-256 of names, types and shapes of the large tensors, in hexadecimal digits. The small ones, which
            only the root has, differ between workers that have joined at different steps.
    """

    root: bytes
    large: Sequence[Tensor]
    equal: Sequence[bool]
    layout: str

    @classmethod
    def of(
        cls,
        state: Any,
        least: int = LARGE,
        paths: tuple[str, ...] = _EQUAL,
        equal: Callable[[str], bool] = lambda path: path.startswith(_EQUAL),
    ) -> DividedState:
        """Divide plain data.

        Args:
            state: plain data.
            least: bytes from which a tensor is a large one.
            paths: with which those of large tensors begin.
            equal: whether the tensor at a path is equal on all workers of the shard.

        Raises:
            NotPlainData: the state holds anything else; the message contains the path to it.
        """
        tree, tensors = codec.split(state)
        divided = [tensor.nbytes >= least and path.startswith(paths) for path, tensor in tensors]
        small = [codec.raw(tensor) for (_, tensor), large in zip(tensors, divided, strict=True) if not large]
        sizes = [(tensor.nbytes, large) for (_, tensor), large in zip(tensors, divided, strict=True)]
        each = zip(tensors, divided, strict=True)
        named = [(path, str(tensor.dtype), list(tensor.shape)) for (path, tensor), large in each if large]
        return cls(
            root=pack_parts([msgspec.json.encode(sizes), tree, *small]),
            large=[tensor.detach() for (_, tensor), large in zip(tensors, divided, strict=True) if large],
            equal=[equal(path) for path, _, _ in named],
            layout=hashlib.sha256(msgspec.json.encode(named)).hexdigest(),
        )

    def size(self, part: int, parts: int) -> int:
        """Return the bytes of a part."""
        first, end = part_range(sum(tensor.nbytes for tensor in self.large), part, parts)
        return _LENGTH + (len(self.root) if part == 0 else 0) + end - first

    def write(self, part: int, parts: int, target: Tensor) -> None:
        """Copy a part.

        Args:
            part: number of the part.
            parts: number of parts.
            target: uint8 of shape ``(size(part, parts),)``, on the CPU.
        """
        root = self.root if part == 0 else b""
        head = len(root).to_bytes(_LENGTH, "little") + root
        at = len(head)
        target[:at] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for piece in pieces(self.large, *part_range(sum(tensor.nbytes for tensor in self.large), part, parts)):
            target[at : at + len(piece)].copy_(piece)
            at += len(piece)


def joined(parts: Sequence[bytes]) -> Any:
    """Return the state, given all its parts in order; tensors are on the CPU.

    Raises:
        ValueError: the bytes are not those of a state's parts.
    """
    length = int.from_bytes(parts[0][:_LENGTH], "little")
    root = parts[0][_LENGTH : _LENGTH + length]
    sizes = [size for size, divided in _unpacked(root)[0] if divided]
    stream = b"".join([parts[0][_LENGTH + length :], *(part[_LENGTH:] for part in parts[1:])])
    if len(stream) != sum(sizes):
        raise ValueError(f"the parts hold {len(stream)} bytes of divided tensors, not those of {len(sizes)} tensors")
    ends = accumulate(sizes)
    return restored(root, [stream[end - size : end] for size, end in zip(sizes, ends, strict=True)])


def restored(root: bytes, large: Iterable[bytes | Tensor]) -> Any:
    """Return the state, given its root and the bytes of its large tensors, which it may keep: see `codec.restored`.

    Raises:
        ValueError: the bytes are not those of a state.
    """
    sizes, tree, small = _unpacked(root)
    rest, apart = iter(small), iter(large)
    return codec.restored(tree, (next(apart if divided else rest, b"") for _, divided in sizes))


def _unpacked(root: bytes) -> tuple[list[tuple[int, bool]], bytes, list[bytes]]:
    try:
        encoded, tree, *small = unpack_parts(root)
        return msgspec.json.decode(encoded, type=list[tuple[int, bool]]), tree, small
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"no parts of a state: {error}") from error


def part_range(total: int, part: int, parts: int) -> tuple[int, int]:
    """Return where a part of a number of bytes begins and ends."""
    return total * part // parts, total * (part + 1) // parts


def pieces(tensors: Iterable[Tensor], first: int, end: int) -> Iterator[Tensor]:
    """Yield the bytes of a range of tensors that follow each other, as uint8 of one dimension: views of their memory,
    or of a copy of a tensor whose elements do not follow each other, or are conjugated or negated lazily.
    """
    begin = 0
    for tensor in tensors:
        low, high = max(first - begin, 0), min(end - begin, tensor.nbytes)
        if low < high:
            values = tensor.resolve_conj().resolve_neg().contiguous()
            yield values.view(-1).view(torch.uint8)[low:high]
        begin += tensor.nbytes


@dataclass(frozen=True, kw_only=True)
class SharePart:
    """A part of a version, and the ranks that stage it.

    Attributes:
        shard: of the model; 0 without shards.
        piece, pieces: its place among the parts of the shard.
        holders: ranks that copy it from their own state; the first one sends it to the receivers.
        receivers: ranks of other shards, on further nodes.
        whole: whether it is all of its holder's state, which differs from those of the shard's other workers.
    """

    shard: int
    piece: int
    pieces: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...] = ()
    whole: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """Its number among the equal parts of its holder's state, and their number."""
        return (0, 1) if self.whole else (self.piece, self.pieces)

    @property
    def number(self) -> int:
        """Its number in the version."""
        return self.shard * self.pieces + self.piece


RackAndNode = tuple[str, str]
"""Rack and node of a worker; a node without a label is its own rack."""


def staged_parts(
    shards: Sequence[Sequence[int]], places: Sequence[RackAndNode], partners: int, *, equal: bool = True
) -> tuple[SharePart, ...]:
    """Return the parts of a version, in order.

    Args:
        shards: ranks of the workers of each shard, in the order of replicas.
        places: place of each rank.
        partners: number of further copies of each part: see `partners_of`, `apart`. Workers of the same shard have
            them, as far as there are any on other nodes, else workers of the same replica.
        equal: whether the workers of a shard have equal states, and can stage each other's parts.
    """
    found = []
    for shard, ranks in enumerate(shards):
        for piece, rank in enumerate(ranks):
            near = [places[each] for each in ranks]
            own = tuple(ranks[each] for each in holders(near, piece, partners)) if equal else (rank,)
            same = [] if equal else following(ranks, piece)
            replica = [shards[other][piece] for other in following(range(len(shards)), shard)]
            more = tuple(apart(rank, [*same, *replica], places, partners, used=own[1:]))
            part = SharePart(shard=shard, piece=piece, pieces=len(ranks), holders=own, receivers=more, whole=not equal)
            found.append(part)
    return tuple(found)


def following(ranks: Sequence[int], at: int) -> list[int]:
    """Return the other ones of some ranks, beginning with the next one."""
    return [*ranks[at + 1 :], *ranks[:at]]


def apart(
    rank: int,
    others: Sequence[int],
    places: Sequence[RackAndNode],
    number: int,
    *,
    used: Sequence[int] = (),
    anywhere: bool = False,
) -> list[int]:
    """Choose further holders of what a rank holds: in racks that have none, then on nodes that have none.

    Args:
        rank: the first holder.
        others: candidates, in the order in which they are preferred.
        places: place of each rank.
        number: wanted number of further holders, with ``used``.
        used: further holders that are chosen already.
        anywhere: whether those in the rank's rack, on nodes that have one, and on its own node follow. Otherwise they
            are in its rack only if neither a candidate nor one of ``used`` is in another one.
    """
    (rack, node), found = places[rank], [rank, *used]
    abroad = [each for each in others if places[each][0] != rack]
    if not abroad and all(places[each][0] == rack for each in used):
        abroad = list(others)
    tiers: list[tuple[Sequence[int], int | None]] = [(abroad, 0), (abroad, 1)]
    if anywhere:
        tiers += [(others, 1), (sorted(others, key=lambda each: places[each][1] == node), None)]
    for candidates, part in tiers:
        for each in candidates:
            is_new = part is None or all(places[each][part] != places[holder][part] for holder in found)
            if len(found) <= number and is_new and each not in found:
                found.append(each)
    return found[1 + len(used) :]


def nearest(rank: int, owners: Sequence[int], places: Sequence[RackAndNode], number: int) -> tuple[int, ...]:
    """Choose the ranks from which a rank gets what they all have: those of its node, else of its rack, else any; as far
    as possible on different racks and nodes, as for `apart`.

    Args:
        rank: the receiver.
        owners: ranks that have it.
        places: place of each rank.
        number: most ranks to choose.
    """
    near = [[each for each in owners if places[each][part] == places[rank][part]] for part in (1, 0)]
    return tuple(apart(rank, next(filter(None, near), list(owners)), places, number, anywhere=True))


def holders(places: Sequence[RackAndNode], part: int, partners: int) -> list[int]:
    """Return the ranks that hold a part: the rank of the same number, and a rank on each partner of its node.

    Args:
        places: place of each rank.
        part: number of the part, from 0 to the number of ranks.
        partners: number of further copies; there is at most one on each node.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (_, node) in enumerate(places):
        ranks.setdefault(node, []).append(rank)
    return [part, *(ranks[node][part % len(ranks[node])] for node in partners_of(places, places[part])[:partners])]


def partners_of(places: Sequence[RackAndNode], own: RackAndNode) -> list[str]:
    """Return the nodes that hold copies for a node, in the order in which they are to be used.

    They are in other racks: first a node of each, beginning with the next rack. Nodes of a rack have different partners
    as far as possible. If there is no other rack, they are the other nodes, beginning with the next one.

    Args:
        places: of all workers of the epoch, as the coordinator has published it.
        own: place of the node.
    """
    racks: dict[str, list[str]] = {}
    for rack, node in dict.fromkeys(places):
        racks.setdefault(rack, []).append(node)
    names, own_rack = list(racks), racks[own[0]]
    at, number = names.index(own[0]), own_rack.index(own[1])
    if len(names) == 1:
        return [own_rack[(number + step) % len(own_rack)] for step in range(1, len(own_rack))]
    others = [racks[names[(at + step) % len(names)]] for step in range(1, len(names))]
    turns = range(max(map(len, others)))
    return [nodes[(number + turn) % len(nodes)] for turn in turns for nodes in others if turn < len(nodes)]
