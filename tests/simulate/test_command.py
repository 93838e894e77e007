"""The command as users run it: a sweep in one process and in two, its files, and errors in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from PIL import Image
from pyarrow import parquet

from unicron_lightning.coordinator.config import register_resolvers
from unicron_lightning.simulate.settings import POLICIES, read_settings

pytestmark = pytest.mark.usefixtures("with_figures")

SWEEP = ["-m", "policy=unicron,megatron", "trace=b", "trace.days=1", "seed=range(2)"]


def simulate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unicron_lightning.simulate", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.timeout(240)
def test_a_sweep_is_the_same_in_one_process_and_in_two(tmp_path: Path) -> None:
    one = simulate(tmp_path, *SWEEP, "hydra.sweep.dir=one")
    assert one.returncode == 0, one.stderr
    assert "4 simulations; ratio: WAF over that of megatron" in one.stdout
    two = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=two", "output.pictures=false"]
    result = simulate(tmp_path, *SWEEP, *two)
    assert result.returncode == 0, result.stderr
    for name in ("rows.csv", "summary.csv", "0/waf.csv", "0/incidents.csv", "0/row.json", "3/waf.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    for name in ("waf.png", "losses.png"):
        with Image.open(tmp_path / "one" / name) as picture:
            assert min(picture.size) > 200
        assert not (tmp_path / "two" / name).exists()
    row = json.loads((tmp_path / "one" / "0" / "row.json").read_text())
    losses = sum(row[f"lost_{loss}"] for loss in ("detection", "transition", "sub_healthy", "overhead"))
    assert row["of_ideal"] + losses == pytest.approx(1.0)
    assert sum(value for name, value in row.items() if name.startswith("time_")) == pytest.approx(1.0)


def test_one_run_with_parquet(tmp_path: Path) -> None:
    result = simulate(tmp_path, "policy=torchft", "trace=b", "trace.days=1", "output.format=parquet", "hydra.run.dir=x")
    assert result.returncode == 0, result.stderr
    assert "torchft" in result.stdout
    curve = parquet.read_table(tmp_path / "x" / "waf.parquet").to_pydict()
    assert curve["seconds"][0] == 0.0
    assert max(curve["waf"]) > 1e15


def test_a_wrong_key_is_one_line(tmp_path: Path) -> None:
    result = simulate(tmp_path, "+costs.unicron.detektion=3", "hydra.run.dir=x")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("simulate: costs.unicron.detektion=3: unknown key, expected one of detection, change, ")


def test_a_figure_of_the_paper_is_one_command(tmp_path: Path) -> None:
    fast = ("policy=unicron,oobleck", "seed=0", "output.pictures=false", "hydra.sweep.dir=x")
    result = simulate(tmp_path, "-m", "experiment=figure3", *fast)
    assert result.returncode == 0, result.stderr
    rows = [json.loads((tmp_path / "x" / str(job) / "row.json").read_text()) for job in range(2)]
    assert [(row["policy"], row["trace"], row["workload"]) for row in rows] == [
        ("unicron", "figure3", "gpt_7b"),
        ("oobleck", "figure3", "gpt_7b"),
    ]
    for row in rows:
        assert (row["faults"], row["days"], row["workers"]) == (10, 7.0, 64)
        assert row["samples_per_second"] == pytest.approx(128 * row["of_ideal"], rel=0.05)
    assert "samples/s" in result.stdout


@pytest.mark.parametrize("name", ["figure3", "figure4", "figure9", "figure10", "figure11"])
def test_the_sweep_of_a_figure_has_only_choices_that_exist(name: str) -> None:
    with initialize_config_module("unicron_lightning.conf.simulate", version_base="1.3"):
        overrides = [f"experiment={name}"]
        composed = compose("simulate", overrides=overrides, return_hydra_config=True)
        swept = {key: str(values).split(",") for key, values in composed.hydra.sweeper.params.items()}
        assert set(swept["policy"]) <= set(POLICIES) and len(set(swept["policy"])) == len(swept["policy"])
        for key in ("trace", "workload", "cluster.num_nodes"):
            for value in swept.get(key, ()):
                register_resolvers()
                data = OmegaConf.to_container(
                    compose("simulate", overrides=[*overrides, f"{key}={value}"]), resolve=True
                )
                read_settings(cast("dict[str, Any]", data)).scene()


MINE = """
from unicron_lightning.simulate.policy import TorchFT

class Slow(TorchFT):
    name = "slow"
    costs_of = "torchft"

    def shrink_seconds(self, costs):
        return 10 * costs.takes("continue")
"""


def test_a_policy_of_ones_own_and_what_is_finished_when_a_later_run_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    quiet = ("trace=b", "trace.days=1", "output.pictures=false", "output.reference=torchft", "hydra.sweep.dir=x")
    result = simulate(tmp_path, "-m", "policy=mine.Slow,torchft,mine.Fast", *quiet)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    said = "simulate: policy='mine.Fast': module 'mine' has no attribute 'Fast': expected MODULE.CLASS, importable here"
    assert result.stderr.strip().splitlines()[-1] == said
    rows = [json.loads((tmp_path / "x" / str(job) / "row.json").read_text()) for job in range(2)]
    assert [row["policy"] for row in rows] == ["slow", "torchft"]
    assert rows[0]["of_ideal"] < rows[1]["of_ideal"]
    assert "2 simulations; ratio: WAF over that of torchft" in result.stdout
    assert (tmp_path / "x" / "summary.csv").read_text().count("\n") == 3


INTERRUPTED_IN_A_LIBRARY = """
import signal
from omegaconf.errors import OmegaConfBaseException
from unicron_lightning.simulate import __main__ as command

def job(composed):
    # As OmegaConf does: its clean-up fails when Ctrl-C interrupts the change of a value.
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        raise OmegaConfBaseException("flags are gone")

command.job = job
command.main(["hydra.run.dir=x"])
"""


def test_an_error_that_ctrl_c_causes_in_a_library_counts_as_the_interruption(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IN_A_LIBRARY]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 130 and "Traceback" not in result.stderr
    assert result.stderr.endswith("\nsimulate: interrupted\n")


def test_ctrl_c_keeps_results_and_shows_no_traceback(tmp_path: Path) -> None:
    quiet = ("trace=b", "trace.days=300", "output.pictures=false", "hydra.sweep.dir=x")
    command = [sys.executable, "-m", "unicron_lightning.simulate", "-m", "policy=megatron", "seed=range(30)", *quiet]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "x" / "1" / "row.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert err.strip().splitlines()[-1] == "simulate: interrupted"
    assert "simulations; ratio: WAF over that of megatron" in out
    assert (tmp_path / "x" / "rows.csv").read_text().count("\n") >= 3
