"""Training data of all kinds: every sample is used as often as without failures, through deaths and joins.

``pytest -m '' -s tests/strategies/test_data_kinds.py`` prints a row for each kind of data (docs/data.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agent.torchrun import START_SECONDS, Cluster
from programs import data_worker, libraries
from programs.launching import PROGRAMS
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

KILLED_AT = {"unicron": (4, 17), "unicron_fsdp": (4, 11)}
"""Steps of the first and of the second epoch."""


def cases() -> list[Any]:
    kinds = [*data_worker.KINDS, *libraries.MAKERS]
    found = [(strategy, kind) for strategy in KILLED_AT for kind in kinds]
    in_ci = "unicron", "several"  # with unicron_fsdp: tests/fsdp
    return [case if case == in_ci else pytest.param(*case, marks=pytest.mark.chaos) for case in found]


def need(kind: str) -> None:
    if not libraries.installed(kind):
        pytest.skip(f"{libraries.MAKERS[kind][0]} is not installed")


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # MosaicML's LocalDataset
@pytest.mark.parametrize(("strategy", "kind"), cases())
def test_every_sample_is_used_through_deaths(
    strategy: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in libraries.MAKERS:
        need(kind)
        (tmp_path / "data").mkdir()
        data_worker.data(kind, tmp_path / "data")  # writers would wait for other ranks
    monkeypatch.setenv("DATA_KIND", kind)
    monkeypatch.setenv("DATA_STRATEGY", strategy)
    workers, least = data_worker.WORKERS[strategy], 1 if strategy == "unicron" else data_worker.SHARDS
    with Cluster(tmp_path, str(PROGRAMS / "data_worker.py"), f"{least}:{workers}") as cluster:
        for _ in range(workers):
            cluster.add_node()
        killed = {cluster.kill_first(step) for step in KILLED_AT[strategy]}
        assert cluster.finish() == [0] * workers
        results, steps = cluster.notes("result"), cluster.notes("step")
    used = data_worker.expected(kind, workers)
    shards = torch.tensor(used + [0.0] * (data_worker.SIZE - len(used))).chunk(least)
    pairs = [(torch.tensor(line["counts"]), shards[line["shard"]]) for line in results]
    lost = max(int((wanted - found).clamp(min=0).sum()) for found, wanted in pairs)
    twice = max(int((found - wanted).clamp(min=0).sum()) for found, wanted in pairs)
    print(f"\n| {kind}, {strategy} | kills {len(killed)} | lost {lost} | twice {twice} |")
    assert len(results) == workers and all(torch.equal(found, wanted) for found, wanted in pairs)
    assert len({line["pid"] for line in steps}) > workers, "a worker has joined"
    assert len(killed) == 2


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["several", "stream"])
def test_deaths_between_two_epochs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_KIND", kind)
    monkeypatch.setenv("DATA_STRATEGY", "unicron")
    monkeypatch.setenv("DATA_DEATHS", "1")
    with Cluster(tmp_path, str(PROGRAMS / "data_worker.py"), f"1:{data_worker.DEVICES}") as cluster:
        for _ in range(data_worker.DEVICES):
            cluster.add_node()
        cluster.wait_notes(data_worker.DEVICES, "result", START_SECONDS + 60)
        assert cluster.finish() == [0] * data_worker.DEVICES
        results = cluster.notes("result")
    assert len(list(tmp_path.glob("died-at-*"))) == len(data_worker.DEATHS)
    used = data_worker.expected(kind)
    assert [line["counts"][: len(used)] for line in results] == [used] * data_worker.DEVICES


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset's
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")  # litData's
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")
@pytest.mark.parametrize("kind", [*data_worker.KINDS, *libraries.MAKERS])
def test_an_epoch_is_resumed_in_its_middle(kind: str, tmp_path: Path) -> None:
    """A world of one is resumed from a checkpoint within the second epoch."""
    if kind in libraries.MAKERS:
        need(kind)
    first = data_worker.Kinds(tmp_path, paced=False)
    data_worker.trainer_of(tmp_path, kind, max_steps=19).fit(first, data_worker.data(kind, tmp_path))
    again = data_worker.Kinds(tmp_path, paced=False)
    saved = tmp_path / "saved/step=15.ckpt"
    resumed = data_worker.trainer_of(tmp_path, kind)
    resumed.fit(again, data_worker.data(kind, tmp_path), ckpt_path=saved, weights_only=False)
    counts = data_worker.expected(kind)
    assert again.counted()[: len(counts)] == counts
    assert first.counted() != again.counted()


class Sums(data_worker.Kinds):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("sum", float(sum(part.sum() for part in data_worker.found(batch))), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
@pytest.mark.parametrize("kind", ["litdata", "mosaicml"])
def test_evaluations_take_chunks(kind: str, tmp_path: Path) -> None:
    need(kind)
    chunks, module = libraries.MAKERS[kind][1](tmp_path, 50), Sums(tmp_path, paced=False)
    loader: DataLoader[Any] = DataLoader(chunks, batch_size=4)
    trainer = data_worker.trainer_of(tmp_path)
    assert trainer.validate(module, loader, verbose=False) == [{"sum": float(sum(range(50)))}]
    predicted: Any = trainer.predict(module, loader)
    assert sorted(number for batch in predicted for number in batch["number"].tolist()) == list(range(50))


def test_evaluations_take_sequences(tmp_path: Path) -> None:
    numbers, module = torch.arange(50), Sums(tmp_path, paced=False)
    batches = data_worker.BatchesOf(numbers.split(4))
    trainer = data_worker.trainer_of(tmp_path)
    assert trainer.validate(module, batches, verbose=False) == [{"sum": float(numbers.sum())}]
    assert trainer.validate_loop._combined_loader is not None and trainer.val_dataloaders is batches
    predicted: Any = trainer.predict(module, batches)
    assert torch.cat(predicted).sort().values.equal(numbers)


@pytest.mark.parametrize("kind", ["stream", "reopened"])
def test_evaluations_take_streams(kind: str, tmp_path: Path) -> None:
    module, total = Sums(tmp_path, paced=False), float(sum(range(data_worker.SAMPLES)))
    trainer = data_worker.trainer_of(tmp_path)
    streams = data_worker.data(kind, tmp_path)
    assert trainer.validate(module, streams, verbose=False) == [{"sum": total}]
    assert trainer.validate_loop.max_batches == [float("inf")] and trainer.val_dataloaders is streams
    predicted: Any = trainer.predict(module, [streams, data_worker.second()])
    assert torch.cat(predicted[0]).sort().values.equal(torch.arange(data_worker.SAMPLES))
    assert len(predicted[1]) == len(data_worker.second())


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")  # with a limit
@pytest.mark.parametrize(
    ("settings", "passes", "batches"),
    [
        ({}, 2, 74),
        ({"limit_val_batches": 2}, 2, 6),
        ({"overfit_batches": 3}, 2, 9),
        ({"val_check_interval": 10}, 4, 74),
    ],
)
def test_validations_of_a_fit_take_streams(settings: dict[str, Any], passes: int, batches: int, tmp_path: Path) -> None:
    class Counts(Sums):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)
            super().validation_step(batch, batch_idx)

    seen: list[int] = []
    trainer = data_worker.trainer_of(tmp_path, **settings)
    made = [data_worker.data("stream", tmp_path) for _ in range(2)]
    trainer.fit(Counts(tmp_path, paced=False), *made)
    assert len(seen) == 2 + passes * batches, "two of the sanity check"
    assert "sum" in trainer.callback_metrics
