"""Versions are divided, and written by several writers, whichever of them are lost."""

from __future__ import annotations

import io
import mmap
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from unicron_lightning.checkpoints.client import WriterProcess
from unicron_lightning.checkpoints.files import digest_of, is_folder
from unicron_lightning.checkpoints.index import read_checkpoint
from unicron_lightning.checkpoints.messages import VersionFailed, VersionOver, VersionWritten, WriteVersion
from unicron_lightning.checkpoints.pieces import (
    HeldCheckpoint,
    IndexEntry,
    blocks,
    check_whole,
    divide,
    part_writers,
    saved_bytes,
    stage,
)
from unicron_lightning.checkpoints.storage import storage_of
from unicron_lightning.checkpoints.writer import Versions, WritingVersion
from unicron_lightning.local_cluster.processes import until
from unicron_lightning.shared_memory import MemoryPool, PooledMemory
from unicron_lightning.worker.state_parts import holders

pytestmark = pytest.mark.filterwarnings("ignore:.*to load in a single process")

SHAPES = [((40, 50), 4), ((), 8), ((7,), 2), ((0, 4), 4), ((1000,), 2), ((3, 2, 2), 8)]


def bytes_of(shape: tuple[int, ...], width: int, rows: int) -> int:
    return width * (rows * torch.Size(shape[1:]).numel() if shape and 0 not in shape else torch.Size(shape).numel())


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 200])
def test_parts_hold_each_row_once_and_are_of_about_equal_size(parts: int) -> None:
    divided = divide(SHAPES, parts)
    rows = sorted((piece.tensor, row) for part in divided for piece in part for row in range(piece.first, piece.end))
    assert rows == [
        (number, row)
        for number, (shape, _) in enumerate(SHAPES)
        for row in range(shape[0] if shape and 0 not in shape else 1)
    ]
    if parts <= 7:
        sizes = [sum(bytes_of(*SHAPES[piece.tensor], piece.end - piece.first) for piece in part) for part in divided]
        assert max(sizes) - min(sizes) <= 2 * 200, "rows are not cut"


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (5, 1, 2, 1)])
def test_blocks_are_the_range_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel() + 1):
        for end in range(start, numbers.numel() + 1):
            found = blocks(shape, start, end)
            cut = [numbers[tuple(slice(at, at + size) for at, size in zip(*block, strict=True))] for block in found]
            assert [int(each) for piece in cut for each in piece.flatten()] == list(range(start, end))
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_replicas_share_the_parts_and_spares_write_none() -> None:
    places = [("r", "a"), ("r", "a"), ("r", "b"), ("r", "c")]
    assert part_writers([["0"], ["1"], ["0"], ["1"]], places, 1) == {"0": [0, 2], "1": [3, 1]}
    assert part_writers([["1"], [], ["0"]], places[:3], 1) == {"0": [2], "1": [0]}
    copied = [["0 b", "0 a", "0"], ["0 a", "0 b", "0"]]
    assert part_writers(copied, places[:2], 1) == {"0": [0, 1], "0 a": [1, 0], "0 b": [0, 1]}
    assert part_writers([["0"]] * 4, places, 1) == {"0": [0, 2]}, "on another node"
    assert part_writers([["0"]] * 4, places, 9) == {"0": [0, 2, 3, 1]}
    assert part_writers([["0"]] * 4, places, 0) == {"0": [0]}
    racks = [("r", "a"), ("r", "b"), ("s", "c"), ("s", "c")]
    assert part_writers([["0"]] * 4, racks, 9) == {"0": [0, 2, 1, 3]}, "another rack, then another node"


def content(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.manual_seed(seed)
    model = {"a": torch.randn(40, 50), "b": torch.tensor(3.0), "c": torch.randn(1000).bfloat16(), "e": torch.zeros(0)}
    moments = {"a": {"exp_avg": torch.randn(50, 40).T, "step": torch.tensor(5.0)}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a"]}]
    state = {"state_dict": model, "optimizer_0": {"state": moments, "param_groups": groups}}
    return state, {"global_step": 5, "lr_schedulers": []}


def staged(pool: MemoryPool, order: WriteVersion, seed: int = 0) -> tuple[WriteVersion, list[PooledMemory]]:
    state, rest = content(seed)
    names = [""] * len(order.holders)
    return stage(pool, order, names, HeldCheckpoint.whole(state, rest))


class Group:
    """Writers of one version, each with its own copy."""

    def __init__(
        self,
        path: Path | str,
        nodes: list[str],
        partners: int = 1,
        seconds: float = 20.0,
        name: str = "v",
        seed: int = 0,
    ) -> None:
        places = [(node, node) for node in nodes]
        held = [holders(places, part, partners) for part in range(len(nodes))]
        self.versions: list[WritingVersion] = []
        self.buffers: list[PooledMemory] = []
        for rank in range(len(nodes)):
            order = WriteVersion(number=1, name=name, path=str(path), rank=rank, holders=held, seconds=seconds)
            order, memories_of = staged(MemoryPool(), order, seed)
            self.buffers += memories_of
            storage = storage_of(str(path), name)
            memories = [mmap.mmap(each.descriptor, 0) for each in memories_of]
            self.versions.append(WritingVersion(order, memories, storage))

    def advance(self, *ranks: int) -> list[Any]:
        return [self.versions[rank].advance() for rank in ranks]

    def forget(self, *ranks: int) -> None:
        """Wait until the files of a failed version are deleted."""
        until("the end of a failed version", lambda: all(self.versions[rank].forget() for rank in ranks), 20)

    def close(self) -> None:
        for each in self.buffers:
            each.release()


@pytest.fixture
def group_of(tmp_path: Path) -> Iterator[Any]:
    groups: list[Group] = []

    def make(nodes: list[str], **options: Any) -> Group:
        groups.append(Group(tmp_path / "x.ckpt", nodes, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def add_version(tmp_path: Path) -> Iterator[Any]:
    """Give a rank's writer version N, of ``N.ckpt``."""
    buffers: list[PooledMemory] = []

    def add(writer: Versions, number: int, rank: int, holders: list[list[int]] | None = None) -> None:
        path, held = str(tmp_path / f"{number}.ckpt"), holders or [[0, 1]]
        order = WriteVersion(number=number, name=f"v{number}", path=path, rank=rank, holders=held)
        order, memories = staged(MemoryPool(), order)
        buffers.extend(memories)
        writer.add(order, [mmap.mmap(each.descriptor, 0) for each in memories])

    yield add
    for each in buffers:
        each.release()


def check(path: Path | str) -> None:
    state, rest = content()
    found = read_checkpoint(path)
    assert found["global_step"] == rest["global_step"]
    torch.testing.assert_close(found["state_dict"], state["state_dict"], rtol=0, atol=0)
    [optimizer] = found["optimizer_states"]
    torch.testing.assert_close(optimizer["state"][0], state["optimizer_0"]["state"]["a"], rtol=0, atol=0)
    assert optimizer["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]
    target = {"state_dict": {name: torch.zeros_like(each) for name, each in state["state_dict"].items()}}
    reader = FsspecReader(path) if "://" in str(path) else dcp.FileSystemReader(path)
    dcp.load(target, storage_reader=reader)
    torch.testing.assert_close(target["state_dict"], state["state_dict"], rtol=0, atol=0)


def test_an_index_without_some_elements_is_refused() -> None:
    half = IndexEntry("a", "f", 0, 1, "float32", (4, 2), (0, 0), (2, 2))
    check_whole([half, msgspec.structs.replace(half, offsets=(2, 0))])
    with pytest.raises(ValueError, match="4 elements of a are in no part"):
        check_whole([half])


@pytest.mark.parametrize("nodes", [["a"], ["a", "b", "c"], ["a", "a", "a", "b"]])
def test_all_report_the_digest_of_the_complete_version(group_of: Any, tmp_path: Path, nodes: list[str]) -> None:
    group = group_of(nodes)
    first = group.advance(*range(len(nodes)))
    assert first[:-1] == [None] * (len(nodes) - 1)
    outcomes = group.advance(*range(len(nodes)))
    path = tmp_path / "x.ckpt"
    assert outcomes == [VersionWritten(number=1, digest=digest_of(str(path)))] * len(nodes)
    check(path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_part_of_a_lost_writer_is_written_by_another_holder(group_of: Any, tmp_path: Path, lost: int) -> None:
    group = group_of(["a", "b", "c"])
    left = [rank for rank in range(3) if rank != lost]
    for _ in range(3):
        assert group.advance(*left) == [None, None]
    assert not is_folder(tmp_path / "x.ckpt")
    for rank in left:
        group.versions[rank].gone([lost])
    for _ in range(3):
        outcomes = group.advance(*left)
    assert outcomes == [VersionWritten(number=1, digest=digest_of(str(tmp_path / "x.ckpt")))] * 2
    check(tmp_path / "x.ckpt")


def test_two_writers_that_finish_at_a_time_remove_nothing_from_each_other(
    group_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all workers have ended, each writer takes the others for gone; one of them is slow here."""
    group = group_of(["a", "b"])
    group.advance(0, 1)
    first, second = group.versions
    first.gone([1])
    second.gone([0])
    publish = first._storage.publish

    def stop(name: str) -> None:
        raise OSError(name)

    def late(files: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(second._storage, "create", stop)
            assert isinstance(second.advance(), VersionFailed), "it has come as far as its objects"
        publish(files)

    monkeypatch.setattr(first._storage, "publish", late)
    assert first.advance() == VersionWritten(number=1, digest=digest_of(str(tmp_path / "x.ckpt")))
    check(tmp_path / "x.ckpt")


def test_a_writer_that_is_taken_for_lost_harms_nothing(group_of: Any, tmp_path: Path) -> None:
    group = group_of(["a", "b", "c"])
    for rank in (1, 2):
        group.versions[rank].gone([0])
        group.advance(rank)
    for rank in (0, 1, 2, 0, 1, 2):
        group.advance(rank)
    digest = digest_of(str(tmp_path / "x.ckpt"))
    assert group.advance(0, 1, 2) == [VersionWritten(number=1, digest=digest)] * 3
    check(tmp_path / "x.ckpt")


def test_without_a_holder_the_version_is_abandoned_and_the_one_before_stays(group_of: Any, tmp_path: Path) -> None:
    group = group_of(["a"])
    group.advance(0)
    before = digest_of(str(tmp_path / "x.ckpt"))
    group = group_of(["a", "b"], partners=0, seconds=0.2, name="w")
    group.versions[0].gone([1])
    assert group.advance(0) == [None]
    time.sleep(0.3)
    [outcome] = group.advance(0)
    assert isinstance(outcome, VersionFailed) and "parts [1] were not written within 0.2 s" in outcome.error
    group.forget(0)
    assert [each.name for each in tmp_path.iterdir()] == ["x.ckpt"]
    assert digest_of(str(tmp_path / "x.ckpt")) == before


def test_a_version_whose_holders_of_a_part_are_gone_fails_before_its_time_limit(
    group_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unicron_lightning.checkpoints.writer._LOST_SECONDS", 0.2)
    group = group_of(["a", "b", "c"], seconds=1000.0)
    holders = group.versions[0].order.holders[1]
    group.versions[0].gone(holders[:1])
    assert group.advance(0) == [None], "a holder is left"
    group.versions[0].gone([1, 2])
    assert group.advance(0, 0) == [None, None], "their writers may still write"
    time.sleep(0.3)
    [outcome] = group.advance(0)
    assert isinstance(outcome, VersionFailed) and "all holders of the parts [1] were lost" in outcome.error
    group.forget(0)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_write_fails_the_version_at_once(group_of: Any, tmp_path: Path) -> None:
    group = group_of(["a", "b"])
    group.advance(0)
    (unfinished,) = tmp_path.iterdir()
    (unfinished / f"__1_1.distcp.{os.getpid()}.tmp").mkdir()
    [outcome] = group.advance(1)
    assert isinstance(outcome, VersionFailed) and outcome.error.startswith("rank 1: ")
    [other] = group.advance(0)
    assert isinstance(other, VersionFailed) and other.error == outcome.error
    group.forget(0, 1)
    assert not list(tmp_path.iterdir())


def test_the_files_of_a_failed_version_stay_for_a_writer_that_comes_late(group_of: Any, tmp_path: Path) -> None:
    group = group_of(["a", "b"])
    (tmp_path / "x.ckpt.v.unfinished").mkdir()
    (tmp_path / "x.ckpt.v.unfinished" / f"__0_0.distcp.{os.getpid()}.tmp").mkdir()
    [failed] = group.advance(0)
    assert isinstance(failed, VersionFailed)
    time.sleep(2.1)
    assert not group.versions[0].forget()
    [late] = group.advance(1)
    assert isinstance(late, VersionFailed) and late.error == failed.error
    group.forget(0, 1)
    assert not list(tmp_path.iterdir())


def test_a_late_writer_with_nothing_to_write_waits_for_no_version_that_was_removed(
    add_version: Any, tmp_path: Path
) -> None:
    """The second rank holds copies of the first one's only part."""
    writers = [Versions(), Versions()]
    for number in (1, 2):
        for rank, writer in enumerate(writers):
            add_version(writer, number, rank)
        if number == 1:
            assert not writers[1].advance(), "the version may still come"
            assert [type(each) for each in writers[0].advance()] == [VersionWritten]
            shutil.rmtree(tmp_path / "1.ckpt")
            assert not writers[1].advance()
    assert [each.number for each in writers[0].advance()] == [2]
    over, written = sorted(writers[1].advance(), key=lambda each: each.number)
    assert over == VersionOver(number=1) and isinstance(written, VersionWritten)
    assert [each.name for each in tmp_path.iterdir()] == ["2.ckpt"]


def test_a_writer_does_not_wait_for_a_version_that_was_removed_before_it_looked(
    add_version: Any, tmp_path: Path
) -> None:
    """Both ranks write a part; the first one publishes the version, and removes it when a later one is complete."""
    writers = [Versions(), Versions()]
    for rank, writer in enumerate(writers):
        add_version(writer, 1, rank, [[0, 1], [1, 0]])
    assert not writers[1].advance(), "its part is written"
    assert [type(each) for each in writers[0].advance()] == [VersionWritten]
    shutil.rmtree(tmp_path / "1.ckpt")
    assert not writers[1].advance(), "it waits for no later version, and its worker goes on"
    writers[1].ending = True
    assert writers[1].advance() == [VersionOver(number=1)]
    assert not list(tmp_path.iterdir())


def test_a_holder_of_a_copy_waits_at_the_end_for_the_newest_version_and_writes_it_if_the_first_one_dies(
    add_version: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first rank, whose part it is, dies before it has begun; an end of the run does not make the part nobody's."""
    writer = Versions()
    for number in (1, 2):
        add_version(writer, number, 1)
    writer.ending = True
    assert not writer.advance() and not list(tmp_path.iterdir())
    writer.gone(2, [0])
    assert not writer.advance(), "it writes the part, and finds it described the next time"
    written, over = writer.advance()
    assert isinstance(written, VersionWritten) and written.number == 2
    assert over == VersionOver(number=1), "it is older, and nobody has begun it"
    assert [each.name for each in tmp_path.iterdir()] == ["2.ckpt"]
    add_version(writer, 3, 1)
    assert not writer.advance()
    monkeypatch.setattr("unicron_lightning.checkpoints.writer.BEGIN_SECONDS", 0.0)
    assert writer.advance() == [VersionOver(number=3)], "the first one still lives, and has removed it itself"


def test_a_worker_that_waits_leaves_versions_without_a_trace_to_others(add_version: Any, tmp_path: Path) -> None:
    """All of them have been written, and removed, before the second rank's writer had started."""
    first, second = Versions(), Versions()
    for number in (1, 2, 3):
        for rank, writer in enumerate((first, second)):
            add_version(writer, number, rank)
        if number < 3:
            first.advance()
            shutil.rmtree(tmp_path / f"{number}.ckpt")
    assert not second.advance()
    second.leave_untraced()
    assert [each.number for each in second.advance()] == [1, 2, 3], "the third one has no trace yet, either"
    first.leave_untraced()
    assert [type(each) for each in first.advance()] == [VersionWritten], "it writes the third one itself"


def test_a_writer_that_is_late_leaves_no_folder_behind(group_of: Any, tmp_path: Path) -> None:
    group = group_of(["a", "b"])
    group.versions[1].gone([0])
    for _ in range(2):
        group.advance(1)
    assert [type(each) for each in group.advance(0)] == [VersionWritten]
    assert [each.name for each in tmp_path.iterdir()] == ["x.ckpt"]


def test_a_version_that_all_writers_have_left_is_deleted_later(group_of: Any, tmp_path: Path) -> None:
    old, new, other = (tmp_path / f"{name}.unfinished" for name in ("a.1-0123456789ab", "b.2-0123456789ab", "c.ckpt.7"))
    for folder in (old, new, other):
        folder.mkdir()
    for folder in (old, other):
        os.utime(folder, (1.0, 1.0))
    group_of(["a"]).advance(0)
    assert {each.name for each in tmp_path.iterdir()} == {"x.ckpt", new.name, other.name}


def test_objects_at_a_url_are_complete_with_their_index(tmp_path: Path) -> None:
    """fsspec's file system in memory: an older version is replaced, and a failed one leaves it in place."""
    url = "memory://bucket/x.ckpt"
    groups = []
    try:
        for name, seed in (("v", 1), ("w", 0)):
            group = Group(url, ["a", "b", "c"], name=name, seed=seed)
            groups.append(group)
            group.advance(0, 1)
            assert is_folder(url) == (name == "w")
            group.advance(2, 0)
            outcomes = group.advance(0, 1, 2)
            assert outcomes == [VersionWritten(number=1, digest=digest_of(url))] * 3
        check(url)
        groups.append(Group(url, ["a", "b"], partners=0, seconds=0.0, name="u"))
        [failed] = groups[-1].advance(0)
        assert isinstance(failed, VersionFailed) and groups[-1].versions[0].forget(now=True)
        assert digest_of(url) == outcomes[0].digest
        files = fsspec.filesystem("memory")
        assert sorted(path.rsplit("/", 1)[-1] for path in files.ls("/bucket/x.ckpt", detail=False)) == [
            ".metadata",
            "meta.pt",
            "w",
        ]
        files.pipe_file("/bucket/x.ckpt/w/objects.distcp", b"changed")
        assert digest_of(url) != outcomes[0].digest
    finally:
        for group in groups:
            group.close()
        fsspec.filesystem("memory").store.clear()


def test_a_writer_process_that_is_killed_is_replaced(tmp_path: Path) -> None:
    client = WriterProcess(lambda: None)
    outcomes: list[tuple[str, str]] = []
    try:
        for number in (1, 2):
            path = tmp_path / f"{number}.ckpt"
            order = WriteVersion(number=number, name=f"v{number}", path=str(path), rank=0, holders=[[0]], seconds=60.0)
            order, buffers = staged(client.pool, order)
            if number == 2:
                assert client._process is not None
                os.kill(client._process.pid, 9)
            client.write(order, [""], buffers, lambda *outcome: outcomes.append(outcome))
            assert client.wait(0, 60.0)
            assert outcomes[-1] == (digest_of(str(path)), "")
            check(path)
        order = WriteVersion(number=3, name="v3", path=str(path), rank=0, holders=[[0]], seconds=0.1)
        order, buffers = staged(client.pool, order)
        os.kill(client._process.pid, signal.SIGSTOP)  # as by a storage that hangs
        client.write(order, [""], buffers, lambda *outcome: outcomes.append(outcome))
        assert client.wait(0, 30.0)
        assert outcomes[-1][1].startswith("the writer has not answered")
        check(path)
    finally:
        client.close(1.0)
    assert not [each for each in threading.enumerate() if each.name == "unicron-checkpoints"]


def test_saved_values_are_what_torch_saves() -> None:
    """Also the second time, and for values that are equal and of other types."""
    values = [1, 1.0, True, "1", None, (0.9, 0.999), (1, True), (1.0, 1), [1, 2], {"a": 1}, float("inf"), ()]
    for value in values * 2:
        read = torch.load(io.BytesIO(saved_bytes(value)), weights_only=True)
        assert read == value and type(read) is type(value)
        assert not isinstance(value, tuple) or [*map(type, read)] == [*map(type, value)]
