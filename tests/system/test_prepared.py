"""Replacements of workers that train with Lightning are forked, unless the script sets variables before its imports."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from unicron_lightning import environ
from unicron_lightning.agent.workers.forked import PARENT
from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("starting.py")
ORDINARY = "ordinary_start reason='the script sets HF_HOME before it imports torch or Lightning'"


def is_prepared(cluster: LocalCluster) -> bool:
    """Whether the second node's agent has a process that forks workers."""
    children = psutil.Process(cluster.agents["node1"].pid).children()
    return any(str(PARENT) in child.cmdline() for child in children)


@pytest.mark.parametrize("sets", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_a_replacement_is_forked(sets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environ.PREPARE)
    if sets:
        (tmp_path / "sets").touch()
    with LocalCluster([SCRIPT, tmp_path], nodes=2, folder=tmp_path, stop_seconds=0.0) as cluster:
        until("steps", lambda: len(list(tmp_path.glob("note-*"))) == 2, 120)
        until("the agent's decision", lambda: is_prepared(cluster) or ORDINARY in cluster.log("node1"))
        cluster.kill_worker("node1")
        until("the replacement's steps", lambda: len(list(tmp_path.glob("note-*"))) == 3, 120)
        (tmp_path / "stop").touch()
        assert set(cluster.wait_exit(60).values()) == {0}
        notes = [json.loads(path.read_text()) for path in tmp_path.glob("note-*")]
        assert sorted(note["had_torch"] for note in notes) == [False, False, not sets]
        assert {note["home"] for note in notes} == {"elsewhere" if sets else None}
        assert cluster.log("node1").count("ordinary_start") == sets
