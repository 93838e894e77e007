"""``trainer.predict`` gives each rank what it gives under Lightning's ddp: predictions, indices, and calls of hooks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import predicting
from programs.launching import PROGRAMS, launch, launch_reference, load

from unicron_lightning.local_cluster.processes import free_port

pytestmark = [
    pytest.mark.filterwarnings("ignore:predict returned None"),
    pytest.mark.filterwarnings("ignore:The 'predict_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices"),  # of streams
]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    launch_reference("predicting.py", folder, predicting.CASES, folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched("unicron", predicting.CASES, tmp_path_factory.mktemp("two"))


def launched(strategy: str, cases: Iterable[str], folder: Path) -> Path:
    """Run cases under a strategy, each in the same two processes."""
    agent = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "unicron", "--rdzv-id", "predictions"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    script = [str(PROGRAMS / "predicting.py"), strategy, str(folder), *cases]
    launch([*agent, *endpoint, *script], folder, UNICRON_STATE_DIR=str(folder / "state"))
    return folder


@pytest.mark.parametrize("name", predicting.CASES)
def test_a_world_of_two_is_like_ddp(name: str, ddp: Path, two: Path) -> None:
    for rank in range(2):
        assert load(two, name, rank) == load(ddp, name, rank)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["limited_stream", "epoch_of_streams"])
def test_a_sharded_model_is_like_ddp(name: str, ddp: Path, tmp_path: Path) -> None:
    """One case for each launch, as a script has one trainer. A worker whose stream has ended computes for its
    partner: it calls the step, but no hook.
    """
    launched("unicron_fsdp", [name], tmp_path)
    for rank in range(2):
        found = [load(folder, name, rank) for folder in (tmp_path, ddp)]
        hooks = [result.pop("hooks") for result in found]
        mine, theirs = ([hook for hook in each if hook[0] != "step"] for each in hooks)
        assert mine == theirs and found[0] == found[1]
        assert len(hooks[0]) - len(hooks[1]) == int(name == "limited_stream" and rank == 1)


def batches(result: dict[str, Any], loaders: int) -> list[Any]:
    """Predicted batches, in any order, with what a writer received about them."""
    returned = result["returned"] or []
    outputs = [batch for part in (returned if loaders > 1 else [returned]) for batch in part]
    ends = [hook[2:] for hook in result["hooks"] if hook[0] == "end"]
    steps = [hook[:1] + hook[2:] for hook in result["hooks"] if hook[0] != "end"]
    written = result["written"] or []
    if written and len(written[0]) == 2:  # of epochs: predictions, and indices by loader
        loaders_of = [of_loader for part in written for of_loader in zip(*part, strict=True)]
        found = [pair for of_loader in loaders_of for pair in zip_longest(*of_loader)]  # streams have no indices
    else:
        found = [(prediction, indices, loader) for prediction, indices, _, loader in written]
    return [sorted(map(str, part)) for part in (outputs, ends, [s for s in steps if len(s) > 1], found)]


@pytest.mark.parametrize("name", predicting.CASES)
def test_a_world_of_one_predicts_the_batches_of_both(name: str, ddp: Path, tmp_path: Path) -> None:
    loaders = len(predicting.CASES[name]["sizes"])
    mine = batches(predicting.predict(name, "unicron", tmp_path), loaders)
    theirs = [batches(load(ddp, name, rank), loaders) for rank in range(2)]
    assert mine == [sorted(a + b) for a, b in zip(*theirs, strict=True)]


def test_every_sample_is_predicted_once(ddp: Path, two: Path) -> None:
    """Without samples, equal results would prove nothing."""
    for folder, name in product((ddp, two), ("uneven", "stream")):
        results = [load(folder, name, rank)["returned"] for rank in range(2)]
        assert sorted(n for part in results for batch in part for n in batch["number"]) == list(range(45))
        assert all(results)
    for folder in (ddp, two):
        assert all(load(folder, "batches", rank)["written"] for rank in range(2))


def test_fewer_samples_than_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(predicting.CASES, "one", {"sizes": (1,), "interval": "batch"})
    result = predicting.predict("one", "unicron", tmp_path)
    assert result["returned"] == [{"number": [0.0]}] and len(result["written"]) == 1


def test_a_loader_without_automatic_batching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"sizes": (5,), "loader": {"batch_size": None}}
    monkeypatch.setitem(predicting.CASES, "samples", settings)
    result = predicting.predict("samples", "unicron", tmp_path)
    assert sorted(batch["number"][0] for batch in result["returned"]) == list(range(5))
    assert torch.tensor([hook[1] for hook in result["hooks"] if hook[0] == "step"]).unique().numel() == 5
