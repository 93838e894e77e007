"""Context parallelism: SIGKILL of workers that divide the sequences of a replica.

All is computed in float64: the workers of a replica and those of other replicas sum their gradients together, so a
failure changes the order of additions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from system.cluster import Cluster
from system.healing import check, check_validation, healed
from system.megatron import MODEL, SCRIPT, ZERO1, notes, train

pytest.importorskip("megatron.core.package_info")

from unicron_lightning import UnicronMegatronStrategy
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.layout import Shape
from unicron_lightning.strategies.megatron.checks import check_context

pytestmark = [pytest.mark.faults, pytest.mark.timeout(850)]

CLOSE = 1e-10
PARTS: dict[str, Any] = {
    **MODEL,
    "cp": 2,
    "toy": {"double": True, "dropout": 0.1, "layers": 2},
    "optimizer": {"clip_grad": 0.0, "lr": 1e-3},
}


SHARDED = {**PARTS, **ZERO1, "optimizer": {**PARTS["optimizer"], **ZERO1["optimizer"]}}
"""With the distributed optimizer, in float64 as by `doubled`."""
VIRTUAL = {**PARTS, "pp": 2, "vpp": 2, "toy": {**PARTS["toy"], "layers": 4}, "validate": 2}


def die(point: str, replica: int | None, shard: int, **where: Any) -> dict[str, Any]:
    return {"point": point, "replica": replica, "shard": shard, **where}


SCHEDULES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "parts": (
        {**PARTS, "validate": 2},
        [
            die("forward", 0, 0, micro_batch=1),  # the first worker of all
            # in the single replica that is left, whose workers sum their gradients; its partner waits for this worker
            die("reduce", 0, 1, at_once=True, breaks=True),
            die("validate", 1, 0, micro_batch=1),
            die("commit", 1, 1),
        ],
    ),
    "overlapped": (
        {**PARTS, "ddp": {"overlap_grad_reduce": True}, "stream": True},
        [
            die("forward", 0, 1, from_step=3),
            die("reduced", 1, 0),
            die("commit", None, 1, at_once=True),  # the spare
            die("gate", 0, 0),
            die("committed", 0, 1, breaks=True),
        ],
    ),
    "sharded": (
        SHARDED,
        [
            die("forward", 0, 0, micro_batch=1),
            die("updated", 1, 1),
            # in the single replica that is left, which has the shards of both
            die("reduce", 0, 1, at_once=True, breaks=True),
            die("kept", 0, 1),
            die("committed", 1, 0),
        ],
    ),
    "virtual": (
        VIRTUAL,
        [
            die("forward", 0, 1, micro_batch=2),
            die("reduced", 1, 2),
            die("validate", 0, 3, micro_batch=3),
        ],
    ),
}
IN_CI = ("parts",)


@pytest.mark.chaos  # the kills below are compared with that run, too
@pytest.mark.parametrize("model", [PARTS, {**PARTS, "tp": 2}, {**PARTS, "pp": 2, "dp": 1}, SHARDED, VIRTUAL])
def test_without_failures_it_is_megatrons_own_run(model: dict[str, Any], tmp_path: Path, worlds: Any) -> None:
    settings, workers = {**model, "steps": 6}, model["tp"] * model["cp"] * model["pp"] * model["dp"]
    nodes = f"{workers}:{workers}"
    with Cluster(tmp_path, script=SCRIPT, agents=workers, nodes=nodes, schedule=[], settings=settings) as cluster:
        cluster.wait_end(200)
    check(tmp_path, model, worlds)


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos) for name in SCHEDULES]
)
def test_kills_heal(name: str, tmp_path: Path, worlds: Any) -> None:
    model, schedule = SCHEDULES[name]
    full = model["cp"] * model["pp"] * model["dp"]
    settings, nodes, agents = (
        {**model, "steps": 6, "finish": True, "full": full, "slow": 0.05},
        f"{full - 1}:{full}",
        full + 1,
    )
    with Cluster(tmp_path, script=SCRIPT, agents=agents, nodes=nodes, schedule=schedule, settings=settings) as cluster:
        cluster.watch(lambda: healed(cluster, tmp_path, len(schedule)), "all faults, and their ends", 600, 100)
        (tmp_path / "finish").touch()
        cluster.wait_exit(150)
        names = [event["name"] for event in cluster.events()]
        cluster.wait_end()
    assert "task_restarts" not in names
    check(tmp_path, model, worlds, CLOSE)
    losses: dict[int, set[float]] = {}
    for note in notes(tmp_path, "step"):
        losses.setdefault(note["step"], set()).add(note["loss"])
    assert all(len(found) == 1 for found in losses.values()), "all workers have the same loss"
    if "validate" in model:
        check_validation(tmp_path, model)


def test_divided_sequences_give_the_gradients_of_whole_ones(tmp_path: Path, worlds: Any) -> None:
    whole = worlds.run("plain:train", 1, tmp_path / "whole")[0]
    divided = worlds.run("plain:train", 2, tmp_path / "divided", cp=2)[0]
    assert divided == pytest.approx(whole, rel=1e-5)


@pytest.mark.chaos
@pytest.mark.parametrize("model", [PARTS, SHARDED])
def test_checkpoints_do_not_depend_on_the_number_of_parts(model: dict[str, Any], tmp_path: Path) -> None:
    options = {**model, "toy": {"double": True, "layers": 2}, "dp": 1, "accumulation": 4}
    whole = {**options, "cp": 1, "pp": 2}
    first = train(tmp_path / "first", 2, **options, steps=6, save_every=2, beside=True)
    saved = str(tmp_path / "first" / "checkpoints" / "step=2.ckpt")
    second = train(tmp_path / "second", 2, **whole, steps=4, save_every=2, resume=saved)
    saved = str(tmp_path / "second" / "checkpoints" / "step=4.ckpt")
    third = train(tmp_path / "third", 2, **options, steps=6, resume=saved)
    assert [*second, *third] == [2, 3, 4, 5]
    norms = [note["norm"] for note in (*second.values(), *third.values())]
    assert norms == pytest.approx([first[step]["norm"] for step in range(2, 6)], rel=1e-6)


def test_layouts_beside_parts_that_are_refused() -> None:
    config, shape = SimpleNamespace(hierarchical_context_parallel_sizes=[1, 2]), Shape(tensor=1, context=2, replicas=2)
    with pytest.raises(ConfigError, match=r"hierarchical_.*=.* with context_parallel_size=2: .*; expected None"):
        check_context(config, shape)
    check_context(config, replace(shape, context=1))
    with pytest.raises(ConfigError, match=r"context_parallel_size=2 with expert_model_parallel_size=3: .*; expected"):
        UnicronMegatronStrategy(context_parallel_size=2, expert_model_parallel_size=3)
