"""The numbering of workers, and their sets, are Megatron's."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("megatron.core.package_info")

from megatron.core.parallel_state import RankGenerator

from unicron_lightning.replica.layout import Shape

ORDER = "tp-cp-ep-dp-pp"


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 3))))
def test_every_group_of_megatron_is_a_set_of_the_grid(sizes: tuple[int, int, int, int]) -> None:
    tensor, expert, pipeline, replicas = sizes
    shape = Shape(tensor=tensor, expert=expert, pipeline=pipeline, replicas=replicas)
    dense = RankGenerator(tp=tensor, ep=1, dp=expert * replicas, pp=pipeline, cp=1, order=ORDER)
    experts = RankGenerator(tp=tensor, ep=expert, dp=replicas, pp=pipeline, cp=1, order=ORDER)
    groups = [tuple(group) for kind in ("tp", "pp", "tp-pp", "dp", "tp-dp") for group in dense.get_ranks(kind)]
    kinds = ("tp", "ep", "tp-ep", "tp-ep-pp", "dp")
    groups += [tuple(group) for kind in kinds for group in experts.get_ranks(kind)]
    groups.append(tuple(range(shape.workers)))
    numbers = set()
    for place, shard in itertools.product(range(replicas), range(shape.shards)):
        grid = shape.grid(replicas=replicas, place=place, shard=shard)
        numbers.add(grid.rank)
        assert shape.shard(shape.coordinate(shard)[0], shape.lane(shard), shape.coordinate(shard)[1]) == shard
        own = {(grid.rank,), *grid.across()}
        own |= {tuple(sorted(grid.number(place, other) for other in shards)) for shards in grid.within()}
        assert own >= {group for group in groups if grid.rank in group}
        assert [*grid.same_slice()] in dense.get_ranks("dp") and grid.rank in grid.same_slice()
        assert set(grid.same_slice()[place * expert : (place + 1) * expert]) <= grid.partners().keys()
    assert numbers == set(range(shape.workers))


def test_the_width_of_a_replica() -> None:
    shards = Shape(tensor=4, replicas=2, sharded=True)
    assert (shards.width, [shards.lane(shard) for shard in range(4)]) == (4, [0, 1, 2, 3])
    experts = Shape(tensor=2, expert=2, pipeline=2, replicas=1)
    assert (experts.width, [experts.lane(shard) for shard in range(8)]) == (2, [0, 0, 1, 1] * 2)
