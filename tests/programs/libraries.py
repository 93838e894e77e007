"""Small local data sets of other libraries (``pip install -e '.[libraries]'``): samples ``{"number": i}``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset
from zoo.packages import FOLDER, use_packages

from unicron_lightning.data.alone import as_only_process


def place() -> tuple[int, int]:
    """Return rank and size of the world, as a data set sees them."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


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

        self.part = split_dataset_by_node(self.dataset, *place())
        if self.state is not None:
            self.part.load_state_dict(self.state)
            self.state = None
        yield from self.part

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.part.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def hugging_face(folder: Path, samples: int, *, shuffles: bool = True) -> Any:
    use_packages()
    import datasets

    table = datasets.Dataset.from_dict({"number": list(range(samples))}).to_iterable_dataset(num_shards=6)
    return ByDevice(table.shuffle(seed=3, buffer_size=8) if shuffles else table)


def web_dataset(folder: Path, samples: int) -> Any:
    use_packages()
    import webdataset

    for shard in range(6):
        path = folder / f"{shard}.tar"
        if path.exists():
            continue
        written = folder / f"{shard}-{os.getpid()}.writing"
        with tarfile.open(written, "w") as tar:
            for number in range(samples * shard // 6, samples * (shard + 1) // 6):
                text = str(number).encode()
                entry = tarfile.TarInfo(f"{number:03d}.cls")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
        written.rename(path)
    urls = str(folder / "{0..5}.tar")
    options = {"nodesplitter": webdataset.split_by_node, "shardshuffle": False, "empty_check": False}
    return webdataset.WebDataset(urls, **options).decode().map(lambda sample: {"number": sample["cls"]})


class Sources(IterableDataset[Any]):
    """grain's data set, divided when it is read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        rank, world = place()
        for number in self.dataset[rank::world].to_iter_dataset():
            yield {"number": int(number)}


def grain_sources(folder: Path, samples: int) -> Any:
    use_packages()
    import grain

    return Sources(grain.MapDataset.range(samples).shuffle(seed=4))


def grain_index(folder: Path, samples: int) -> Any:
    use_packages()
    import grain

    return grain.MapDataset.range(samples).shuffle(seed=4).map(lambda number: {"number": int(number)})


def litdata_chunks(folder: Path, samples: int) -> Any:
    """Write six chunks, once, and return a shuffled data set."""
    use_packages()
    import litdata

    chunks = folder / "chunks"
    write_chunks(chunks, ({"number": number} for number in range(samples)), -(-samples // 6))
    return litdata.StreamingDataset(str(chunks), shuffle=True, seed=3)


def write_chunks(chunks: Path, samples: Iterable[Any], size: int) -> None:
    """Write a folder of litData's chunks of some samples each, unless another worker has done so."""
    from litdata.streaming.writer import BinaryWriter

    if chunks.exists():
        return
    writing = chunks.with_name(f"writing-{os.getpid()}")
    writer = BinaryWriter(str(writing), chunk_size=size)
    for number, sample in enumerate(samples):
        writer.add_item(number, sample)
    writer.done()
    writer.merge()
    with contextlib.suppress(OSError):  # another worker was faster
        writing.rename(chunks)


def written_shards(folder: Path, samples: int) -> str:
    """Write shards of ten samples, once, and return their folder."""
    use_packages()
    import streaming

    shards = folder / "shards"
    if not shards.exists():
        writing = folder / f"writing-{os.getpid()}"
        with streaming.MDSWriter(out=str(writing), columns={"number": "int"}, size_limit=295) as writer:
            for number in range(samples):
                writer.write({"number": number})
        with contextlib.suppress(OSError):  # another worker was faster
            writing.rename(shards)
    return str(shards)


def mosaicml_shards(folder: Path, samples: int) -> Any:
    shards = written_shards(folder, samples)
    import streaming

    copies = str(folder / f"copies-{os.getpid()}")
    with as_only_process():
        return streaming.StreamingDataset(remote=shards, local=copies, shuffle=True, batch_size=4)


def mosaicml_local(folder: Path, samples: int) -> Any:
    shards = written_shards(folder, samples)
    import streaming

    return streaming.LocalDataset(shards)


def installed(kind: str) -> bool:
    """Whether the library of a kind of data is installed, or in the folder `$ZOO_PACKAGES`."""
    return PathFinder.find_spec(MAKERS[kind][0], [*sys.path, *FOLDER]) is not None


MAKERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "hugging_face": ("datasets", hugging_face),
    "web_dataset": ("webdataset", web_dataset),
    "grain": ("grain", grain_sources),
    "grain_index": ("grain", grain_index),
    "litdata": ("litdata", litdata_chunks),
    "mosaicml": ("streaming", mosaicml_shards),
    "mosaicml_local": ("streaming", mosaicml_local),
}
"""Data sets by name: the module that they need, and their maker, given a folder and the number of samples."""
