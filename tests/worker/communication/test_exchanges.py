"""Collectives over links as state machines: any order of arrival gives the same result, in few hops."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch

from unicron_lightning.worker.communication.communicator import Route
from unicron_lightning.worker.communication.links.exchanges import (
    CHUNK_BYTES,
    Broadcast,
    Gather,
    GatheredSum,
    HostCollective,
    Outbound,
    PairwiseSum,
    RoutedTransfer,
    summing,
)
from unicron_lightning.worker.communication.links.pattern import dials, distances, peers


class Network:
    """Delivers in random order, but each link's bytes in theirs; counts each rank's messages and hops."""

    def __init__(self, exchanges: Sequence[HostCollective], seed: int) -> None:
        self.exchanges = exchanges
        self.sent = [0] * len(exchanges)
        self.bytes = [0] * len(exchanges)
        self.hops = [0] * len(exchanges)  # from the root, in a broadcast
        self.parts = 0
        self._links: dict[tuple[int, int], deque[tuple[Outbound, bytes, int]]] = {}
        self._random = random.Random(seed)

    def run(self) -> None:
        for rank, exchange in enumerate(self.exchanges):
            self._send(rank, exchange.begin())
        while self._links:
            link = self._random.choice(list(self._links))
            send, data, hops = self._links[link].popleft()
            if not self._links[link]:
                del self._links[link]
            _, rank = link
            exchange = self.exchanges[rank]
            place = exchange.place(send.part, send.segment)
            assert len(place) == len(data)
            place[:] = data
            self.hops[rank] = max(self.hops[rank], hops)
            self._send(rank, exchange.arrived(send.part, send.segment))
        assert all(exchange.done for exchange in self.exchanges)

    def _send(self, rank: int, sends: Sequence[Outbound]) -> None:
        for send in sends:
            linked = send.rank in peers(rank, len(self.exchanges)) or isinstance(self.exchanges[rank], RoutedTransfer)
            assert linked, "there is no such link"
            self.sent[rank] += 1
            self.parts = max(self.parts, send.part + 1)
            self.bytes[rank] += len(send.data)
            link = self._links.setdefault((rank, send.rank), deque())
            link.append((send, bytes(send.data), self.hops[rank] + 1))


WORLDS = [2, 3, 4, 5, 7, 8, 13]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", WORLDS)
def test_results_do_not_depend_on_the_order(world: int, seed: int) -> None:
    rows = [torch.empty(world, 3) for _ in range(world)]
    Network([Gather(rows[r], torch.tensor([r, 0.5, -r]), r) for r in range(world)], seed).run()
    assert all(torch.equal(row, torch.tensor([[r, 0.5, -r] for r in range(world)])) for row in rows)

    for make, length in ((GatheredSum, 5), (PairwiseSum, 5), (PairwiseSum, 1)):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.rand(length, generator=generator) for _ in range(world)]
        total = torch.stack(tensors).sum(0)
        Network([make(tensors[r], r, world) for r in range(world)], seed).run()
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), "ranks differ in bits"
        assert torch.allclose(tensors[0], total)

    for root in {0, world // 2, world - 1}:
        copies = [torch.full((2, 2), float(r)) for r in range(world)]
        Network([Broadcast(copies[r], root, r, world) for r in range(world)], seed).run()
        assert all((copy == root).all() for copy in copies)


def test_large_tensors_are_broadcast_in_segments() -> None:
    count = 3 * CHUNK_BYTES // 4 * 2 + 17
    copies = [torch.full((count,), r) for r in range(3)]
    Network([Broadcast(copy, 1, r, 3) for r, copy in enumerate(copies)], 0).run()
    assert all((copy == 1).all() for copy in copies)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_types(dtype: torch.dtype) -> None:
    for make in (GatheredSum, PairwiseSum):
        tensors = [torch.full((10,), r + 1, dtype=dtype) for r in range(4)]
        Network([make(tensor, r, 4) for r, tensor in enumerate(tensors)], 0).run()
        assert all(tensor.tolist() == [10] * 10 for tensor in tensors)


def test_ranks_have_the_same_bits_of_nan() -> None:
    """Each rank has a NaN of its own: a processor returns that of the first number."""
    for make in (GatheredSum, PairwiseSum):
        bits = [torch.full((40,), 0x7FC00000 + r, dtype=torch.int32) for r in range(4)]
        Network([make(each.view(torch.float32), r, 4) for r, each in enumerate(bits)], 0).run()
        assert all(each.view(torch.float32).isnan().all() and torch.equal(each, bits[0]) for each in bits)


def test_nothing_to_send() -> None:
    makers: list[Callable[[int], HostCollective]] = [
        lambda r: Gather(torch.empty(3, 0), torch.empty(0), r),
        lambda r: summing(torch.empty(0), r, 3),
        lambda r: Broadcast(torch.empty(0), 0, r, 3),
    ]
    for make in makers:
        network = Network([make(r) for r in range(3)], 0)
        network.run()
        assert network.sent == [0] * 3


def test_what_is_not_expected() -> None:
    pairs = PairwiseSum(torch.ones(10), 1, 3)  # with rank 0 only
    for part, segment in ((0, 0), (2, 0), (1, 1)):
        with pytest.raises(KeyError):
            pairs.place(part, segment)
    with pytest.raises(ValueError, match="contiguous"):
        Broadcast(torch.ones(4, 4).t(), 0, 0, 2)


@pytest.mark.parametrize(("world", "hops"), [(16, 4), (100, 8), (1000, 11), (1024, 10)])
def test_cost_of_a_commit(world: int, hops: int) -> None:
    """A commit's 25 numbers: hops, messages, links and bytes of a rank grow with the logarithm of the world."""
    sums = [torch.full((25,), float(r), dtype=torch.float64) for r in range(world)]
    network = Network([summing(tensor, r, world) for r, tensor in enumerate(sums)], 0)
    network.run()
    assert all(torch.equal(tensor, torch.full_like(tensor, world * (world - 1) / 2)) for tensor in sums)
    assert max(network.sent) <= hops and network.parts == hops
    assert max(network.bytes) == 200 * (max(network.sent) if world > 40 else world - 1)
    assert max(len(peers(r, world)) for r in range(world)) <= 2 * len(distances(world))


@pytest.mark.parametrize(("world", "hops"), [(16, 4), (100, 7), (1024, 10)])
def test_cost_of_rows(world: int, hops: int) -> None:
    """Rows of each rank, and a broadcast, reach all ranks in ceil(log2(world)) hops, with as many messages."""
    rows = [torch.empty(world, 2, dtype=torch.float64) for _ in range(world)]
    sent = torch.ones(2, dtype=torch.float64)
    network = Network([Gather(row, sent, r) for r, row in enumerate(rows)], 0)
    network.run()
    assert set(network.sent) == {hops} and network.parts == hops
    copies = [torch.full((10,), r) for r in range(world)]
    tree = Network([Broadcast(copy, 5, r, world) for r, copy in enumerate(copies)], 0)
    tree.run()
    assert sum(tree.sent) == world - 1 and max(tree.hops) <= hops


def test_small_sums_are_gathered() -> None:
    def chosen(numbers: int, world: int) -> type:
        return type(summing(torch.empty(numbers, dtype=torch.float64), 0, world))

    assert [chosen(25, world) for world in (2, 16, 40, 41, 1024)] == [GatheredSum] * 3 + [PairwiseSum] * 2
    assert [chosen(130_000, world) for world in (2, 8, 1024)] == [PairwiseSum] * 3


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8, 100])
def test_one_end_of_each_link_dials(world: int) -> None:
    for rank in range(world):
        for peer in peers(rank, world):
            assert rank in peers(peer, world)
            assert dials(rank, peer, world) != dials(peer, rank, world)


@pytest.mark.parametrize("world", [64, 1024])
def test_a_loss_costs_few_new_links(world: int) -> None:
    """Survivors keep their links: on average two are new, at most one for each distance and direction."""
    names = list(range(world))
    before = {name: {names[p] for p in peers(rank, world)} for rank, name in enumerate(names)}
    names.remove(world // 3)
    new = [len({names[p] for p in peers(rank, world - 1)} - before[name]) for rank, name in enumerate(names)]
    assert max(new) <= 2 * len(distances(world - 1))
    assert sum(new) / len(new) < 3


@pytest.mark.parametrize("seed", range(5))
def test_transfers_along_several_routes(seed: int) -> None:
    """A rank sends each byte at most once, and one without a part is done at once."""
    ways = [(0, 3, 4), (1, 4, 3), (2, 5), (0, 5)]
    sent = [[torch.arange(size) + seed for size in (CHUNK_BYTES // 8 + 3, 0, number)] for number in range(1, 5)]
    received: dict[tuple[int, int], list[torch.Tensor]] = {}

    def memory(rank: int, number: int) -> list[torch.Tensor]:
        if rank not in ways[number]:
            return []
        own = sent[number] if rank == ways[number][0] else [torch.zeros_like(each) for each in sent[number]]
        received[rank, number] = own
        return own

    sizes = [sum(each.nbytes for each in tensors) for tensors in sent]
    exchanges = [
        RoutedTransfer([Route(way, sizes[at], memory=memory(rank, at)) for at, way in enumerate(ways)], rank)
        for rank in range(7)
    ]
    assert [exchange.done for exchange in exchanges] == [False] * 6 + [True]
    network = Network(exchanges, seed)
    network.run()
    for (_, number), found in received.items():
        assert all(torch.equal(one, other) for one, other in zip(found, sent[number], strict=True))
    assert network.bytes == [sizes[0] + sizes[3], sizes[1], sizes[2], sizes[0], sizes[1], 0, 0]


def test_a_transfer_refuses_what_it_does_not_expect() -> None:
    data = torch.arange(5, dtype=torch.uint8)
    sender, receiver = (RoutedTransfer([Route((0, 1), 5, memory=[data.clone()])], rank) for rank in range(2))
    [chunk] = sender.begin()
    with pytest.raises(KeyError):
        receiver.place(1, 0)
    with pytest.raises(KeyError):
        receiver.place(0, 1)  # a confirmation, of bytes that it has not sent
    receiver.place(0, 0)[:] = chunk.data
    [confirmation] = receiver.arrived(0, 0)
    with pytest.raises(KeyError):
        receiver.place(0, 0)
    assert receiver.done and not sender.done
    assert len(sender.place(0, confirmation.segment)) == 0 and not sender.arrived(0, confirmation.segment)
    assert sender.done
