"""Wrong gradients of a replica of a Megatron model: it is found before the reduction; nothing of it is in the model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from system.cluster import Cluster
from system.healing import check
from system.megatron import MODEL, SCRIPT, ZERO1, notes

from unicron_lightning.errors import ConfigError

pytest.importorskip("megatron.core.package_info")

from unicron_lightning.megatron.gradients import MainGradients
from unicron_lightning.strategies.megatron.checks import check_witness

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


def gradients() -> tuple[MainGradients, torch.Tensor]:
    """Sums over one bucket, and its memory, which Megatron's schedules would add to."""
    sums = torch.tensor([1.0, 2.0])
    group = SimpleNamespace(
        buckets=[SimpleNamespace(grad_data=sums)], params=[], start_grad_sync=None, grad_reduce_handle=None
    )
    config = SimpleNamespace(overlap_grad_reduce=True)
    ddp: Any = SimpleNamespace(ddp_config=config, bucket_groups=[group], expert_parallel_bucket_groups=[])
    return MainGradients([ddp], 2), sums


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_of_a_row_alone_within_a_call_and_after_the_calls(nested: bool, adds: bool) -> None:
    made, sums = gradients()
    with made.apart() if nested else nullcontext():
        sums += 4.0  # an earlier row
        with made.apart(adds=adds):
            sums += 16.0
            [alone] = made.present().values()
            assert alone.tolist() == [16.0, 16.0]
    row = 16.0 if adds else 0.0
    assert sums.tolist() == [5.0 + row, 6.0 + row]


@pytest.mark.parametrize("nested", [False, True])
def test_a_failure_in_a_row_alone_leaves_the_sums_of_completed_calls(nested: bool) -> None:
    made, sums = gradients()

    def fail() -> None:
        with made.apart() if nested else nullcontext(), made.apart(adds=False):
            sums.add_(16.0)
            raise RuntimeError("a partner was lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    made.recover()
    assert sums.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("setting", ["num_moe_experts", "virtual_pipeline_model_parallel_size"])
def test_models_without_rows_that_others_can_repeat_are_refused(setting: str) -> None:
    config = SimpleNamespace(**{setting: 2})
    with pytest.raises(ConfigError, match=rf"{setting}=2 with witness_every=3: .*; expected None"):
        check_witness(3, config)
    check_witness(0, config)


@pytest.mark.parametrize(
    ("different", "shard", "kind"),
    [
        ({"dp": 3, "toy": {"double": True}, "optimizer": {"clip_grad": 0.0}}, 0, "weight"),
        pytest.param({"pp": 2, "toy": {"dropout": 0.1}}, 1, "gradient", marks=pytest.mark.chaos),
        pytest.param(
            {"tp": 2, "toy": {"sequence_parallel": True, "bf16": True}, "ddp": {"overlap_grad_reduce": True}},
            0,
            "activation",
            marks=pytest.mark.chaos,
        ),
        pytest.param({"pp": 2, **ZERO1}, 0, "gradient", marks=pytest.mark.chaos),
        pytest.param(
            {"cp": 2, "toy": {"double": True, "dropout": 0.1, "layers": 2}, "optimizer": {"clip_grad": 0.0}},
            1,
            "gradient",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_a_wrong_replica_never_enters_a_step(
    different: dict[str, Any], shard: int, kind: str, tmp_path: Path, worlds: Any
) -> None:
    """The nodes of its workers are cordoned; the others end as a run without the fault does."""
    model = {**MODEL, **different}
    replicas, size = model["dp"], model["tp"] * model["pp"] * model.get("cp", 1)
    wrong, number = replicas - 1, replicas * size
    settings = {**model, "steps": 6, "finish": True, "witness": 2, "flips": [wrong, shard, kind]}
    settings = {**settings, "full": number, "slow": 5.0}
    nodes = f"{size}:{number}"
    with Cluster(tmp_path, script=SCRIPT, agents=number, nodes=nodes, settings=settings) as cluster:
        cluster.wait_end(300)
        suspects = [each["details"]["suspect"] for each in cluster.events("error_reported") if each["details"]]
        cordoned = {each["node"] for each in cluster.events("node_cordoned")}
    [(step, right)] = {(each["step"], each["last_right"]) for each in suspects}
    before = [note for note in notes(tmp_path, "step") if note["step"] == step - 2 and note["replica"] == wrong]
    assert right == step - 2 and len(before) == size
    assert cordoned == {note["node"] for note in before} == {each["node"] for each in suspects}
    check(tmp_path, model, worlds, 1e-9 if model["toy"].get("double") else 0.0, replicas=wrong)
