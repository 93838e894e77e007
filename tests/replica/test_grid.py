"""The numbering of workers, and their sets, are Megatron's."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("megatron.core.package_info")

from megatron.core.parallel_state import RankGenerator

from unicron_lightning.replica.layout import Shape

ORDER = "tp-cp-ep-dp-pp"


@pytest.mark.parametrize(
    "sizes",
    [
        (tensor, columns, pipeline, replicas)
        for tensor, pipeline, replicas in itertools.product((1, 2), (1, 2, 4), (1, 2, 3))
        for columns in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 4), (4, 2))
    ],
)
def test_every_group_of_megatron_is_a_set_of_the_grid(sizes: tuple[int, tuple[int, int], int, int]) -> None:
    tensor, (context, expert), pipeline, replicas = sizes
    shape = Shape(tensor=tensor, context=context, expert=expert, pipeline=pipeline, replicas=replicas)
    columns = shape.columns
    sizes_of_experts = {"ep": expert, "dp": columns * replicas // expert, "cp": 1}
    dense = RankGenerator(tp=tensor, ep=1, dp=shape.width * replicas, pp=pipeline, cp=context, order=ORDER)
    experts = RankGenerator(tp=tensor, pp=pipeline, order=ORDER, **sizes_of_experts)
    kinds = ("tp", "pp", "tp-pp", "dp", "tp-dp", "cp", "tp-cp", "dp-cp", "tp-dp-cp")
    groups = [tuple(group) for kind in kinds for group in dense.get_ranks(kind)]
    kinds = ("tp", "ep", "tp-ep", "tp-ep-pp", "dp")
    groups += [tuple(group) for kind in kinds for group in experts.get_ranks(kind)]
    groups.append(tuple(range(shape.workers)))
    numbers = set()
    for place, shard in itertools.product(range(replicas), range(shape.shards)):
        grid = shape.grid(replicas=replicas, place=place, shard=shard)
        numbers.add(grid.rank)
        assert shape.shard(shape.coordinate(shard)[0], shape.column(shard), shape.coordinate(shard)[1]) == shard
        own = {(grid.rank,), *grid.across()}
        own |= {tuple(sorted(grid.number(place, other) for other in shards)) for shards in grid.within()}
        assert own >= {group for group in groups if grid.rank in group}
        assert [*grid.same_slice()] in dense.get_ranks("dp-cp") and grid.rank in grid.same_slice()
        assert set(grid.same_slice()[place * columns : (place + 1) * columns]) <= grid.partners().keys()
    assert numbers == set(range(shape.workers))


def test_the_width_of_a_replica() -> None:
    shards = Shape(tensor=4, replicas=2, sharded=True)
    assert (shards.width, [shards.lane(shard) for shard in range(4)]) == (4, [0, 1, 2, 3])
    experts = Shape(tensor=2, expert=2, pipeline=2, replicas=1)
    assert (experts.width, [experts.lane(shard) for shard in range(8)]) == (2, [0, 0, 1, 1] * 2)
