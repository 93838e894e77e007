"""A sharded GPT with workers killed at every kind of place: parameters as those of a run in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsdp.judge import SCRIPT, alone, between_replicas, differences, notes
from fsdp.train import SETTINGS, Model, Text
from system.cluster import Cluster
from torch.utils.data import DataLoader

from unicron_lightning.fsdp.export import export_checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TOLERANCE = 1e-10


def die(point: str, replica: int, shard: int, **where: Any) -> dict[str, Any]:
    return {"point": point, "replica": replica, "shard": shard, **where}


def run(folder: Path, settings: dict[str, Any], schedule: list[dict[str, Any]], agents: int, nodes: str) -> None:
    options: dict[str, Any] = {
        "agents": agents,
        "nodes": nodes,
        "leaves": "pymp-*/listener-*",
    }  # of a loader's processes
    with Cluster(folder, script=SCRIPT, schedule=schedule, settings=settings, **options) as cluster:
        cluster.wait_end(500)
        names = [event["name"] for event in cluster.events()]
    assert "task_restarts" not in names


def check(folder: Path, settings: dict[str, Any], workers: int) -> dict[str, Any]:
    """Compare parameters and metrics at the end with those of a run in one process; return the reference."""
    [steps] = {note["step"] for note in notes(folder, "end")}
    reference = alone(folder / "alone", {**settings, "steps": steps})
    found = differences(folder, reference)
    assert len(found) == workers and max(found.values()) < TOLERANCE, found
    assert not between_replicas(folder)
    expected = {note["step"]: note for note in notes(folder / "alone", "validated")}
    passes = [
        note for note in notes(folder, "validated") if note["step"] in expected
    ]  # one more may follow the last step
    assert {note["step"] for note in passes} == expected.keys()
    for name in ("val_loss", "val_samples"):
        assert all(abs(note[name] - expected[note["step"]][name]) < 1e-9 for note in passes)
    own = torch.load(folder / "final-0-0.pt", weights_only=True)["metrics"]
    assert abs(own["loss_epoch"] - reference["metrics"]["loss_epoch"]) < 1e-9
    return reference


@pytest.mark.chaos  # the kills below are compared with one process, too
def test_an_undisturbed_run_equals_one_process(tmp_path: Path) -> None:
    settings = {"steps": 8, "full": 4, "validate": 3, "configures": False}
    run(tmp_path, settings, [], 4, "4:4")
    check(tmp_path, settings, 4)


@pytest.mark.chaos
@pytest.mark.parametrize("stream", [None, {}, {"num_workers": 1, "stateful": True}], ids=["index", "stream", "states"])
def test_kills_heal(tmp_path: Path, stream: dict[str, Any] | None) -> None:
    schedule = [
        die("forward", 0, 1),
        die("validation", 1, 0),
        die("reduce", 1, 1),
        die("commit", 0, 0),
    ]
    samples = 4096 if stream is None else 148  # a last step with one micro-batch of one sample from each device
    settings = {"steps": 12, "full": 4, "validate": 5, "stream": stream, "samples": samples, "reference": "unicron"}
    run(tmp_path, settings, schedule, 5, "2:4")
    struck = [note["point"] for note in notes(tmp_path, "fault")]
    assert struck == [fault["point"] for fault in schedule]
    if stream == {}:  # a joiner reads one stream, too, besides the check
        assert all(len({*path.read_text().split()} - {"0"}) <= 2 for path in tmp_path.glob("opened-*"))
    assert bool(list(tmp_path.glob("continued-*"))) == (stream is not None and "stateful" in stream)
    check(tmp_path, settings, 4)


def test_kills_heal_with_groups_like_those_of_nccl(tmp_path: Path) -> None:
    """Also of a module with parameters of its own, which are whole, beside checkpoints on disk and in memory."""
    schedule = [
        die("all-gather", 0, 1, nth=3),
        die("reduce-scatter", 1, 0, nth=5),
        die("reduction", 0, 0, nth=1),
        die("norm", 1, 1),
        die("validation", 0, 1),
        die("commit", 1, 0),
    ]
    settings = {"steps": 12, "full": 4, "validate": 5, "stand_in": True, "several": True, "tied": False}
    settings |= {"own": "whole", "save_every": 4, "memory": [3, 1]}
    settings["options"] = {"digest_every": 1, "save_distributed_checkpoint": True}
    run(tmp_path, settings, schedule, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in schedule]
    assert list(tmp_path.glob("garbage-*")), "no collective of a survivor was aborted"
    check(tmp_path, settings, 4)


WITNESSED = {"options": {"witness_every": 2, "digest_every": 0}, "dropout": 0.1, "reference": "unicron"}


@pytest.mark.chaos
def test_a_replica_whose_results_are_wrong_is_found_and_leaves_nothing_in_the_parameters(tmp_path: Path) -> None:
    """The nodes of both of its workers are cordoned; the other replica ends as one process does."""
    settings = {**WITNESSED, "steps": 10, "full": 2, "slow": 0.0, "flips": [1, 6]}
    with Cluster(tmp_path, script=SCRIPT, settings=settings, agents=4, nodes="2:4") as cluster:
        cluster.wait_end(300)
        suspects = [each["details"]["suspect"] for each in cluster.events("error_reported") if each["details"]]
        cordoned = {each["node"] for each in cluster.events("node_cordoned")}
    wrong = {note["node"] for note in notes(tmp_path, "step") if note["replica"] == 1}
    assert len(wrong) == 2 and cordoned == wrong == {each["node"] for each in suspects}
    assert {(each["step"], each["last_right"]) for each in suspects} == {(6, 4)}
    assert "witness_every=2: one replica has no witness" in "".join(path.read_text() for path in tmp_path.glob("*.log"))
    check(tmp_path, settings, 2)


@pytest.mark.chaos  # tests/cross has a death beside a witness of shards (dies_within_the_backward_of_a_lane), too
@pytest.mark.parametrize("slices", [1, 2])
def test_repetitions_leave_no_trace_through_kills(tmp_path: Path, slices: int) -> None:
    """Workers die before, in and after the comparison; nobody is blamed."""
    schedule = [die("forward", 0, 1), die("compared", 1, 0), die("reduce", 1, 1), die("commit", 0, 0)]
    settings = {**WITNESSED, "steps": 12, "full": 4 * slices, "slices": slices}
    run(tmp_path, settings, schedule, 4 * slices + 1, f"{2 * slices}:{4 * slices}")
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in schedule]
    check(tmp_path, settings, 4 * slices)


@pytest.mark.chaos
def test_compiled_blocks_and_gradients_clipped_by_value(tmp_path: Path) -> None:
    schedule = [die("backward", 1, 0), die("reduce-scatter", 0, 1)]
    settings = {"steps": 8, "full": 4, "compile": "aot_eager", "clips": "value", "clip": 1e-3}
    run(tmp_path, settings, schedule, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == ["backward", "reduce-scatter"]
    check(tmp_path, settings, 4)


@pytest.mark.chaos
def test_a_slow_replica_gets_fewer_rows_until_a_death(tmp_path: Path) -> None:
    """Shares by speed change the order of additions only; each epoch begins with equal ones."""
    options = {"rebalance": True}
    settings = {"steps": 24, "full": 4, "accumulation": 4, "drag": [1, 0.05], "options": options}
    schedule = [die("backward", 0, 1, from_step=16, nth=3)]
    with Cluster(tmp_path, script=SCRIPT, agents=5, nodes="2:4", schedule=schedule, settings=settings) as cluster:
        cluster.wait_end(300)
        shares = [event["shares"] for event in cluster.events("worker.rebalanced")]
    assert shares and all(sum(share) == 8 and share[0] > share[1] > 0 for share in shares), shares
    check(tmp_path, settings, 4)


@pytest.mark.chaos
def test_a_slow_worker_and_its_partner_are_stragglers(tmp_path: Path) -> None:
    settings = {"full": 4, "accumulation": 4, "drag": [1, 0.1, 0], "finish": True}
    with Cluster(tmp_path, script=SCRIPT, agents=4, nodes="4:4", settings=settings) as cluster:
        cluster.watch(lambda: len({event["worker"] for event in cluster.events("straggler")}) == 2, "stragglers", 60)
        (tmp_path / "finish").touch()
        cluster.wait_end(100)
        nodes = {event["node"] for event in cluster.events("straggler")}
        assert not cluster.events("error_reported"), "slow is no hang"
    assert nodes == {note["node"] for note in notes(tmp_path, "step") if note["replica"] == 1}


@pytest.mark.chaos
@pytest.mark.parametrize("way", ["stop", "hang", "lock"])
def test_a_frozen_worker_is_replaced(tmp_path: Path, way: str) -> None:
    """In forward, backward and reduce-scatter, each in a world whose steps have been timed."""
    points = ("forward", "backward", "reduce-scatter")
    schedule = [die(point, n % 2, n % 2, way=way, settled=12, nth=1) for n, point in enumerate(points)]
    settings = {"steps": 12, "full": 4}
    run(tmp_path, settings, schedule, 5, "2:4")
    faults, steps = notes(tmp_path, "fault"), notes(tmp_path, "step")
    assert [fault["point"] for fault in faults] == list(points)
    for fault in faults:
        later = min(step["at"] for step in steps if step["epoch"] > fault["epoch"])
        print(f"{way} in {fault['point']}: the next step {later - fault['at']:.2f} s later")
        assert later - fault["at"] < 20.0, "a third of the time-out, on any machine"
    check(tmp_path, settings, 4)


class Compare(pl.Callback):
    """Compares the parameters at the start of a run with a checkpoint's."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self._saved = saved
        self.steps = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        equal(module.state_dict(), self._saved["state_dict"])
        [optimizer] = trainer.optimizers
        for number, values in self._saved["optimizer_states"][0]["state"].items():
            equal(optimizer.state_dict()["state"][number], values)
        self.steps = trainer.global_step


def equal(values: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert values.keys() == expected.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


def in_one_process(path: Path, saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Load a checkpoint, and resume it for a step of as many batches as one of both workers."""
    batches = 2 * settings["accumulation"]
    counted = path.with_name("counted.ckpt")
    export_checkpoint(path, counted, batches=batches)
    loaded = Model.load_from_checkpoint(path, settings=settings, weights_only=True)
    equal(loaded.state_dict(), saved["state_dict"])
    check = Compare(saved)
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=5,
        accumulate_grad_batches=batches,
        enable_model_summary=False,
        callbacks=[check],
        **options,
    )
    trainer.fit(Model(settings), DataLoader(Text(64), batch_size=2), ckpt_path=counted, weights_only=True)
    assert (check.steps, trainer.global_step) == (4, 5)
    assert trainer.fit_loop.epoch_loop.batch_progress.current.ready == 5 * batches


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, in one process
@pytest.mark.chaos
@pytest.mark.parametrize("stream", [{}, {"stream": {}, "samples": 37}], ids=["index", "stream"])
def test_checkpoints_resume_with_another_number_of_shards_and_in_one_process(
    tmp_path: Path, stream: dict[str, Any]
) -> None:
    settings = {"steps": 6, "full": 2, "shards": 2, "replicas": 1, "save_every": 2, **stream}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    run(tmp_path / "first", settings, [], 2, "2:2")
    path = tmp_path / "first" / "checkpoints" / "step=4.ckpt"
    saved = torch.load(path, weights_only=True)
    one = {**SETTINGS, **settings}
    torch.set_default_dtype(torch.float64)  # as in the script
    try:
        in_one_process(path, saved, one)
    finally:
        torch.set_default_dtype(torch.float32)
    changed = {"resume": str(path), "shards": 1, "replicas": 2, "options": {"save_distributed_checkpoint": True}}
    run(tmp_path / "second", {**settings, **changed}, [], 2, "2:2")
    reference = torch.load(tmp_path / "second" / "final-1-0.pt", weights_only=True)
    found = differences(tmp_path / "first", reference)
    assert len(found) == 2 and max(found.values()) < TOLERANCE, found
    export_checkpoint(tmp_path / "second" / "checkpoints" / "step=6.ckpt", tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    last = torch.load(tmp_path / "first" / "checkpoints" / "step=6.ckpt", weights_only=True)
    equal(whole["state_dict"], last["state_dict"], TOLERANCE)
    [state], [wanted] = whole["optimizer_states"], last["optimizer_states"]
    assert state["param_groups"] == wanted["param_groups"]
    for number, values in wanted["state"].items():
        equal(state["state"][number], values, TOLERANCE)


@pytest.mark.chaos
@pytest.mark.parametrize("stream", [None, {}], ids=["index", "stream"])
def test_a_data_epoch_under_a_schedule_resumes_in_any_world(tmp_path: Path, stream: dict[str, Any] | None) -> None:
    """Steps 1 to 6 have two rounds, 7 to 10 three, later ones one; the checkpoint is of step 8."""
    settings = {"steps": 13, "full": 4, "accumulation": 1, "rounds": {"0": 2, "1": 3, "2": 1}, "samples": 90}
    settings |= {"stream": stream, "dropout": 0.1, "save_every": 4}
    resumed = {**settings, "save_every": 0, "resume": str(tmp_path / "whole" / "checkpoints" / "step=8.ckpt")}
    halves: dict[str, tuple[dict[str, Any], int, str]] = {
        "same": (resumed, 4, "4:4"),
        "one_replica": ({**resumed, "full": 2}, 2, "2:4"),
        "whole_models": ({**resumed, "shards": 1, "replicas": 4}, 4, "4:4"),
    }
    for name, run_of in {"whole": (settings, 4, "4:4"), **halves}.items():
        (tmp_path / name).mkdir()
        run(tmp_path / name, run_of[0], [], *run_of[1:])
    reference = torch.load(tmp_path / "whole_models" / "final-0-0.pt", weights_only=True)
    assert next(note["step"] for note in notes(tmp_path / "same", "step")) == 9
    for name in ("whole", *halves):
        found = differences(tmp_path / name, reference)
        assert max(found.values()) < TOLERANCE, (name, found)
        losses = {note["step"]: note["loss"] for note in notes(tmp_path / name, "step")}
        expected = {note["step"]: note["loss"] for note in notes(tmp_path / "whole", "step")}
        assert all(abs(losses[step] - expected[step]) < TOLERANCE for step in losses), name
