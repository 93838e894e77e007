"""Data sets of other libraries as streams: each sample in one stream, the same whenever a stream is opened.

Run with ``pip install -e '.[libraries]'``; libraries that are not installed are skipped.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from unicron_lightning.data import streams
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.sources import same
from unicron_lightning.data.streams import StreamEnds, Streams

SHAPE = StepShape(devices=3, accumulation=1)
SAMPLES = 60


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker: variables and torch.distributed have the rank of the device whose stream is read."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: int(os.environ["RANK"]))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: int(os.environ["WORLD_SIZE"]))


@contextmanager
def seen_as(device: int) -> Iterator[None]:
    os.environ.update(RANK=str(device), WORLD_SIZE=str(SHAPE.devices))
    yield
    os.environ.update(RANK="0", WORLD_SIZE="1")


class ByDevice(IterableDataset[Any]):
    """Hugging Face's data set, divided when it is read, with its states."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.part: Any = None
        self.state: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        from datasets.distributed import split_dataset_by_node

        self.part = split_dataset_by_node(self.dataset, dist.get_rank(), dist.get_world_size())
        if self.state is not None:
            self.part.load_state_dict(self.state)
            self.state = None
        yield from self.part

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.part.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def hugging_face(folder: Path, *, shuffles: bool = True) -> Any:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"number": list(range(SAMPLES))}).to_iterable_dataset(num_shards=6)
    return ByDevice(table.shuffle(seed=3, buffer_size=8) if shuffles else table)


def web_dataset(folder: Path) -> Any:
    webdataset = pytest.importorskip("webdataset")
    for shard in range(6):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard * 10, shard * 10 + 10):
                text = str(number).encode()
                entry = tarfile.TarInfo(f"{number:03d}.cls")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
    urls = str(folder / "{0..5}.tar")
    options = {"nodesplitter": webdataset.split_by_node, "shardshuffle": False, "empty_check": False}
    return webdataset.WebDataset(urls, **options).decode().map(lambda sample: {"number": sample["cls"]})


class Sources(IterableDataset[Any]):
    """grain's data set, divided when it is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for number in self.dataset[dist.get_rank() :: dist.get_world_size()].to_iter_dataset():
            yield {"number": int(number)}


def grain_sources(folder: Path) -> Any:
    grain = pytest.importorskip("grain")
    return Sources(grain.MapDataset.range(SAMPLES).shuffle(seed=4))


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset's
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [hugging_face, web_dataset, grain_sources])
def test_each_sample_is_in_one_stream_which_any_worker_can_open(
    make: Callable[[Path], Any], workers: int, tmp_path: Path
) -> None:
    dataset = make(tmp_path)
    if workers and isinstance(dataset, Sources):
        pytest.skip("grain has worker processes of its own")
    batches = [list(numbers_of(dataset, stream, workers)) for stream in range(SHAPE.devices)]
    assert sorted(number for stream in batches for number in stream) == list(range(SAMPLES))
    assert list(numbers_of(dataset, 1, workers)) == batches[1]


def numbers_of(dataset: Any, stream: int, workers: int) -> Iterator[int]:
    """Read a stream to its end, in an order that a new reader repeats."""
    ends = StreamEnds()
    ends.begin(0, {})
    opened = Streams(DataLoader(dataset, batch_size=4, num_workers=workers), SHAPE, 1, ends, seen_as)
    for number in range(SAMPLES):
        opened.begin_step(0, number)
        opened.look(0, number, [stream])
        if stream in ends.found:
            break
        yield from opened.get(0, stream, number)["number"].tolist()
    opened.close()


@pytest.mark.parametrize("shuffles", [False, True])
def test_states_of_hugging_face(
    shuffles: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shuffle buffer is filled again, not restored from a state: such a state is not used."""
    monkeypatch.setattr(streams, "STATE_STEPS", 2)
    ends, joined = StreamEnds(), StreamEnds()
    ends.begin(0, {})
    first, again = (
        Streams(StatefulDataLoader(hugging_face(tmp_path, shuffles=shuffles), batch_size=4), SHAPE, 1, each, seen_as)
        for each in (ends, joined)
    )
    for step in range(4):
        first.begin_step(0, step)
        first.look(0, step, [0])
    news = ends.news()
    assert news is not None and news["states"][0][0] == 2
    ends.agree([news])
    joined.load_state(ends.state())
    again.begin_step(0, 3)
    assert same(again.get(0, 0, 3), first.get(0, 0, 3))
    assert ("stream_states_unused" in caplog.text) == shuffles
