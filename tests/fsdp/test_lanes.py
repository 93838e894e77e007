"""Tensor parallelism within FSDP2's replicas, without processes: deaths, parts of tensors, and refusals."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsdp.deaths import SLICED_POINTS
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import placement_types

from unicron_lightning import UnicronFSDPStrategy
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import ReplicaMesh, ShardGroup
from unicron_lightning.replica.layout import Shape

if TYPE_CHECKING:
    from pathlib import Path

    from worlds.client import Worlds


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.chaos), 2])
def test_random_deaths(worlds: Worlds, tmp_path: Path, shards: int) -> None:
    points = worlds.run("deaths:sliced", 1, tmp_path, seeds=list(range(4)), shards=shards)
    assert points == [[SLICED_POINTS[shards, tied] for tied in (True, False)]]


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shards", "first"), [(1, 100), (1, 140), *((2, 200 + 15 * n) for n in range(5))])
def test_many_random_deaths(worlds: Worlds, tmp_path: Path, shards: int, first: int) -> None:
    number = 40 if shards == 1 else 15  # of eight workers, in the time of a scenario
    worlds.run("deaths:sliced", 1, tmp_path, seeds=list(range(first, first + number)), shards=shards)


def test_workers_of_a_replica() -> None:
    """Lanes are neighbours; the same slices of all lanes are a group; a micro-batch is a lane's."""
    shape = Shape(tensor=3, replicas=2, sharded=True, slices=2)
    assert (shape.shards, shape.width, shape.workers) == (6, 3, 12)
    assert [shape.lane(shard) for shard in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [*shape.grid(replicas=2, place=1, shard=3).within()] == [(2, 3), (1, 3, 5), (0, 1, 2, 3, 4, 5)]
    assert [*shape.grid(replicas=2, place=1, shard=3).across()] == [(3, 9)]


def test_the_meshes_of_a_worker() -> None:
    mesh = ReplicaMesh(ShardGroup(3, 6, 2), torch.device("cpu"))
    lanes, lane = mesh["data_parallel"], mesh["tensor_parallel"]
    assert (lanes.size(), lanes.get_local_rank(), lane.size(), lane.get_local_rank()) == (3, 1, 2, 1)
    whole = DeviceMesh._concatenate([lanes, lane])
    assert (whole.shape, whole.get_coordinate(), whole.get_local_rank("tensor_parallel")) == ((3, 2), (1, 1), 1)


@pytest.mark.parametrize("size", [0, -2])
def test_a_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}: expected 1 or more"):
        UnicronFSDPStrategy(shard_size=2, tensor_parallel_size=size)


def test_torch_divides_tensors_by_the_replaced_functions() -> None:
    names: list[tuple[Any, str]] = [
        (FSDPParam, "DeviceMesh._concatenate("),
        (placement_types, "mesh_scatter("),
        (placement_types, "mesh_broadcast("),
    ]
    assert all(name in inspect.getsource(owner) for owner, name in names)
