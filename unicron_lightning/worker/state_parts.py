"""Divides a state into equal parts, and joins them again. Pure; the form of the bytes is that of `codec`.

The large tensors of the module and its optimizers are equal on all workers of a shard, which without shards are all
members. Their bytes follow each other and are cut into ranges of equal size, one for each of these workers. The rest,
the *root*, need not be equal (random state): the shard's first part begins with that of one worker. Each part begins
with the length of its root. The parts of a version are those of its first shard, then those of the second one, etc.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from typing_extensions import override

from unicron_lightning.worker import codec
from unicron_lightning.worker.operations import pack_parts, unpack_parts

LARGE: Final = 1 << 10
"""Bytes from which a tensor is divided among the parts."""
_EQUAL: Final = ("value['checkpoint']['state_dict']", "value['checkpoint']['optimizer_states']", "value['shard']")
"""Paths of the tensors that are equal on all workers of a shard, in a joiner's state and in that of a shard."""
_LENGTH: Final = 8


@dataclass(frozen=True)
class DividedState:
    """A state whose large tensors are still the training's own: they are copied by `write`, before the next step.

    Attributes:
        root: tree and small tensors, as bytes.
        large: the large tensors, on any device.
        layout: SHA-256 of names, types and shapes of all tensors, in hexadecimal digits.
    """

    root: bytes
    large: Sequence[Tensor]
    layout: str

    @classmethod
    def of(cls, state: Any) -> DividedState:
        """Divide plain data.

        Raises:
            NotPlainData: the state holds anything else; the message contains the path to it.
        """
        tree, tensors = codec.split(state)
        divided = [tensor.nbytes >= LARGE and path.startswith(_EQUAL) for path, tensor in tensors]
        small = [codec.raw(tensor) for (_, tensor), large in zip(tensors, divided, strict=True) if not large]
        sizes = [(tensor.nbytes, large) for (_, tensor), large in zip(tensors, divided, strict=True)]
        named = [(path, str(tensor.dtype), list(tensor.shape)) for path, tensor in tensors]
        return cls(
            root=pack_parts([msgspec.json.encode(sizes), tree, *small]),
            large=[tensor.detach() for (_, tensor), large in zip(tensors, divided, strict=True) if large],
            layout=hashlib.sha256(msgspec.json.encode(named)).hexdigest(),
        )

    def size(self, part: int, parts: int) -> int:
        """Return the bytes of a part."""
        first, end = _range(sum(tensor.nbytes for tensor in self.large), part, parts)
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
        first, end = _range(sum(tensor.nbytes for tensor in self.large), part, parts)
        begin = 0
        for tensor in self.large:
            low, high = max(first - begin, 0), min(end - begin, tensor.nbytes)
            if low < high:
                flat = tensor.contiguous().view(-1).view(torch.uint8)
                target[at : at + high - low].copy_(flat[low:high])
                at += high - low
            begin += tensor.nbytes


class OwnState(DividedState):
    """The state of one worker of a shard, which differs from those of the others: its part is all of it."""

    @override
    def size(self, part: int, parts: int) -> int:
        return super().size(0, 1)

    @override
    def write(self, part: int, parts: int, target: Tensor) -> None:
        super().write(0, 1, target)


def joined(parts: Sequence[bytes]) -> Any:
    """Return the state, given all its parts in order; tensors are on the CPU.

    Raises:
        ValueError: the bytes are not those of a state's parts.
    """
    try:
        length = int.from_bytes(parts[0][:_LENGTH], "little")
        encoded, tree, *small = unpack_parts(parts[0][_LENGTH : _LENGTH + length])
        sizes = msgspec.json.decode(encoded, type=list[tuple[int, bool]])
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"no parts of a state: {error}") from error
    stream = b"".join([parts[0][_LENGTH + length :], *(part[_LENGTH:] for part in parts[1:])])
    if len(stream) != sum(size for size, divided in sizes if divided):
        raise ValueError(f"the parts hold {len(stream)} bytes of divided tensors, not those of {len(sizes)} tensors")
    return codec.decode(codec.joined(tree, list(_blobs(sizes, small, stream))))


def _blobs(sizes: Sequence[tuple[int, bool]], small: Sequence[bytes], stream: bytes) -> Iterator[bytes]:
    rest, at = iter(small), 0
    for size, divided in sizes:
        if divided:
            yield stream[at : at + size]
            at += size
        else:
            yield next(rest, b"")


def _range(total: int, part: int, parts: int) -> tuple[int, int]:
    return total * part // parts, total * (part + 1) // parts


@dataclass(frozen=True, kw_only=True)
class SharePart:
    """A part of a version, and the ranks that stage it.

    Attributes:
        shard: of the model; 0 without shards.
        piece, pieces: its place among the parts of the shard.
        holders: ranks that copy it from their own state; the first one sends it to the receivers.
        receivers: ranks of other shards, on further nodes.
    """

    shard: int
    piece: int
    pieces: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...] = ()

    @property
    def number(self) -> int:
        """Its number in the version."""
        return self.shard * self.pieces + self.piece


def staged_parts(shards: Sequence[Sequence[int]], nodes: Sequence[str], partners: int) -> tuple[SharePart, ...]:
    """Return the parts of a version, in order.

    Args:
        shards: ranks of the workers of each shard, in the order of replicas.
        nodes: node of each rank.
        partners: number of further copies of each part on other nodes. Workers of the same shard stage them, as far as
            there are any on other nodes, else workers of the same replica.
    """
    found = []
    for shard, ranks in enumerate(shards):
        for piece in range(len(ranks)):
            own = tuple(ranks[i] for i in holders([nodes[rank] for rank in ranks], piece, partners))
            used = {nodes[rank] for rank in own}
            receivers: list[int] = []
            for step in range(1, len(shards)):
                other = shards[(shard + step) % len(shards)][piece]
                if len(own) + len(receivers) <= partners and nodes[other] not in used:
                    used.add(nodes[other])
                    receivers.append(other)
            part = SharePart(shard=shard, piece=piece, pieces=len(ranks), holders=own, receivers=tuple(receivers))
            found.append(part)
    return tuple(found)


def own_parts(shards: Sequence[Sequence[int]], nodes: Sequence[str], partners: int) -> tuple[SharePart, ...]:
    """Return the parts of a version, in order, if each worker has a part of its own.

    Receivers are workers of the same shard, as far as there are any on other nodes, else of the same replica.

    Args:
        shards: ranks of the workers of each shard, in the order of replicas.
        nodes: node of each rank.
        partners: number of further copies of each part on other nodes.
    """
    found = []
    for shard, ranks in enumerate(shards):
        for piece, rank in enumerate(ranks):
            used, receivers = {nodes[rank]}, list[int]()
            same = [ranks[(piece + step) % len(ranks)] for step in range(1, len(ranks))]
            replica = [shards[(shard + step) % len(shards)][piece] for step in range(1, len(shards))]
            for other in (*same, *replica):
                if len(receivers) < partners and nodes[other] not in used:
                    used.add(nodes[other])
                    receivers.append(other)
            found.append(
                SharePart(shard=shard, piece=piece, pieces=len(ranks), holders=(rank,), receivers=tuple(receivers))
            )
    return tuple(found)


def holders(nodes: Sequence[str], part: int, partners: int) -> list[int]:
    """Return the ranks that stage a part: the rank of the same number, and a rank on each of the next other nodes.

    Args:
        nodes: node of each rank.
        part: number of the part, from 0 to the number of ranks.
        partners: number of further copies; there is at most one on each node.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    names = list(ranks)
    own = names.index(nodes[part])
    others = [names[(own + step) % len(names)] for step in range(1, min(partners, len(names) - 1) + 1)]
    return [part, *(ranks[node][part % len(ranks[node])] for node in others)]
