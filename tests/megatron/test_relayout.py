"""An order of the operator, or of the plan, changes TP, PP and EP of a running task: no step is lost, and failures are
recovered from as before.
"""

from __future__ import annotations

import json
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from system.cluster import Cluster
from system.megatron import EXPERTS, MODEL, SCRIPT, ZERO1, ZERO1_EXPERTS, differences, finals, notes, wait_replicas

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import kill

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

# Rounding differences grow with the learning rate and with the number of steps, so the steps are few and slow.
SETTINGS: dict[str, Any] = {**MODEL, "pp": 2, **ZERO1, "optimizer": {**ZERO1["optimizer"], "lr": 1e-4}}
RUN: dict[str, Any] = {"steps": 8, "finish": True, "full": 5, "slow": 0.4, "save_every": 10_000, "unfit": [2, 2]}
DIES: dict[str, Any] = {"point": "checkpoint", "replica": 1, "shard": 0}
"""A death while the order is being carried out."""
SHAPE: dict[str, Any] = {"num_layers": 28, "hidden_size": 4096, "num_heads": 32, "sequence_length": 2048,
                         "vocabulary_size": 51200, "global_batch_size": 8, "micro_batch_size": 2,
                         "accelerator": "A100"}  # fmt: skip
"""A model that fits into an A100 with its optimizer's state divided among four workers, and not among two."""


@pytest.mark.chaos
def test_pipelines_become_slices_without_losing_a_step(tmp_path: Path, worlds: Any) -> None:
    settings = {**SETTINGS, **RUN}
    with Cluster(tmp_path, script=SCRIPT, agents=4, nodes="3:4", schedule=[DIES], settings=settings) as cluster:
        wait_replicas(cluster, tp=1, after=time.time())
        with pytest.raises(AssertionError, match="relayout task --tp 1 --pp 8: unicron: "):
            cluster.order("relayout", "task", "--tp", "1", "--pp", "8")
        assert not cluster.events("layout_ordered")
        cluster.order("relayout", "task", "--tp", "2", "--pp", "2")
        (given_up,) = cluster.watch(lambda: cluster.events("layout_abandoned"), "the layout's end", 300, 150)
        wait_replicas(cluster, tp=1, after=given_up["at"])
        cluster.order("relayout", "task", "--tp", "2", "--pp", "1")
        moved = wait_replicas(cluster, tp=2, after=time.time())
        kill(moved[-1]["pid"], signal.SIGKILL)
        healed = wait_replicas(cluster, tp=2, after=time.time())
        (tmp_path / "finish").touch()
        cluster.wait_exit(150)
        events = cluster.events()
        cluster.wait_end()
    assert {note["pid"] for note in moved} & {note["pid"] for note in healed}, "healed in process"
    check_log(tmp_path, events)
    check_numbers(tmp_path, worlds)


def check_log(folder: Path, events: list[dict[str, Any]]) -> None:
    """Two orders, one of which is cancelled; a new life for each, and for the return; each step done once."""
    named = {event["name"]: event for event in events}
    changes = ["layout_ordered", "layout_changes"]
    told = [event["name"] for event in events if event["name"].startswith("layout_")]
    assert told == [*changes, "layout_abandoned", *changes]
    assert "no model with tp=2, pp=2" in named["error_reported"]["cause"]
    restarts = [event for event in events if event["name"] == "task_restarts"]
    assert len(restarts) == 3 and (folder / "struck-0").exists()
    assert named["layout_changes"]["before"] == {"tp": 1, "pp": 2}
    step = named["layout_changes"]["step"]
    assert restarts[2]["path"] == str(folder / "checkpoints" / f"relayout-step={step}.ckpt")
    assert restarts[0]["path"] == restarts[1]["path"]
    closed = {event["incident"]: event["outcome"] for event in events if event["name"] == "incident_closed"}
    assert {event["incident"] for event in events} - {None} == set(closed) == {"i1", "i2", "i3"}
    assert closed["i1"] == closed["i3"] == "restored", "two deaths; between them nobody could build the model"
    done = {tp: {note["step"] for note in notes(folder, "step") if note["tp"] == tp} for tp in (1, 2)}
    assert done[1] == set(range(step)) and min(done[2]) == step
    assert done[2] == set(range(step, max(done[2]) + 1))


def check_numbers(folder: Path, worlds: Any) -> None:
    """Norms and parameters equal those of a plain loop in the first layout, except for rounding."""
    last, paths = finals(folder)
    norms = worlds.run("reference:run", 4, folder / "plain", settings=SETTINGS, steps=[last])[0]
    logged = {note["step"]: note["norm"] for note in notes(folder, "step")}
    assert [logged[number] for number in range(last)] == pytest.approx(norms, rel=1e-5)
    plain = {}
    for stage in range(2):
        for name, value in torch.load(folder / "plain" / f"plain-{last}-{stage}.pt").items():
            plain[in_one_stage(name, 2 * stage)] = value
    for replica in range(2):
        slices = [torch.load(path)["parameters"] for path in paths if path.stem.split("-")[2] == str(replica)]
        assert len(slices) == 2
        for name in slices[0]:
            values = [each[name] for each in slices]
            joint = together(values, plain[name].shape)
            assert float((joint - plain[name]).abs().max()) < 1e-5, name


def in_one_stage(name: str, first: int) -> str:
    """A parameter's name if all layers are in one stage; ``first`` is the first layer of its stage."""
    head, mark, rest = name.partition("decoder.layers.")
    if not mark:
        return name
    number, _, tail = rest.partition(".")
    return f"{head}{mark}{int(number) + first}.{tail}"


def together(values: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """A parameter assembled from its slices; one that each worker has completely must be the same on all."""
    if values[0].shape == shape:
        assert all(torch.equal(value, values[0]) for value in values)
        return values[0]
    dim = next(dim for dim, size in enumerate(shape) if size != values[0].shape[dim])
    return torch.cat(values, dim)


@pytest.mark.chaos
def test_the_plan_chooses_the_layout_for_each_number_of_slots(tmp_path: Path, worlds: Any) -> None:
    """A job that states its model's shape gets slices with two slots, and whole replicas with four."""
    settings = {**SETTINGS, "pp": 1, "dp": 4, "accumulation": 1}
    (tmp_path / "settings.json").write_text(json.dumps({**settings, **RUN, "full": 4}))
    (tmp_path / "schedule.json").write_text("[]")
    with LocalCluster(nodes=2, folder=tmp_path) as cluster:
        about = {"min_nodes": 2, "max_nodes": 4, "transformer": SHAPE, "auto_layouts": True}
        cluster.submit("task", [SCRIPT, tmp_path], **about)
        cluster.until("slices", lambda: any(note["tp"] == 2 for note in notes(tmp_path, "step")), 300)
        for _ in range(2):
            cluster.add_node()
        cluster.until("whole replicas", lambda: len(cluster.events("layout_changes")) == 2, 300)
        (tmp_path / "finish").touch()
        cluster.wait_state("succeeded", 300, task="task")
        orders, changes = (cluster.events(name) for name in ("layout_ordered", "layout_changes"))
    whole, slices = {"tp": 1, "pp": 1}, {"tp": 2, "pp": 1}
    assert [event["fields"] for event in orders] == [
        {**slices, "before": whole, "by": "plan"},
        {**whole, "before": slices, "by": "plan"},
    ]
    last, paths = finals(tmp_path)
    first, second = (event["fields"]["step"] for event in changes)
    done = {tp: {note["step"] for note in notes(tmp_path, "step") if note["tp"] == tp} for tp in (1, 2)}
    assert done == {1: {*range(first), *range(second, last)}, 2: {*range(first, second)}}
    worlds.run("reference:run", 4, tmp_path / "plain", settings=settings, steps=[last])
    found = differences(paths, tmp_path / "plain")
    assert len(found) == 4 and max(found.values()) < 1e-5, found


# ---- combinations of layouts, without failures

DOUBLE: dict[str, Any] = {**MODEL, "toy": {"double": True}, "optimizer": {"clip_grad": 0.0, "lr": 1e-3}}
SHARDED = {"ddp": ZERO1["ddp"], "optimizer": {**DOUBLE["optimizer"], **ZERO1["optimizer"]}}
STAGED_EXPERTS = {**EXPERTS, "pp": 2, "dp": 1, "accumulation": 4, "toy": {**EXPERTS["toy"], "layers": 4}}
SCALE = {"initial_loss_scale": 2.0**8, "loss_scale_window": 2}
"""Overflows in none of the steps: with more replicas, a micro-batch's scaled loss is larger."""
Orders = list[dict[str, int]]
COMBINATIONS: dict[str, tuple[dict[str, Any], Orders]] = {
    "virtual": ({**DOUBLE, **SHARDED, "pp": 2, "vpp": 2}, [{"tp": 1, "pp": 1}, {"tp": 1, "pp": 2}]),
    "experts": (
        {**EXPERTS, **ZERO1_EXPERTS},
        [{"tp": 1, "pp": 1, "ep": 1}, {"tp": 1, "pp": 1, "ep": 4}, {"tp": 1, "pp": 2, "ep": 2}],
    ),
    "staged experts": (
        {**STAGED_EXPERTS, **ZERO1_EXPERTS, "vpp": 2},
        [{"tp": 1, "pp": 1}, {"tp": 1, "pp": 2, "ep": 1}, {"tp": 1, "pp": 2, "ep": 2}],
    ),
    "fp16": (
        {**DOUBLE, "ddp": ZERO1["ddp"], "pp": 2, "toy": {"fp16": True}, "optimizer": {**SHARDED["optimizer"], **SCALE}},
        [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 1}],
    ),
    "parts": ({**DOUBLE, **SHARDED, "cp": 2, "pp": 2, "dp": 1}, [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 1}]),
    "parts of experts": (
        {**EXPERTS, **ZERO1_EXPERTS, "cp": 2, "accumulation": 4},
        [{"tp": 1, "pp": 2}, {"tp": 1, "pp": 1, "ep": 4}, {"tp": 1, "pp": 1, "ep": 1}],
    ),
}


@pytest.mark.chaos
@pytest.mark.parametrize("name", COMBINATIONS)
def test_layouts_follow_each_other(name: str, tmp_path: Path, worlds: Any) -> None:
    """Four workers, in all orders; norms are those of a plain loop in the first layout."""
    model, orders = COMBINATIONS[name]
    settings = {**model, "steps": 4, "finish": True, "full": 4, "pace": 0.2, "save_every": 10_000}
    with Cluster(tmp_path, script=SCRIPT, agents=4, nodes="4:4", schedule=[], settings=settings) as cluster:
        parts = model.get("cp", 1)
        workers = model["pp"] * max(parts, model.get("ep", 1))
        wait_replicas(cluster, 4 // workers, workers=workers)
        experts = model.get("ep", 1)
        for sizes in orders:
            experts = sizes.get("ep", experts)
            workers = sizes["tp"] * sizes["pp"] * max(parts, experts)
            words = [word for name, size in sizes.items() for word in (f"--{name}", f"{size}")]
            cluster.order("relayout", "task", *words)
            changed = cluster.watch(partial(layout_of, cluster, sizes), f"{sizes}", 150)
            wait_replicas(cluster, 4 // workers, workers=workers, tp=sizes["tp"], after=changed["at"])
        (tmp_path / "finish").touch()
        cluster.wait_exit(150)
        assert not cluster.events("layout_abandoned")
        cluster.wait_end()
    last, _ = finals(tmp_path)
    logged = {note["step"]: note["norm"] for note in notes(tmp_path, "step")}
    done = [note["step"] for note in notes(tmp_path, "step") if note["rank"] == 0]
    assert done == list(range(last)), "each step once"
    norms = worlds.run("reference:run", 4, tmp_path / "plain", settings=model, steps=[last])[0]
    close = 1e-2 if "fp16" in model["toy"] else 1e-5
    assert [logged[number] for number in range(last)] == pytest.approx(norms, rel=close, nan_ok=True)
    assert last > len(orders) + 2


def layout_of(cluster: Cluster, sizes: dict[str, int]) -> dict[str, Any] | None:
    """The newest change of the layout, if it is that to these sizes."""
    changes = cluster.events("layout_changes")
    same = changes and all(changes[-1].get(name, 1) == size for name, size in sizes.items())
    return changes[-1] if same else None
