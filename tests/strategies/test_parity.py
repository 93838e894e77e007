"""unicron's results equal those of Lightning's ddp: parameters, gradients, metrics, counters, files.

All cases train once under ddp (two processes, gloo) and once under unicron in a world of one, which runs the same
global batch; a few also in a world of two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import jobs
from programs.launching import PROGRAMS, launch, launch_reference, load

from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.local_cluster.processes import free_port
from unicron_lightning.strategies.state.checkpointing import count_steps

pytestmark = [
    pytest.mark.timeout(600),  # the first test of each world trains all cases
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`:UserWarning"),
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]

STEP_VALUES = ("loss_step", "loss")
"""Under ddp with accumulation these cover the last micro-batches only; unicron logs the whole step's."""


REPEATED = {
    "sgd": "scheduler_epoch",
    "sgd_accumulate": "saved_accumulate",
    "adamw": "double",
    "scheduler_step": "loggers",
    "limits_float": "several_half",
    "several_val": "val_steps",
}
"""Cases that are run with -m chaos, to keep `make test` short, each with one that takes its path, too."""
NAMES = [pytest.param(name, marks=pytest.mark.chaos) if name in REPEATED else name for name in jobs.CASES]


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The cases of this run."""
    run = {each.callspec.params.get("name") for each in request.session.items if hasattr(each, "callspec")}
    return [name for name in jobs.CASES if name not in REPEATED or name in run]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> Path:
    """Results of each case under ddp."""
    folder = tmp_path_factory.mktemp("ddp")
    out = folder / "out"
    launch_reference("jobs.py", folder, names, out)
    return out


WORLD_OF_TWO = (
    "adamw_accumulate_clip_norm",
    "alternate",
    "buffers",
    "several_cycle_accumulate",
    "several_longest",
    "loggers",
    "hook_logging",
    "torch_distributed",
    "train_metrics_accumulate",
    "early_stopping",
    "checkpoints",
    "bf16",
    "peeking",
    "peeking_unchecked",
    "val_steps",
    "val_time",
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of some cases in a world of two, one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("two")
    out = folder / "out"
    agent = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "unicron", "--rdzv-id", "parity"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launch(
        [*agent, *endpoint, str(PROGRAMS / "jobs.py"), "unicron", str(out), *WORLD_OF_TWO],
        folder,
        UNICRON_STATE_DIR=str(folder / "state"),
    )
    return out


def close(mine: dict[str, float], theirs: dict[str, float], tolerance: float, accumulated: bool, where: Any) -> None:
    assert mine.keys() == theirs.keys(), where
    for key, value in theirs.items():
        if not (accumulated and key in STEP_VALUES):
            assert mine[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (where, key)


def compare(name: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    accumulated = "accumulate" in name
    tolerance = 2e-3 if name == "bf16" else 1e-5  # evaluation batches are rounded one by one in half precision
    assert mine["state"].keys() == theirs["state"].keys()
    for key, value in theirs["state"].items():
        assert torch.allclose(mine["state"][key], value, rtol=1e-6, atol=1e-6), key
    assert mine["counters"] == theirs["counters"]
    assert mine["files"] == theirs["files"]
    close(mine["metrics"], theirs["metrics"], tolerance, accumulated, "end")
    for ours, other in zip(mine.get("test", []), theirs.get("test", []), strict=True):
        close(ours, other, tolerance, accumulated, "test")
    assert [entry[:2] for entry in mine["history"]] == [entry[:2] for entry in theirs["history"]]
    for ours, other in zip(mine["history"], theirs["history"], strict=True):
        if ours[0] == "step":
            assert ours[2:] == pytest.approx(other[2:], rel=1e-5, abs=1e-6), ours
        else:
            close(ours[2], other[2], tolerance, accumulated, ours[:2])
    compare_tables(mine["csv"], theirs["csv"])
    assert mine["seen"] == theirs["seen"]


def compare_tables(mine: list[str], theirs: list[str]) -> None:
    assert len(mine) == len(theirs) and mine[:1] == theirs[:1]
    for ours, other in zip(mine[1:], theirs[1:], strict=True):
        for a, b in zip(ours.split(","), other.split(","), strict=True):
            assert a == b or float(a) == pytest.approx(float(b), rel=1e-5), (ours, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_world_of_one_is_like_ddp(name: str, ddp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compare(name, jobs.train(name, "unicron", tmp_path), load(ddp, name))


@pytest.mark.parametrize("name", WORLD_OF_TWO)
def test_a_world_of_two_is_like_ddp(name: str, ddp: Path, two: Path) -> None:
    for rank in range(2):
        mine, theirs = load(two, name, rank), load(ddp, name)
        compare(name, mine, theirs | {"seen": load(ddp, name, rank)["seen"]})


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize("saved", ["epoch=0-step=4", "epoch=1-step=8", "epoch=1-step=12"])
def test_a_checkpoint_of_ddp_is_resumed(saved: str, ddp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within an epoch, and at its end, with accumulation: ddp counts batches per device."""
    monkeypatch.chdir(tmp_path)
    theirs = load(ddp, "saved_accumulate")
    path = ddp / "saved_accumulate/every" / f"{saved}.ckpt"
    mine = jobs.train("saved_accumulate", "unicron", tmp_path, path, callbacks=[])
    assert mine["counters"] == theirs["counters"]
    for key, value in theirs["state"].items():
        assert torch.allclose(mine["state"][key], value, rtol=1e-6, atol=1e-6), key


def test_a_checkpoint_within_an_accumulation_is_refused() -> None:
    counts = {"ready": 15, "started": 15, "processed": 15, "completed": 14}
    batches = {"total": dict(counts), "current": {k: v - 12 for k, v in counts.items()}}
    loops = {"epoch_loop.batch_progress": batches, "epoch_progress": {"current": {"ready": 2}}}
    with pytest.raises(ConfigError, match=r"after batch 3 of an epoch with accumulate_grad_batches=2, in the middle"):
        count_steps({"loops": {"fit_loop": loops}}, StepShape(devices=2, accumulation=2))


def test_the_hooks_see_what_ddp_users_see(ddp: Path, names: list[str]) -> None:
    """A case in which nothing is trained or evaluated would prove nothing."""
    for name in names:
        history = load(ddp, name)["history"]
        assert {entry[0] for entry in history} == {"step", "validation"}
        assert all(entry[2] > 0 for entry in history if entry[0] == "step")
