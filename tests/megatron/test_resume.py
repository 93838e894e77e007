"""Checkpoints of the strategy: written through a death, and loaded in another layout, which changes TP and PP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.healing import check
from system.megatron import EXPERTS, MODEL, ZERO1, ZERO1_EXPERTS, differences, finals, train

pytest.importorskip("megatron.core.package_info")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("train.py")
STEPS = 6


@pytest.mark.chaos
def test_a_change_of_layout_goes_through_a_checkpoint(tmp_path: Path) -> None:
    died = {"point": "checkpoint", "replica": 1, "shard": 0}
    first = train(
        tmp_path / "first",
        2,
        tp=1,
        pp=1,
        dp=2,
        accumulation=2,
        steps=STEPS,
        save_every=3,
        schedule=[died],
        finish=False,
        full=2,
        slow=60.0,  # after the death the next step waits for the second worker, so both write the second checkpoint
    )
    assert (tmp_path / "first" / "struck-0").exists()
    saved = sorted(path.name for path in (tmp_path / "first" / "checkpoints").iterdir())
    assert saved == ["step=3.ckpt", "step=6.ckpt"]
    path = str(tmp_path / "first" / "checkpoints" / "step=3.ckpt")
    second = train(tmp_path / "second", 2, tp=1, pp=2, dp=1, accumulation=4, steps=STEPS, resume=path)
    assert sorted(second) == list(range(3, STEPS))
    for step, line in second.items():
        assert line["norm"] == pytest.approx(first[step]["norm"], rel=1e-5)
        assert line["loss"] == pytest.approx(first[step]["loss"], rel=1e-5)


@pytest.mark.chaos  # test_checkpoint.py loads such folders in other layouts, too
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("zero1", [False, True])
def test_experts_are_saved_once_each_and_loaded_in_another_layout(
    tmp_path: Path, beside: bool, zero1: bool, worlds: Any
) -> None:
    """Four lanes in each layout: two replicas of two workers, and one of four."""
    world = {**EXPERTS, **(ZERO1_EXPERTS if zero1 else {}), "ep": 2, "dp": 2, "finish": False, "steps": 4}
    first = train(tmp_path / "first", 4, **world, save_every=2, beside=beside)
    check(tmp_path / "first", world, worlds)
    path = str(tmp_path / "first" / "checkpoints" / "step=2.ckpt")
    for name, different in (("same", {"ep": 2, "dp": 2}), ("wider", {"ep": 4, "dp": 1})):
        again = train(tmp_path / name, 4, **{**world, **different}, resume=path)
        assert sorted(again) == [2, 3]
        for value in ("loss", "norm"):
            assert [again[step][value] for step in (2, 3)] == pytest.approx([first[step][value] for step in (2, 3)])
    assert set(differences(finals(tmp_path / "same")[1], tmp_path / "first" / "plain").values()) == {0.0}


@pytest.mark.chaos
def test_a_joiner_does_not_load_the_checkpoint_of_its_script(tmp_path: Path) -> None:
    """The step after the death waits for the joiner."""
    world = {"tp": 1, "pp": 1, "dp": 2, "accumulation": 2, "steps": STEPS, "finish": False, "full": 2, "slow": 60.0}
    first = train(tmp_path / "first", 2, **world, save_every=2)
    path = str(tmp_path / "first" / "checkpoints" / "step=2.ckpt")
    died = {"point": "reduce", "replica": 1, "shard": 0, "from_step": 3}
    second = train(tmp_path / "second", 2, **world, resume=path, schedule=[died])
    assert (tmp_path / "second" / "struck-0").exists()
    assert sorted(second) == list(range(2, STEPS))
    for step, line in second.items():
        assert line["norm"] == pytest.approx(first[step]["norm"], rel=1e-5)


@pytest.mark.chaos
def test_loaders_with_a_stream_resume_within_a_data_epoch(tmp_path: Path, worlds: Any) -> None:
    """An epoch has four steps, the last one of one micro-batch."""
    data = {"dp": 2, "accumulation": 2, "stream": True, "several": True, "steps": STEPS}
    first = train(tmp_path / "first", 2, tp=1, pp=1, **data, save_every=2)
    check(tmp_path / "first", {**MODEL, **data}, worlds)
    path = str(tmp_path / "first" / "checkpoints" / "step=2.ckpt")
    second = train(tmp_path / "second", 4, tp=1, pp=2, **data, resume=path)
    assert sorted(second) == list(range(2, STEPS))
    for step, line in second.items():
        assert line["norm"] == pytest.approx(first[step]["norm"], rel=1e-5)
        assert line["loss"] == pytest.approx(first[step]["loss"], rel=1e-5)


@pytest.mark.parametrize("beside", [pytest.param(False, marks=pytest.mark.chaos), True])
def test_a_task_without_survivors_goes_on_from_its_newest_checkpoint(tmp_path: Path, beside: bool) -> None:
    died = {"point": "forward", "replica": 0, "shard": 0, "from_step": 2, "after": "checkpoints/step=1.ckpt"}
    settings: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 1, "accumulation": 2, "steps": 3, "finish": False}
    steps = train(tmp_path / "task", 1, **settings, save_every=1, beside=beside, schedule=[died])
    notes = [json.loads(line) for path in (tmp_path / "task").glob("notes-*") for line in path.read_text().splitlines()]
    assert len([note for note in notes if note["what"] == "start"]) == 2
    done = sorted(note["step"] for note in notes if note["what"] == "step")
    # The checkpoint of step 1 was written just before the death and may not have been reported.
    assert done in ([0, 1, 2], [0, 1, 1, 2])
    assert sorted(steps) == [0, 1, 2]


def test_a_changed_checkpoint_is_skipped_for_an_older_one(tmp_path: Path) -> None:
    died = {"point": "forward", "replica": 0, "shard": 0, "from_step": 3}
    settings = {"tp": 1, "pp": 1, "dp": 1, "accumulation": 2, "steps": 4, "save_every": 1, "finish": False}
    with Cluster(tmp_path, script=SCRIPT, agents=1, nodes="1:1", schedule=[died], settings=settings) as cluster:
        cluster.watch(lambda: (tmp_path / "struck-0").exists(), "the death", 120, 120)
        for step in (2, 3):  # that of step 3 was written just before and may not have been reported
            with next((tmp_path / "checkpoints" / f"step={step}.ckpt").glob("*.distcp")).open("ab") as file:
                file.write(b"x")
        cluster.watch(lambda: all(agent.poll() is not None for agent in cluster.agents.values()), "the end", 240, 240)
        cluster.wait_end()
        rejected = {Path(event["path"]).name for event in cluster.events("worker.checkpoint_rejected")}
        assert "step=2.ckpt" in rejected <= {"step=2.ckpt", "step=3.ckpt"}
        assert sorted(note["step"] for note in cluster.notes("step")) == [0, 1, 1, 2, 2, 3]


VIRTUAL: dict[str, Any] = {"pp": 2, "vpp": 2, "dp": 1, "accumulation": 4}
PARTS: dict[str, Any] = {**MODEL, "cp": 2, "toy": {"double": True}, "optimizer": {"clip_grad": 0.0, "lr": 1e-3}}
SCALE = {"initial_loss_scale": 2.0**20, "loss_scale_window": 2, "hysteresis": 1}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "sharded experts of parts": {**EXPERTS, **ZERO1_EXPERTS, "cp": 2},
    "sharded virtual experts": {**EXPERTS, **ZERO1_EXPERTS, **VIRTUAL, "toy": {**EXPERTS["toy"], "layers": 4}},
    "virtual parts": {**PARTS, **VIRTUAL},
    "sharded fp16": {**MODEL, "toy": {"fp16": True}, "ddp": ZERO1["ddp"], "optimizer": {**ZERO1["optimizer"], **SCALE}},
}


@pytest.mark.chaos
@pytest.mark.parametrize("name", COMBINATIONS)
def test_layouts_together_resume(name: str, tmp_path: Path, worlds: Any) -> None:
    """From a checkpoint written beside the training, and from one of its callback, bit by bit."""
    world = {**COMBINATIONS[name], "finish": False}
    workers = world["pp"] * max(world.get("cp", 1), world.get("ep", 1)) * world["dp"]
    first = train(tmp_path / "first", workers, **world, steps=6, save_every=2, beside=True)
    check(tmp_path / "first", world, worlds)
    path = str(tmp_path / "first" / "checkpoints" / "step=2.ckpt")
    second = train(tmp_path / "second", workers, **world, steps=4, save_every=2, resume=path)
    path = str(tmp_path / "second" / "checkpoints" / "step=4.ckpt")
    third = train(tmp_path / "third", workers, **world, steps=6, resume=path)
    assert [*second, *third] == [2, 3, 4, 5]
    for value in ("loss", "norm"):
        found = [note[value] for note in (*second.values(), *third.values())]
        assert found == pytest.approx([first[step][value] for step in range(2, 6)], rel=1e-6, nan_ok=True)
    assert set(differences(finals(tmp_path / "third")[1], tmp_path / "first" / "plain").values()) == {0.0}
