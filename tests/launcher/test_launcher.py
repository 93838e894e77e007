"""Sweeps of a Hydra program with real coordinators, daemons and torchrun agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coordinator.shell import Coordinator

from unicron_lightning.launcher.job import quoted
from unicron_lightning.local_cluster.cluster import LocalCluster

PROGRAM = Path(__file__).with_name("program.py")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


def sweep(folder: Path, *overrides: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    notes, into = folder / "notes.json", quoted(str(folder / "it's a sweep"))
    command = [sys.executable, str(PROGRAM), "-m", "hydra/launcher=unicron", f"folder={folder}", *overrides]
    command += [f"hydra.sweep.dir={into}", "hydra.launcher.poll_seconds=0.2"]
    done = subprocess.run(
        command,
        env={**os.environ, "NOTES": str(notes), "OMP_NUM_THREADS": "1", "COPIED": "yes", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done, json.loads(notes.read_text()) if notes.exists() else []


def test_a_sweep_shares_a_cluster_and_its_results_come_in_order(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, folder=tmp_path / "cluster") as cluster:
        done, returns = sweep(
            tmp_path,
            "x=1,2,13,4",
            f"hydra.launcher.endpoint={cluster.endpoint}",
            "hydra.launcher.max_restarts=1",
            UNICRON_TOKEN=cluster.access.token.secret,
        )
        assert len(returns) == 4, done.stderr
        jobs = cluster.fetch("/v1/jobs")
    assert [each["x"] for each in returns] == [1, 2, 13, 4]
    assert [each["number"] for each in returns] == [0, 1, 2, 3]
    assert [each["status"] for each in returns] == ["COMPLETED", "COMPLETED", "FAILED", "COMPLETED"]
    for number, x in ((0, 1), (1, 2), (3, 4)):
        assert returns[number]["returned"] == {"x": x, "twice": 2 * x, "number": number, "copied": "yes"}
    failure = returns[2]["returned"]
    assert "ValueError: 13 is not to be had" in failure
    assert "torchrun" in failure
    assert len(list(tmp_path.glob("start-2-*"))) == 2, "it died once, and was started again"
    assert len(list(tmp_path.glob("start-13-*"))) == 2, "one restart"
    assert done.returncode == 1
    assert "SweepJobFailed" in done.stderr and "13 is not to be had" in done.stderr
    assert sorted(job["state"] for job in jobs) == ["failed", "succeeded", "succeeded", "succeeded"]
    assert all(job["name"].startswith("program-") for job in jobs)


def test_beside_a_coordinator_that_runs_no_jobs_a_sweep_runs_its_own(tmp_path: Path) -> None:
    """As the one that an agent of a training starts; the variable names it."""
    with Coordinator(tmp_path / "state", "coordinator=embedded", "coordinator.startup_linger=200") as other:
        endpoint = f"127.0.0.1:{other.port}"
        done, returns = sweep(tmp_path, "x=5,6", "hydra.launcher.slots=2", UNICRON_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert f"the coordinator at {endpoint} belongs to a training and has no daemons" in done.stdout
    assert [each["returned"]["twice"] for each in returns] == [10, 12]
    assert [Path(each["folder"]).name for each in returns] == ["0", "1"]


def test_no_coordinator_is_said_in_words(tmp_path: Path) -> None:
    done, _ = sweep(tmp_path, "x=5,6", "hydra.launcher.embedded=false", UNICRON_ENDPOINT="127.0.0.1:1")
    assert done.returncode == 1
    assert "no coordinator answers at 127.0.0.1:1" in done.stderr
