"""Experts divided among the workers of a replica: SIGKILL of workers at every point of a step.

All is computed in float64, but Megatron's losses and routing probabilities, which are in float32: a sum in another
order rarely changes their last bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.healing import check, check_validation, healed
from system.megatron import EXPERTS, SCRIPT, ZERO1_EXPERTS, notes

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(850)]

CLOSE = 1e-10


def model_of(router: dict[str, Any], **different: Any) -> dict[str, Any]:
    """The settings of a model with other options of its routers."""
    return {**EXPERTS, "toy": {**EXPERTS["toy"], "router": router}, **different}


GATHERED = model_of({"moe_token_dispatcher_type": "allgather", "moe_aux_loss_coeff": 1e-2})
OVERLAPPED = model_of(
    {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_z_loss_coeff": 1e-3,
    },
    ddp={"overlap_grad_reduce": True},
    validate=2,
)
STREAMED = model_of({"moe_token_dispatcher_type": "allgather"}, stream=True)
"""Of the rows at the ends of streams, lanes have micro-batches that do not count."""


SLICED = model_of(
    # with this dispatcher, gloo gathers tokens of unequal numbers only if they are padded
    {
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 1e-2,
        "moe_z_loss_coeff": 1e-3,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    tp=2,
    ddp={"overlap_grad_reduce": True},
)
SLICED["toy"]["sequence_parallel"] = True
BIASED = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
}
STAGED = model_of(BIASED, pp=2, validate=2)
SHARDED = model_of(BIASED, **ZERO1_EXPERTS, validate=2)
"""With the distributed optimizer, in float64 as by `doubled`."""
SHARDED["ddp"] = {**SHARDED["ddp"], "overlap_grad_reduce": True}
SHARDED_SLICES = {**SLICED, **ZERO1_EXPERTS}
SHARDED_STAGES = {**STAGED, **ZERO1_EXPERTS}
PARTS = model_of(BIASED, cp=2, validate=2)
"""Two workers divide each sequence, and the experts."""
SHARDED_PARTS = {**PARTS, **ZERO1_EXPERTS, "cp": 4}
VIRTUAL = {**STAGED, "vpp": 2, "toy": {**STAGED["toy"], "layers": 4}}
SCALED = model_of(
    {"moe_token_dispatcher_type": "allgather", "moe_aux_loss_coeff": 1e-2},
    # the first steps overflow, since the losses are in float32, and later every third one or so
    optimizer={**EXPERTS["optimizer"], "initial_loss_scale": 2.0**127, "loss_scale_window": 2, "hysteresis": 1},
    ddp={"grad_reduce_in_fp32": False},
)
SCALED["toy"]["fp16"] = True
SCALED["toy"]["router"]["attention_softmax_in_fp32"] = False  # the attention would go on in fp16
"""With a loss scale, but in float64."""


def die(point: str, replica: int | None, shard: int, **where: Any) -> dict[str, Any]:
    return {"point": point, "replica": replica, "shard": shard, **where}


SCHEDULES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "gathered": (
        GATHERED,
        [
            die("forward", 0, 0, micro_batch=1),  # the first worker of all
            die("call", 1, 1),
            die("reduce", 0, 1),  # its partner is in the reduction of what both have
            die("reduced", 1, 0),
            die("update", 0, 1),
        ],
    ),
    "overlapped": (
        OVERLAPPED,
        [
            die("forward", 1, 1, micro_batch=1),
            die("validate", 1, 0, micro_batch=1),  # its partner has a batch of the same row
            die("gate", 0, 0),
            die("committed", 0, 1, breaks=True),
        ],
    ),
    "single": (
        GATHERED,
        [
            die("forward", 0, 0, micro_batch=1),
            # in the single replica that is left, whose lanes sum their gradients; its partner waits for this worker
            die("reduce", 0, 1, at_once=True, breaks=True),
            die("commit", None, 1, at_once=True),  # the spare
            die("forward", 1, 1),
        ],
    ),
    "streamed": (
        STREAMED,
        [
            die("forward", 0, 1, from_step=3),
            die("reduced", 1, 0),
        ],
    ),
    "sliced": (
        SLICED,
        [
            die("forward", 0, 1, micro_batch=1),
            die("reduce", 1, 2),
            die("gate", 0, 3),
            die("update", 1, 0),
        ],
    ),
    "staged": (
        STAGED,
        [
            die("forward", 0, 2, micro_batch=1),
            die("reduced", 1, 1),
            die("commit", 0, 0),
        ],
    ),
    "sharded": (
        SHARDED,
        [
            die("forward", 0, 0, micro_batch=1),
            die("reduce", 1, 1),
            die("updated", 0, 1),
            die("kept", 1, 0),
            die("committed", 0, 0),
            die("commit", None, 1, at_once=True),  # the spare
            die("forward", 1, 1),
        ],
    ),
    "sharded slices": (
        SHARDED_SLICES,
        [
            die("updated", 0, 1),
            die("kept", 1, 2),
            die("gate", 0, 3),
        ],
    ),
    "sharded stages": (
        SHARDED_STAGES,
        [
            die("updated", 0, 2),
            die("reduced", 1, 1),
            die("kept", 0, 0),
        ],
    ),
    "virtual": (
        VIRTUAL,
        [
            die("forward", 0, 1, micro_batch=2),
            die("validate", 1, 2, micro_batch=3),
            die("reduced", 1, 3),
            die("commit", 0, 0),
        ],
    ),
    "scaled": (
        SCALED,
        [
            die("gate", 0, 1),
            die("commit", 1, 0),
            die("committed", 0, 0),
            die("reduced", 1, 1),
        ],
    ),
    "parts": (
        PARTS,
        [
            die("forward", 0, 1, micro_batch=1),
            die("reduced", 1, 0),
            die("validate", 0, 0, micro_batch=1),
        ],
    ),
    "sharded parts": (
        SHARDED_PARTS,
        [
            die("updated", 0, 2),
            die("kept", 1, 1),
        ],
    ),
    "biased": (
        EXPERTS,
        [
            die("forward", 1, 0, micro_batch=1),  # tokens of an unfinished call have been counted
            die("reduced", 0, 1),
            die("commit", 1, 1),
            die("committed", 0, 0),
        ],
    ),
}
IN_CI = ("biased",)


@pytest.mark.chaos
@pytest.mark.parametrize("name", SCHEDULES)
def test_without_failures_it_is_megatrons_own_run(name: str, tmp_path: Path, worlds: Any) -> None:
    model, _ = SCHEDULES[name]
    workers = model["tp"] * model["pp"] * max(model["ep"], model.get("cp", 1)) * model["dp"]
    settings, nodes = {**model, "steps": 6}, f"{workers}:{workers}"
    with Cluster(tmp_path, script=SCRIPT, agents=workers, nodes=nodes, schedule=[], settings=settings) as cluster:
        cluster.wait_end(200)
    check_experts(tmp_path, model, worlds, within=0.0)


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.chaos) for name in SCHEDULES]
)
def test_kills_heal(name: str, tmp_path: Path, worlds: Any) -> None:
    model, schedule = SCHEDULES[name]
    shards = model["tp"] * model["pp"] * max(model["ep"], model.get("cp", 1))
    workers, nodes = shards * model["dp"], f"{shards * model['dp'] - 1}:{shards * model['dp']}"
    settings = {**model, "steps": 6, "finish": True, "full": workers, "slow": 0.05}
    agents = workers + 1
    with Cluster(tmp_path, script=SCRIPT, agents=agents, nodes=nodes, schedule=schedule, settings=settings) as cluster:
        cluster.watch(lambda: healed(cluster, tmp_path, len(schedule)), "all faults, and their ends", 600, 200)
        (tmp_path / "finish").touch()
        cluster.wait_exit(150)
        names = [event["name"] for event in cluster.events()]
        cluster.wait_end()
    assert "task_restarts" not in names
    check_experts(tmp_path, model, worlds, within=CLOSE)


def check_experts(folder: Path, model: dict[str, Any], worlds: Any, within: float) -> None:
    """The whole state, norms, auxiliary losses and validations are those of a plain Megatron loop."""
    check(folder, model, worlds, within)
    columns = max(model["ep"], model.get("cp", 1))
    last = model["tp"] * columns * model["dp"] * (model["pp"] - 1)  # first rank of the last stage
    expected = json.loads((folder / "plain" / f"balance-{last}").read_text())
    logged = {note["step"]: note["balance"] for note in notes(folder, "step")}
    assert [logged[step] for step in sorted(logged)] == pytest.approx(expected, rel=1e-6)
    if "validate" in model:
        check_validation(folder, model)
