"""A joiner has bit for bit what the members have, whatever hooks have done, and the result is that without failures."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from joins.running import Site, first_step, results, site
from joins.scripts import LOST, RESUMED, SCRIPTS
from joins.spread import WORKERS
from joins.walk import unequal
from joins.worker import script_of, train

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("joins")) as made:
        yield made


RANDOM = [f"random-{seed}" for seed in range(60)]
RANDOMLY_LOST = [f"lost-{seed}" for seed in range(30)]
IN_CI = 1
"""Number of random scripts of each kind that run with every change."""


def chosen(names: list[str]) -> list[Any]:
    return [*names[:IN_CI], *(pytest.param(name, marks=pytest.mark.chaos) for name in names[IN_CI:])]


@pytest.mark.parametrize("name", [*SCRIPTS, *chosen(RANDOM)])
def test_a_joiner_has_what_members_have(name: str, place: Site, tmp_path: Path) -> None:
    folder = place.run(name)
    joiner, member = first_step(folder)
    assert unequal(member, joiner) == {}
    ends = results(folder)
    assert len(ends) == 2 and sum(each["replaces"] for each in ends) == 1
    alone = train(script_of(name), tmp_path, alone=True)["end"]
    assert [far(each["end"], alone) for each in ends] == [{}, {}]


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.:UserWarning")
@pytest.mark.parametrize("name", RESUMED)
def test_a_joiner_of_a_fit_that_resumes(name: str, place: Site, tmp_path: Path) -> None:
    folder = place.run(name)
    joiner, member = first_step(folder)
    assert far(member, joiner) == far(joiner, member) == {}
    assert "ParametersDiffer" not in place.log(name)
    alone = train(script_of(name), tmp_path, alone=True)["end"]
    assert [far(each["end"], alone) for each in results(folder)] == [{}, {}]


@pytest.mark.parametrize("name", chosen([f"spread-{seed}" for seed in range(50)]))
def test_workers_that_begin_apart_save_in_one_folder(name: str, place: Site) -> None:
    """No worker chooses a run's folder before the task has one."""
    folder = place.run(name, "joins.spread", workers=WORKERS)
    first = folder / "out" / "lightning_logs" / "version_0"
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert {path.read_text() for path in folder.glob("saves-in-*")} == {str(first / "checkpoints")}
    assert (folder / "killed").exists() and (first / "metrics.csv").stat().st_size
    assert "dirpath has changed" not in place.log(name)


@pytest.mark.parametrize("name", [*LOST, *chosen(RANDOMLY_LOST)])
def test_a_new_life_continues_where_the_one_before_was_left(name: str, place: Site, tmp_path: Path) -> None:
    folder = place.run(name)
    ends = results(folder)
    assert [each["replaces"] for each in ends] == [True, True]
    of_memory = "memory" in name or name in RANDOMLY_LOST
    assert f"task_resumes_from_{'memory' if of_memory else 'checkpoint'}" in place.log(name)
    alone = train(script_of(name), tmp_path, alone=True)["end"]
    assert [far(each["end"], alone) for each in ends] == [{}, {}]
    kept = [sorted(path.name for path in each.glob("saved/*")) for each in (folder, tmp_path)]
    assert kept[0] == kept[1]
    assert rows(folder) == rows(tmp_path)


def rows(folder: Path) -> list[Any]:
    """Return which values are in which rows of the log files of a script."""
    found = []
    for path in sorted(folder.glob("logs/*/metrics.csv")):
        with path.open(newline="") as file:
            found += [
                [path.parent.name, row["step"], *sorted(k for k in row if row[k])] for row in csv.DictReader(file)
            ]
    return sorted(found)


def test_a_joiner_that_differs_ends_with_the_name_of_the_parameter(place: Site) -> None:
    """The members go on, and the next joiner has their state."""
    ends = results(place.run("odd"))
    said = place.log("odd")
    differs = re.search(r"the parameters of rank 1 on node joins-odd-[01] differ", said)  # either may come first
    assert differs and "and head.weight differs" in said, said
    assert "All workers that differ have joined before this step" in said
    assert "task_resumes_from" not in said and sorted(each["replaces"] for each in ends) == [False, True]
    assert far(ends[0]["end"], ends[1]["end"]) == {}


def test_a_schedule_may_have_attributes_of_its_rank(place: Site) -> None:
    ends = results(place.run("own_schedule"))
    assert "Differ" not in place.log("own_schedule") and sorted(each["replaces"] for each in ends) == [False, True]


def far(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what differs by more than a rounding in modules, optimizers and schedulers."""
    paths = [path for path in other if path.startswith(("module", "optimizers", "schedulers"))]
    pairs = {path: (one.get(path), other[path]) for path in paths}
    return {path: pair for path, pair in pairs.items() if not close(*pair)}


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) == 4:
        return one[1:3] == other[1:3] and torch.allclose(one[3].double(), other[3].double(), rtol=0, atol=1e-9)
    return bool(one == pytest.approx(other, rel=1e-9, abs=1e-12)) if isinstance(one, float) else True
