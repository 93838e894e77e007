"""Data sets of other libraries as streams: each sample in one stream, the same whenever a stream is opened.

Run with ``pip install -e '.[libraries]'``; libraries that are not installed are skipped.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from programs import libraries
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from unicron_lightning.data import streams
from unicron_lightning.data.alone import as_only_process
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.sources import as_loader, same
from unicron_lightning.data.streams import StreamEnds, StreamOpener, Streams
from unicron_lightning.errors import ConfigError

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


def dataset_of(name: str, folder: Path, **options: Any) -> Any:
    if not libraries.installed(name):
        pytest.skip(f"{libraries.MAKERS[name][0]} is not installed")
    return libraries.MAKERS[name][1](folder, SAMPLES, **options)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset's
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["hugging_face", "web_dataset", "grain"])
def test_each_sample_is_in_one_stream_which_any_worker_can_open(name: str, workers: int, tmp_path: Path) -> None:
    dataset = dataset_of(name, tmp_path)
    if workers and name == "grain":
        pytest.skip("grain has worker processes of its own")
    batches = [list(numbers_of(dataset, stream, workers)) for stream in range(SHAPE.devices)]
    assert sorted(number for stream in batches for number in stream) == list(range(SAMPLES))
    assert list(numbers_of(dataset, 1, workers)) == batches[1]


def numbers_of(dataset: Any, stream: int, workers: int) -> Iterator[int]:
    """Read a stream to its end, in an order that a new reader repeats."""
    ends = StreamEnds()
    ends.begin(0, {})
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=workers)
    opened = Streams(StreamOpener(loader, SHAPE.devices, 1, seen_as), SHAPE, ends)
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
        Streams(
            StreamOpener(
                StatefulDataLoader(dataset_of("hugging_face", tmp_path, shuffles=shuffles), batch_size=4),
                SHAPE.devices,
                1,
                seen_as,
            ),
            SHAPE,
            each,
        )
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


@pytest.mark.parametrize("name", ["litdata", "mosaicml"])
def test_chunks_are_dealt_out_to_devices(name: str, tmp_path: Path) -> None:
    """Each sample once an epoch, in another order in each; a device reads whole chunks."""
    dataset = dataset_of(name, tmp_path)
    library = importlib.import_module(libraries.MAKERS[name][0])
    loader = as_loader(library.StreamingDataLoader(dataset, batch_size=2), SHAPE.devices)
    order = DataOrder(loader, SHAPE, 0)
    epochs = [
        [order.indices(*order.place(epoch, n)) for n in range(order.num_micro_batches(epoch))] for epoch in range(2)
    ]
    for batches in epochs:
        assert sorted(number for batch in batches for number in batch) == list(range(SAMPLES))
        by_device = [[number for batch in batches[device::3] for number in batch] for device in range(3)]
        assert [len({number // 10 for number in numbers}) for numbers in by_device] == [2, 2, 2]
    assert epochs[0] != epochs[1]
    assert loader.dataset[57] == {"number": 57}
    assert [number for batch in loader for number in batch["number"].tolist()] == list(loader.sampler)


def test_data_of_mosaicml_has_each_sample_and_no_part_of_it(tmp_path: Path) -> None:
    dataset_of("mosaicml", tmp_path)
    import streaming

    shards = str(tmp_path / "shards")
    with as_only_process():
        chosen = streaming.StreamingDataset(streams=[streaming.Stream(local=shards, repeat=2)], batch_size=2)
    with pytest.raises(ConfigError, match=r"chooses \[120\] samples of its streams' \[60\]; expected all of them"):
        as_loader(DataLoader(chosen), 3)
    part = copy.copy(chosen)
    part.streams[0].choose, part.length = SAMPLES, SAMPLES // 3
    with pytest.raises(ConfigError, match="part: 20 of 60 samples"):
        as_loader(DataLoader(part), 3)
