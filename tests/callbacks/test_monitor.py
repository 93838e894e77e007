"""`UnicronMonitor` in a world of one, and through the loss of the worker that logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from system import cluster
from system.cluster import Cluster

from unicron_lightning import wire
from unicron_lightning.callbacks import UnicronMonitor
from unicron_lightning.coordinator.incidents.facts import AgentLoss
from unicron_lightning.errors import ConfigError
from unicron_lightning.local_cluster.processes import kill

Logged = Callable[[], list[dict[str, float]]]
SCRIPT = cluster.SCRIPT.with_name("monitored.py")


def test_the_world_is_logged_at_once_and_then_as_often_as_all_else(train: Callable[..., Any], rows: Logged):
    monitor = UnicronMonitor(display="off")
    train([monitor])
    logged = {row["step"]: row for row in rows() if "unicron/world_size" in row}
    assert sorted(logged) == [0, 1, 3, 5, 7, 9]
    assert {row["unicron/world_size"] for row in logged.values()} == {1}
    assert {row["unicron/incidents"] for row in logged.values()} == {0}


def test_an_incident_is_told_in_lines(train: Callable[..., Any], rows: Logged, capsys: pytest.CaptureFixture[str]):
    class Told(UnicronMonitor):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 4:
                loss = AgentLoss(agent="n2-abc", node="n2", away_since=4.0, silent=None)
                self.history.take(wire.Notice(name=loss.event, at=5.0, incident="i1", fields=loss.entry))
                fields = {"epoch": 2, "step": 4, "world": 1, "recomputed": [1]}
                self.history.take(wire.Notice(name="worker.recovered", at=5.5, incident=None, fields=fields))
            super().on_train_batch_end(trainer, *arguments)

    train([Told()], log_every_n_steps=100)
    assert (
        "i1 node lost n2: training continues, transition 500 ms, 1 micro-batches computed again"
        in capsys.readouterr().err
    )
    first, second = [row for row in rows() if "unicron/incidents" in row]
    assert (first["step"], first["unicron/incidents"]) == (0, 0)
    assert (second["step"], second["unicron/incidents"], second["unicron/recovery_ms"]) == (3, 1, 500.0)


def test_the_live_picture(train: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    train([UnicronMonitor(display="live")])
    shown = capsys.readouterr().err
    assert "world 1 of 1" in shown and "step 10 of 10" in shown


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ConfigError, match=r"display='loud': expected one of auto, live, lines, off"):
        UnicronMonitor(display="loud")  # type: ignore[arg-type]


def test_another_strategy_is_refused(train: Callable[..., Any]):
    with pytest.raises(ConfigError, match=r'UnicronMonitor needs Trainer\(strategy="unicron"\)'):
        train([UnicronMonitor()], strategy="auto")


@pytest.mark.faults
def test_who_becomes_the_first_worker_goes_on_telling(tmp_path: Path, rows: Logged) -> None:
    shape = {"nodes": 2, "full": 2, "pace": 0.02, "slow": 0.04}
    with Cluster(tmp_path, agents=2, nodes="1:2", settings=shape, script=SCRIPT) as cluster:
        first = next(line for line in cluster.wait_world(2) if line["rank"] == 0)
        kill(first["pid"])
        cluster.watch(lambda: [row for row in rows() if "unicron/sub_healthy_s" in row], "the bill in the log", 150)
        cluster.finish()
    logged = [row for row in rows() if "unicron/world_size" in row]
    steps = [row["step"] for row in logged]
    assert len(steps) == len(set(steps)), "each step once, whoever logs"
    recovered = next(row for row in logged if "unicron/recovery_ms" in row)
    assert (recovered["unicron/world_size"], recovered["unicron/incidents"]) == (1, 1)
    assert 0 < recovered["unicron/recovery_ms"] < 60_000
    closed = next(row for row in logged if "unicron/sub_healthy_s" in row)
    assert closed["unicron/world_size"] == 2
    assert closed["unicron/recomputed_micro_batches"] == recovered["unicron/recomputed_micro_batches"]
    bill = next(event for event in cluster.events("incident_closed") if event["incident"] == "i1")
    for name in ("detection", "transition"):
        assert closed[f"unicron/{name}_ms"] == pytest.approx(1e3 * bill["phases"][name]["seconds"])
    output = [line for log in tmp_path.glob("agent-*.log") for line in log.read_text().splitlines()]
    told = [line for line in output if line.startswith("i1 ")]
    assert len(told) == 2 and "training continues" in told[0] and "restored" in told[1]
    goodput = [row["train/goodput"] for row in rows() if "train/goodput" in row]
    assert goodput and all(0 < value < 1 for value in goodput)
