"""States from those that have them to those that lack them: nearest sources, exact bytes, deaths meanwhile."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worker.communication.test_links import Members, in_parallel
from worker.nccl_stand_in import Host, Network, StandInLibrary
from worker.simulation import FakeCommunicator, Hub

from unicron_lightning.worker import codec, delivery
from unicron_lightning.worker.communication.communicator import CommunicatorAborted, Route, gather_bytes
from unicron_lightning.worker.communication.nccl import NcclCommunicator
from unicron_lightning.worker.delivery import Way, deliver, divided_shard, ways
from unicron_lightning.worker.state_parts import DividedState

FAR = [(f"rack {rank}", f"node {rank}") for rank in range(8)]
"""Places of workers of which each is alone in its rack."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "WINDOW_BYTES", 101)


def state_of(rank: int, seed: int = 0) -> dict[str, Any]:
    """A task's state: the parameters are equal on all ranks, a large buffer and the rest are a rank's own."""
    made = torch.Generator().manual_seed(seed)
    parameters = {
        "matrix": torch.rand(7, 9, generator=made).t(),
        "half": torch.rand(50, generator=made).bfloat16(),
        "empty": torch.zeros(0),
        "mask": torch.rand(3, 11, generator=made) > 0.5,
        "one": torch.tensor(float(seed)),
    }
    own = {"random": torch.full((40,), rank), "number": rank, "none": None}
    return {"checkpoint": {"state_dict": parameters}, "own": own, "seed": seed}


def divided(state: Any) -> DividedState:
    return DividedState.of(state, least=16, paths=("",))


def delivered(communicator: Any, lacking: Sequence[int], places: Any = FAR, seed: int = 0) -> Any:
    """Take part in the delivery of a task's state; return the encoded one that arrived."""
    rank = communicator.rank
    lacks = rank in lacking
    given = None if lacks else divided(state_of(rank, seed))
    found = deliver(communicator, places, "state", given, lacks=lacks, note=(5, rank))
    gather_bytes(communicator, b"")
    return None if found is None else (codec.encode(found.state), found.note)


@pytest.fixture
def members() -> Iterator[Members]:
    found = Members("abcdefgh")
    yield found
    found.close()


def test_sources_are_the_nearest_ones() -> None:
    places = [("r0", "n0"), ("r0", "n1"), ("r1", "n2"), ("r1", "n2"), ("r1", "n3"), ("r2", "n4"), ("r2", "n4")]
    near = Way((2,), (3, 4))  # on the node of the first receiver, in the rack of the second one
    far = Way((0, 2, 1), (5, 6))  # on different racks first; both receivers pass on what they get
    assert ways([0, 1, 2], [3, 4, 5, 6], places) == [near, far]


def test_parts_are_equal_and_each_source_sends_to_another_receiver_first() -> None:
    way = Way((0, 1, 2), (5, 6))
    routes = list(way.routes(310, 0, accelerated=False))
    assert routes == [(Route((0, 5, 6), 101), 0), (Route((1, 6, 5), 101), 101), (Route((2, 5, 6), 101), 202)]
    assert list(way.routes(310, 1, accelerated=False)) == [
        (Route((0, 5, 6), 2), 303),
        (Route((1, 6, 5), 2), 305),
        (Route((2, 5, 6), 3), 307),
    ]
    assert not list(way.routes(310, 2, accelerated=False))


@pytest.mark.parametrize("lacking", [[7], [0], [3, 5, 6], [1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_receivers_get_the_bytes_and_nobody_else(members: Members, lacking: list[int]) -> None:
    """With eight members some pairs have no link before they need it."""
    first = min(set(range(8)) - set(lacking))
    expected = codec.encode(state_of(first)), [5, first]
    arrived: Counter[int] = Counter()

    def body(communicator: Any) -> Any:
        begun = communicator.transfer

        def transfer(routes: Sequence[Route]) -> Any:
            arrived.update({communicator.rank: sum(r.size for r in routes if communicator.rank in r.ranks[1:])})
            return begun(routes)

        communicator.transfer = transfer
        return delivered(communicator, lacking)

    assert members.run("abcdefgh", body) == [expected if rank in lacking else None for rank in range(8)]
    [size] = {arrived[rank] for rank in lacking}
    assert {rank for rank, count in arrived.items() if count} == set(lacking)
    assert size == len(divided(state_of(first)).root) + sum(each.nbytes for each in divided(state_of(first)).large)


def test_members_of_other_layouts_give_nothing(members: Members) -> None:
    """A worker whose large tensors have other shapes is no source; the first one is."""

    def body(communicator: Any) -> Any:
        rank = communicator.rank
        state = {"checkpoint": {"state_dict": {"a": torch.full((100 if rank != 1 else 99,), 1.5)}}}
        given = None if rank == 3 else divided(state)
        found = deliver(communicator, FAR, "state", given, lacks=rank == 3)
        gather_bytes(communicator, b"")
        return None if found is None else found.state["checkpoint"]["state_dict"]["a"].tolist()

    assert members.run("abcd", body) == [None, None, None, [1.5] * 100]


def test_shards_go_to_their_own_workers(members: Members) -> None:
    """Two shards, a spare that has an older state, and a worker without a model's part."""
    shards, lacks = [0, 1, 0, 1, 0, 1, 0], [False, False, True, True, False, False, False]

    def state(shard: int, rank: int) -> dict[str, Any]:
        tensors = [torch.full((60,), float(shard)), torch.full((9, 9), shard), torch.full((30,), rank)]
        return {"tensors": tensors, "optimizer": {"state": {0: {"step": torch.full((20,), shard)}}}}

    def body(communicator: Any) -> Any:
        rank = communicator.rank
        given = None if lacks[rank] or rank == 6 else divided_shard(state(shards[rank], rank), 2)
        found = deliver(communicator, FAR, "shards", given, lacks=lacks[rank], subject=shards[rank])
        gather_bytes(communicator, b"")
        return None if found is None else codec.encode(found.state)

    expected = [None, None, codec.encode(state(0, 0)), codec.encode(state(1, 1)), None, None, None]
    assert members.run("abcdefg", body) == expected
    assert divided_shard(state(0, 0), 2).equal == []  # all smaller than those that are sent by themselves


def test_shards_parameters_and_optimizers_are_striped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "LARGE", 8)
    tensors = [torch.ones(4), torch.ones(5), torch.ones(6)]
    found = divided_shard({"tensors": tensors, "optimizer": [torch.ones(7)], "fits": 1}, 2)
    assert found.equal == [True, True, False, True]


@pytest.mark.parametrize("seed", range(20))
def test_a_death_meanwhile_is_seen_and_the_next_epoch_delivers(members: Members, seed: int) -> None:
    """A member ends at a random window; the others abort, and start again without it."""
    chance = random.Random(seed)
    lacking = chance.sample(range(8), 3)
    dies, at = chance.randrange(8), chance.randrange(4)
    results: list[Any] = [None] * 8

    def member(rank: int, communicator: Any) -> None:
        begun, count = communicator.transfer, iter(range(100))

        def transfer(routes: Sequence[Route]) -> Any:
            if rank == dies and next(count) == at:
                raise CommunicatorAborted("dead")
            return begun(routes)

        communicator.transfer = transfer
        try:
            delivered(communicator, lacking, seed=seed)
        except CommunicatorAborted as error:
            results[rank] = error
            for each in joined:  # as the coordinator has it done
                each.abort("a death")

    epoch = members.epoch("abcdefgh")
    joined: list[Any] = [None] * 8
    join: Callable[[int], None] = lambda rank: joined.__setitem__(rank, members.join(epoch, rank))  # noqa: E731
    in_parallel([lambda rank=rank: join(rank) for rank in range(8)])
    in_parallel([lambda rank=rank: member(rank, joined[rank]) for rank in range(8)])
    assert all(isinstance(result, CommunicatorAborted) for result in results), results
    members.hubs["abcdefgh"[dies]].close()
    names = "".join(name for rank, name in enumerate("abcdefgh") if rank != dies)
    still = [rank - (rank > dies) for rank in lacking if rank != dies]
    first = min(set(range(7)) - set(still))
    found = members.run(names, lambda communicator: delivered(communicator, still, seed=seed))
    expected = codec.encode(state_of(first, seed)), [5, first]
    assert found == [expected if rank in still else None for rank in range(7)]


def test_tensors_on_an_accelerator_go_over_nccl() -> None:
    """NCCL's stand-in, for which the CPU is the accelerator: received tensors are copied from the staged windows."""
    world, lacking = 5, [1, 4]
    hub, network, store = Hub(world, 0), Network(world), dist.HashStore()
    found: list[Any] = [None] * world
    calls: Counter[int] = Counter()

    def member(rank: int) -> None:
        host = Host(FakeCommunicator(hub, rank))
        cpu = torch.device("cpu")
        communicator = NcclCommunicator(store, rank, world, cpu, host, StandInLibrary.of(network))
        group = network.groups[rank]
        begun = group.alltoall

        def alltoall(received: Any, sent: Any) -> Any:
            calls[rank] += 1
            return begun(received, sent)

        group.alltoall = alltoall  # type: ignore[method-assign]
        found[rank] = delivered(communicator, lacking)
        barrier.wait(20)
        communicator.close()
        assert communicator.released(10)

    barrier = threading.Barrier(world)
    in_parallel([lambda rank=rank: member(rank) for rank in range(world)])
    expected = codec.encode(state_of(0)), [5, 0]
    assert found == [expected if rank in lacking else None for rank in range(world)]
    assert len(set(calls.values())) == 1 and calls[0] > 2, "all ranks take part in all"
