"""A few cases of the matrix, and its parts; ``make matrix`` runs all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix.compare import KINDS, Run, compare
from matrix.documented import DOCUMENTED, Documented
from matrix.features import AXES, EXTRA, FORBIDDEN, cases
from matrix.killing import Kill
from matrix.pairs import all_pairs, pairs_of
from matrix.running import run, run_killed

SHORT = ("defaults", "uneven", "pairs_06", "scheduled")
CASES = dict(cases())
MEASURED = CASES["defaults"] | {"metrics": "collection", "accumulation": "2", "logging": "both"}
"""Three torchmetrics objects in each step, of states that add up and of ones that are lists."""
RETURNING = CASES["defaults"] | {
    "callback": "top_k",
    "options": "reload",
    "logging": "both",
    "evaluation": "two_loaders",
    "run": "evaluated",
}
"""Callbacks and loops that decide by what no checkpoint holds: whether a file was written, when data were loaded."""
MORE = {"measured": MEASURED, "returning": RETURNING, "rate_finder": CASES["rate_finder"]}
DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"
START, CALL = ("on_train_epoch_start",), ("on_train_batch_start",)


def test_every_pair_of_features_is_in_a_case() -> None:
    made = [case for name, case in CASES.items() if name not in EXTRA]
    assert all_pairs(AXES, FORBIDDEN) == set().union(*map(pairs_of, made))
    assert not any(pair.items() <= case.items() for case in made for pair in FORBIDDEN)
    assert len(made) < 45


def test_documented_differences_are_in_the_document() -> None:
    """At most ten, and each can occur in some case."""
    assert len(DOCUMENTED) <= 10
    rows = DIFFERENCES.read_text()
    for each in DOCUMENTED:
        assert f"| {each.row}" in rows, each.name
        assert any(each.applies(each.kinds[0], case, each.worlds[0]) for case in CASES.values()), each.name


def test_kills_are_at_all_places() -> None:
    kills = [Kill.of_case(*item) for item in CASES.items()]
    assert {kill.rank for kill in kills} == {0, 1}
    assert len({kill.place for kill in kills}) == 5
    assert kills == [Kill.of_case(*item) for item in CASES.items()]


def record(**changes: Any) -> dict[str, Any]:
    made = {"state": {"w": torch.ones(2)}, "hooks": [CALL, ("on_fit_end",)], "logged": [(1, {"loss": 0.5})]}
    made |= {"table": [("version_0", {"loss": 0.5})], "metrics": {}, "evaluated": [], "counters": (1, 1)}
    return {**made, "checkpoints": {}, "replaces": False, **changes}


def made(*changes: dict[str, Any], batches: Any = ((1.0, 2.0), (3.0, 4.0))) -> Run:
    return Run(processes=[record(**each) for each in changes], batches={"step 0": [list(each) for each in batches]})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("state", {"w": torch.ones(2) + 1e-3}),
        ("hooks", [CALL]),
        ("hooks", [CALL, ("on_fit_end", "int")]),
        ("logged", [(1, {"loss": 0.501})]),
        ("logged", [(2, {"loss": 0.5})]),
        ("logged", []),
        ("table", [("version_1", {"loss": 0.5})]),
        ("metrics", {"val": 1.0}),
        ("evaluated", [{"val": 1.0}]),
        ("counters", (2, 1)),
        ("checkpoints", {"last.ckpt": 1}),
    ],
)
def test_differences_are_found(kind: str, value: Any) -> None:
    case = CASES["defaults"]
    assert compare(case, "two", made({}, {}), made({}, {})).unexplained == {}
    found = compare(case, "two", made({}, {kind: value}), made({}, {}))
    assert found.unexplained.keys() == found.differences.keys() == {f"rank 1: {kind}"}


def test_other_batches_are_found() -> None:
    case, theirs = CASES["defaults"], made({}, {})
    for batches in (((1.0, 2.0), (3.0, 5.0)), ((1.0, 3.0), (2.0, 4.0)), ((1.0, 2.0),) * 2 + ((3.0, 4.0),)):
        assert compare(case, "two", made({}, {}, batches=batches), theirs).unexplained.keys() == {"batches"}
    again = made(
        {}, {"hooks": [START, CALL, ("on_fit_end",)], "replaces": True}, batches=((1.0, 2.0),) * 2 + ((3.0, 4.0),)
    )
    assert compare(case, "killed", again, theirs).unexplained == {}


def test_a_missing_process_is_found() -> None:
    found = compare(CASES["defaults"], "two", made({}), made({}, {}))
    assert found.unexplained.keys() == {"exit"}
    assert compare(CASES["defaults"], "killed", made({}, {}), made({}, {})).unexplained.keys() == {"kill"}


def test_a_replacement_is_compared_with_the_end() -> None:
    theirs = [("setup",), START, CALL, CALL, ("on_fit_end",)]
    cases = [
        ([("setup",), ("setup",), START, CALL, ("on_fit_end",)], set()),
        ([START, CALL, ("setup",)], {"rank 1: hooks"}),
    ]
    for own, kinds in cases:
        mine = made({"hooks": theirs}, {"hooks": own, "replaces": True})
        found = compare(CASES["defaults"], "killed", mine, made({"hooks": theirs}, {}))
        assert found.unexplained.keys() == kinds


def test_a_documented_difference_must_occur_and_hides_nothing_else() -> None:
    case = CASES["norms"]
    theirs = made(*({"state": {"w": torch.ones(2), "running_mean": torch.zeros(1)}},) * 2)
    other = {"w": torch.ones(2), "running_mean": torch.ones(1)}
    found = compare(case, "two", made({"state": other}, {"state": other}), theirs)
    assert found.unexplained == {} and found.occurred == {"BatchNorm's statistics"}
    assert compare(case, "two", theirs, theirs).occurred == set()
    worse = {**other, "w": torch.zeros(2)}
    assert compare(case, "two", made({"state": worse}, {"state": other}), theirs).unexplained.keys() == {
        "rank 0: state"
    }


@pytest.mark.parametrize("each", DOCUMENTED, ids=lambda each: each.name)
def test_documented_kinds_exist(each: Documented) -> None:
    assert set(each.kinds) <= set(KINDS)
    assert all(axis in AXES for axis in each.when)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    status = run("ddp", 2, {name: CASES[name] for name in SHORT} | MORE, folder, 240)
    assert status == 0, next(folder.glob("torchrun*.log")).read_text()[-4000:]
    return folder


@pytest.mark.timeout(600)
def test_a_few_cases_in_a_world_of_two(ddp: Path, tmp_path: Path) -> None:
    status = run("unicron", 2, {name: CASES[name] for name in SHORT}, tmp_path, 240)
    assert status == 0, next(tmp_path.glob("torchrun*.log")).read_text()[-4000:]
    for name in SHORT:
        found = compare(CASES[name], "two", Run.load(tmp_path, name), Run.load(ddp, name))
        assert found.unexplained == {} and found.values > 500, name
        assert ("no sample is repeated" in found.occurred) == (name == "uneven")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "place", "rank", "step"),
    [
        ("scheduled", "training", 0, 6),  # in the second epoch, whose steps are smaller
        ("returning", "on_train_batch_end", 1, 2),
        pytest.param("rate_finder", "training", 0, 2, marks=pytest.mark.chaos),  # in the search
        ("rate_finder", "on_train_epoch_end", 1, 2),  # after it
    ],
)
def test_a_case_with_a_kill(name: str, place: str, rank: int, step: int, ddp: Path, tmp_path: Path) -> None:
    case = (CASES | MORE)[name]
    kill = Kill(rank=rank, place=place, step=step, delay=0.002 if place == "training" else 0.0)
    assert run_killed(name, case, kill, tmp_path) == 0
    found = compare(case, "killed", Run.load(tmp_path, name), Run.load(ddp, name))
    assert found.unexplained == {}, json.dumps(found.unexplained)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rank", "step", "delay"), [pytest.param(0, 1, 0.003, marks=pytest.mark.chaos), (1, 6, 0.0)])
def test_metric_objects_in_training_through_a_kill(
    rank: int, step: int, delay: float, ddp: Path, tmp_path: Path
) -> None:
    """In each epoch they are those of ddp over all ranks, each sample once."""
    kill = Kill(rank=rank, place="training", step=step, delay=delay)
    assert run_killed("measured", MEASURED, kill, tmp_path) == 0
    mine, theirs = Run.load(tmp_path, "measured"), Run.load(ddp, "measured")
    found = compare(MEASURED, "killed", mine, theirs)
    assert found.unexplained == {}, json.dumps(found.unexplained)
    names = {"train0_error", "train0_root", "train0_rank"}
    for process in (*mine.processes, *theirs.processes):
        assert len([row for _, row in process["table"] if row.keys() >= names]) == 3
        assert len({process["metrics"][name] for name in names}) == 3
