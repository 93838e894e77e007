"""Virtual pipeline stages, which Megatron's interleaved schedule runs: SIGKILL of workers at every point of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from system.cluster import Cluster
from system.healing import check, check_validation, healed
from system.megatron import MODEL, SCRIPT, ZERO1, train

pytest.importorskip("megatron.core.package_info")

from unicron_lightning import UnicronMegatronStrategy, wire
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.model import interleaving
from unicron_lightning.replica.layout import Shape
from unicron_lightning.strategies.megatron.checks import check_virtual_stages

pytestmark = [pytest.mark.faults, pytest.mark.timeout(850)]

INTERLEAVED: dict[str, Any] = {**MODEL, "pp": 2, "vpp": 2, "accumulation": 2, "toy": {"dropout": 0.1}}
"""Two stages of two virtual ones; two micro-batches are the fewest of a call of the schedule."""


def die(point: str, replica: int | None, shard: int, **where: Any) -> dict[str, Any]:
    return {"point": point, "replica": replica, "shard": shard, **where}


SCHEDULES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "interleaved": (
        {**INTERLEAVED, "validate": 2, "several": True},
        [
            die("forward", 0, 0, micro_batch=1),  # the first worker of all
            die("forward", 1, 1, micro_batch=2),  # the last stage, in its second virtual stage
            die("validate", 1, 0, micro_batch=3),
            die("gate", 1, 1),
            die("commit", 1, 0),
            die("committed", 0, 0, breaks=True),  # its partner is in the next call, and waits for this worker
        ],
    ),
    "streamed": (
        {**INTERLEAVED, "stream": True, "validate": 4},
        [
            # in the fourth step, whose single micro-batch is the first replica's: the schedule repeats it
            die("forward", 0, 0, from_step=3),
            die("update", 0, 1),
            die("validate", 0, 1, micro_batch=3),
            die("reduce", 1, 0),
            die("commit", None, 1, at_once=True),  # the spare
        ],
    ),
    "grouped": (
        {**INTERLEAVED, "accumulation": 3, "toy": {"bf16": True}, "ddp": {"overlap_grad_reduce": True}},
        [
            die("forward", 1, 0, micro_batch=4),  # in its second virtual stage
            die("reduced", 0, 1),
            die("committed", 1, 1),
        ],
    ),
    "sharded": (
        {**INTERLEAVED, **ZERO1, "stream": True, "validate": 4},
        [
            die("forward", 0, 0, from_step=3),
            die("reduce", 1, 1),
            die("updated", 0, 1),
            die("kept", 1, 0),
            die("commit", None, 1, at_once=True),  # the spare
        ],
    ),
}
IN_CI = ("interleaved",)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_calls_have_numbers_that_the_schedule_accepts(stages: int) -> None:
    for configured in (stages, stages + 1):
        config = SimpleNamespace(pipeline_model_parallel_size=stages, microbatch_group_size_per_vp_stage=configured)
        for number in range(1, 4 * stages):
            run, group = interleaving(number, config)
            assert run == max(number, stages)
            assert stages <= group <= run and not 0 < run % group < stages  # Megatron's own conditions
            if run >= configured and not 0 < run % configured < stages:
                assert group == configured


@pytest.mark.parametrize(
    ("settings", "device", "named"),
    [
        ({"overlap_p2p_comm": False, "batch_p2p_comm": True}, "cpu", "overlap_p2p_comm=False"),
        ({"batch_p2p_comm": True}, "cpu", "batch_p2p_comm=True"),
        ({}, "cuda", "accelerator='cuda'"),
    ],
)
def test_settings_beside_virtual_stages_are_refused(settings: dict[str, Any], device: str, named: str) -> None:
    config = SimpleNamespace(**{"overlap_p2p_comm": True, "batch_p2p_comm": False, **settings})
    shape = Shape(tensor=1, pipeline=2, virtual=2, replicas=2)
    with pytest.raises(ConfigError, match=f"{named} with virtual_pipeline_model_parallel_size=2: .*; expected"):
        check_virtual_stages(config, shape, torch.device(device))
    check_virtual_stages(config, replace(shape, virtual=1), torch.device(device))


def test_a_layout_of_one_stage_has_no_virtual_ones() -> None:
    shape = Shape(tensor=1, pipeline=2, virtual=2, replicas=2)
    assert shape.relaid(wire.Layout(tensor=1, pipeline=4)).virtual == 2
    assert shape.relaid(wire.Layout(tensor=2, pipeline=1)).virtual == 1
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size=1: one stage runs no pipeline"):
        UnicronMegatronStrategy(virtual_pipeline_model_parallel_size=2)


@pytest.mark.chaos
@pytest.mark.parametrize("model", [{"optimizer": {"clip_grad": 0.0}}, ZERO1])
def test_virtual_stages_load_checkpoints_of_other_layouts_and_the_reverse(
    model: dict[str, Any], tmp_path: Path
) -> None:
    double = {"toy": {"double": True}, **model, "tp": 1, "dp": 1, "accumulation": 4}
    virtual = {**double, "pp": 2, "vpp": 2}
    first = train(tmp_path / "first", 2, **virtual, steps=6, save_every=2, beside=True)
    saved = str(tmp_path / "first" / "checkpoints" / "step=2.ckpt")
    second = train(tmp_path / "second", 2, **double, pp=2, steps=4, save_every=2, resume=saved)
    saved = str(tmp_path / "second" / "checkpoints" / "step=4.ckpt")
    third = train(tmp_path / "third", 2, **virtual, steps=6, resume=saved)
    assert [*second, *third] == [2, 3, 4, 5]
    norms = [note["norm"] for note in (*second.values(), *third.values())]
    assert norms == pytest.approx([first[step]["norm"] for step in range(2, 6)], rel=1e-6)


@pytest.mark.chaos  # the kills below are compared with that run, too
def test_without_failures_it_is_megatrons_own_run(tmp_path: Path, worlds: Any) -> None:
    double = {"toy": {"double": True, "dropout": 0.1}, "optimizer": {"clip_grad": 0.0}}
    model = {**INTERLEAVED, **double, "ddp": {"overlap_grad_reduce": True}}
    settings = {**model, "steps": 6}
    with Cluster(tmp_path, script=SCRIPT, agents=4, nodes="4:4", schedule=[], settings=settings) as cluster:
        cluster.wait_end(200)
    check(tmp_path, model, worlds)


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos) for name in SCHEDULES]
)
def test_kills_heal_bit_by_bit(name: str, tmp_path: Path, worlds: Any) -> None:
    model, schedule = SCHEDULES[name]
    settings = {**model, "steps": 6, "finish": True, "full": 4, "slow": 0.05}
    with Cluster(tmp_path, script=SCRIPT, agents=5, nodes="3:4", schedule=schedule, settings=settings) as cluster:
        cluster.watch(lambda: healed(cluster, tmp_path, len(schedule)), "all faults, and their ends", 600, 200)
        (tmp_path / "finish").touch()
        cluster.wait_exit(150)
        names = [event["name"] for event in cluster.events()]
        cluster.wait_end()
    assert "task_restarts" not in names
    check(tmp_path, model, worlds)
    if "validate" in model:
        check_validation(tmp_path, model)
