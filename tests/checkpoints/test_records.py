"""Records of complete checkpoints outlive an agent that is killed, for the next life of the same run of the task."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from unicron_lightning import wire
from unicron_lightning.agent.agent import sweep
from unicron_lightning.checkpoints.files import RECORD_SECONDS, digest_of, leave_record, left_records, record_path

RUN, OTHER_RUN = "ab" * 8, "cd" * 8


def left(folder: Path, agent: str, step: int, run: str = RUN, pid: int = 7) -> Path:
    """Leave the record of a checkpoint in the folder of an agent that has been killed."""
    checkpoint = folder / f"step={step}.ckpt"
    checkpoint.write_text(str(step))
    scratch = folder / f"agent-{agent}"
    scratch.mkdir(exist_ok=True)
    (scratch / "lock").touch()
    (scratch / "shared").mkdir(exist_ok=True)
    place = record_path(scratch, run, pid)
    leave_record(place, str(checkpoint), step, digest_of(str(checkpoint)), 1)
    return place


def found(folder: Path, run: str = RUN, *reported: wire.Checkpoint) -> list[int]:
    own = folder / "agent-new"
    own.mkdir(exist_ok=True)
    return [checkpoint.step for checkpoint in left_records(record_path(own, run), reported)]


def test_records_of_killed_agents_are_found_by_the_same_run(tmp_path: Path) -> None:
    left(tmp_path, "a", 4)
    left(tmp_path, "b", 6)
    left(tmp_path, "b", 8, OTHER_RUN)
    sweep(tmp_path)
    assert not list(tmp_path.glob("*/shared"))
    assert found(tmp_path) == [6, 4]
    assert found(tmp_path, OTHER_RUN) == [8]
    assert found(tmp_path, "") == []
    known = wire.Checkpoint(path="/c", step=5, digest="0" * 64, life=1)
    assert found(tmp_path, RUN, known) == [6]


def test_a_checkpoint_that_has_changed_is_not_found(tmp_path: Path) -> None:
    left(tmp_path, "a", 4)
    (tmp_path / "step=4.ckpt").write_text("changed")
    assert found(tmp_path) == []


@pytest.mark.parametrize("recorded", [False, True])
def test_folders_without_young_records_are_removed(tmp_path: Path, recorded: bool) -> None:
    place = left(tmp_path, "a", 4)
    old = time.time() - RECORD_SECONDS - 1
    os.utime(place, (old, old)) if recorded else place.unlink()
    sweep(tmp_path)
    assert not list(tmp_path.glob("agent-*"))
