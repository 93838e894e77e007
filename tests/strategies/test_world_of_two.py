"""A world of two has the results of a world of one, for any division."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import scenarios
from programs.launching import PROGRAMS, launch

from unicron_lightning.local_cluster.processes import free_port

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")

SCENARIOS = ("uneven", "resumed", "few", "accumulate", "manual")

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    folder = tmp_path_factory.mktemp("two")
    agent = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "unicron", "--rdzv-id", "scenarios"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    script = [str(PROGRAMS / "scenarios.py"), str(folder)]
    variables = {"UNICRON_STATE_DIR": str(folder / "state"), "PYTHONPATH": str(PROGRAMS.parent)}
    launch([*agent, *endpoint, *script], folder, **variables)
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    with pytest.MonkeyPatch.context() as variables:
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set inside, restored at the end
            variables.setenv(name, "0")
        return scenarios.run(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_world_does_not_matter(name: str, rank: int, one: Results, two: list[Results]) -> None:
    mine, theirs = two[rank][name], one[name]
    for key, value in theirs["state"].items():
        assert torch.allclose(mine["state"][key], value, rtol=1e-6, atol=1e-6), key
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    for part in ("metrics", "alone"):
        assert mine[part].keys() == theirs[part].keys()
        for key, value in theirs[part].items():
            assert mine[part][key] == pytest.approx(value, rel=1e-5), key


def test_resuming_in_the_middle_of_an_epoch(one: Results, two: list[Results]) -> None:
    for results in (one, *two):
        full, resumed = results["uneven"], results["resumed"]
        assert len(full["losses"]) == len(resumed["losses"]) + 5
        assert resumed["losses"] == pytest.approx(full["losses"][5:], rel=1e-6)
        assert all(torch.equal(resumed["state"][key], value) for key, value in full["state"].items())


def test_one_checkpoint_is_written(one: Results, two: list[Results]) -> None:
    assert two[0]["checkpoint"]["keys"] == one["checkpoint"]["keys"]
    assert two[0]["checkpoint"]["step"] == one["checkpoint"]["step"] == 5
    for key, value in one["checkpoint"]["weights"].items():
        assert torch.allclose(two[0]["checkpoint"]["weights"][key], value, rtol=1e-6, atol=1e-6), key
