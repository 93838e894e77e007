"""Parts of scripts do under unicron what they do under Lightning's ddp: compiling, copying, gathering, and so on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import beside
from programs.launching import PROGRAMS, launch

from unicron_lightning.local_cluster.processes import free_port
from unicron_lightning.strategies.collectives.operations import ShapesDiffer, filled


def run(strategy: str, case: str, folder: Path) -> Any:
    """Run a case in a process of its own."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), "BESIDE_FOLDER": str(folder)}
    command = [sys.executable, str(PROGRAMS / "beside.py"), strategy, case]
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=280, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.chaos) if case in ("compiled_log", "copies") else case
        for case in beside.CASES
    ],
)
def test_a_script_is_like_under_ddp(case: str, tmp_path: Path) -> None:
    mine, theirs = run("unicron", case, tmp_path), run("ddp", case, tmp_path)
    assert rounded(mine) == rounded(theirs)
    if case == "compiled":
        assert mine[0] == 8 and mine[1]["val"] > 0 and mine[-1] is True
    if case == "copies":
        assert {(entry[0], entry[1]) for entry in mine if entry[0].startswith("fit")} == {
            (when, way) for when in ("fit before", "fit after") for way in ("deepcopy", "pickle", "cloudpickle")
        }


def rounded(value: Any) -> Any:
    """Numbers to six digits, at any depth."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def test_validation_outputs_of_unequal_numbers_are_gathered(tmp_path: Path) -> None:
    script = [str(PROGRAMS / "beside.py")]
    port = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    launch([*port, *script, "ddp", "gathers", str(tmp_path)], tmp_path)
    agent = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "unicron", "--rdzv-id", "beside"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    state = str(tmp_path / "state")
    launch([*agent, *endpoint, *script, "unicron", "gathers", str(tmp_path)], tmp_path, UNICRON_STATE_DIR=state)
    for rank in range(2):
        mine, theirs = (
            json.loads((tmp_path / f"{strategy}-gathers-{rank}.json").read_text()) for strategy in ("unicron", "ddp")
        )
        assert mine == theirs and len(mine) == 3


def test_rows_are_repeated_until_all_have_as_many() -> None:
    parts = [torch.arange(5.0), torch.tensor([7.0, 8.0]), torch.zeros(0)]
    assert [part.tolist() for part in filled("all_gather", parts)] == [
        [0, 1, 2, 3, 4],
        [7, 8, 7, 8, 7],
        [0, 1, 2, 3, 4],
    ]
    scalars = [torch.tensor(1.0), torch.tensor(2.0)]
    assert filled("all_gather", scalars) == scalars
    with pytest.raises(ShapesDiffer, match=r"all_gather\(\) was given tensors of the shapes \[\(2, 3\), \(2, 4\)\]"):
        filled("all_gather", [torch.zeros(2, 3), torch.zeros(2, 4)])
