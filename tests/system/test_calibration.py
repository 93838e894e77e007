"""A job with a wrong prior of its speed has the wrong number of workers until it is calibrated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicron_lightning.cli.job_file import read_job
from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.planner.performance.description import TransformerProfile

SCRIPT = Path(__file__).with_name("paced.py")
FLOPS = {"flat": 1e9, "steep": 3e9}
"""FLOPs of a step."""
STATED = {"steep": FLOPS["steep"] / 0.9, "flat": 10 * FLOPS["flat"]}
"""FLOP/s of a slot."""
SHAPES = {
    name: {"accelerator": "A100", "num_layers": layers, "hidden_size": 2048, "num_heads": 16, "sequence_length": 2048,
           "vocabulary_size": 51200, "global_batch_size": 12, "micro_batch_size": 4, "uneven_shares": True}
    for name, layers in (("flat", 24), ("steep", 18))
}  # fmt: skip
"""Models with steps of about 1.1 and 0.9 s with a slot, and a third of it with three."""
PRIORS: dict[str, dict[str, dict[str, Any]]] = {
    "profile": {
        name: {"flops_per_step": FLOPS[name], "profile": {slots: slots * STATED[name] for slots in (1, 2, 3)}}
        for name in FLOPS
    },
    "transformer": {name: {"transformer": SHAPES[name], "weight": {"flat": 2.0, "steep": 1.0}[name]} for name in FLOPS},
}
"""What the jobs state of their speeds: slots of ``flat`` are worth more."""


def slots(cluster: LocalCluster) -> dict[str, int]:
    """Return the number of slots that the plan in force gives to each job."""
    return dict(Counter(filter(None, cluster.status()["assigned"].values())))


@pytest.mark.chaos  # to keep `make test` short
@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("prior", PRIORS)
def test_a_job_with_a_wrong_prior_gets_the_right_plan_by_its_calibration(tmp_path: Path, prior: str) -> None:
    """``flat`` states that each slot brings as much as the first; in truth its steps always take 0.4 s."""
    about = PRIORS[prior]
    with LocalCluster(nodes=4, folder=tmp_path) as cluster:
        for name, pace in (("steep", ("0.3", "0")), ("flat", ("0", "0.4"))):
            cluster.submit(name, [SCRIPT, tmp_path, *pace], max_nodes=3, **about[name])
        cluster.wait_workers(3, task="flat")
        cluster.wait_step(3, task="flat")
        assert slots(cluster) == {"flat": 3, "steep": 1}, "the prior is believed"
        table = tmp_path / "flat.csv"
        done = cluster.unicron("calibrate", "flat", "--steps", "5", "--output", str(table))
        assert done.returncode == 0, done.stderr
        assert f"{table}: for `profile` of a job file" in done.stdout
        cluster.until("the right plan", lambda: slots(cluster) == {"flat": 1, "steep": 3})
        cluster.wait_workers(3, task="steep")
        assert cluster.task_status("flat")["target"] is None
        (tmp_path / "stop").touch()
        for task in ("flat", "steep"):
            cluster.wait_state("succeeded", task=task)
        [ends] = cluster.events("calibration_ends")
    assert ends["fields"] == {"reason": "", "skipped": []}
    (tmp_path / "again.yaml").write_text("command: [paced.py]\nmax_nodes: 3\nprofile: flat.csv\n")
    measured = read_job(tmp_path / "again.yaml", []).profile
    assert measured.keys() == {1, 2, 3}
    shape = msgspec.convert(SHAPES["flat"], TransformerProfile)
    flops = {"profile": FLOPS["flat"], "transformer": shape.flops_per_step}[prior]
    assert all(0.2 < rate * 0.4 / flops <= 1.1 for rate in measured.values()), measured
