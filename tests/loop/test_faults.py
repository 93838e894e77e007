"""A loop, and a Trainer, under random deaths end as in one process without any, and use each sample once an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from joins.running import Site, site
from loop.running import RECOVERING, TOLERANCE, check, run, single
from loop.worker import BETWEEN, BREAK, EPOCHS, LOOPS, SAVED, WORKERS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

POINTS = ("forward", "micro_batch", "launched", "reduced", "commit", "committed", "body", "validation", "evaluated")
KINDS = {**LOOPS, "trainer": 4}
"""With the steps of an epoch on average."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("loop"), "loop.worker", "loop.trainer_worker") as made:
        yield made


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def alone(kind: str, world: Site) -> dict[str, Any]:
    return single_of(world, kind)


def single_of(world: Site, kind: str, *, reproducible: bool = False) -> dict[str, Any]:
    """Train in one process, once."""
    folder = world.folder / f"{kind}-{'exact' if reproducible else 'single'}"
    if not folder.exists():
        folder.mkdir()
        if reproducible:
            (folder / "reproducible").touch()
        return single(world, folder, module_of(kind), f"{kind}-alone")
    found: dict[str, Any] = torch.load(folder / "alone" / "result.pt")
    return found


def module_of(kind: str) -> str:
    """Return the module of a kind's worker: a loop, or a Trainer."""
    return "loop.worker" if kind in LOOPS else "loop.trainer_worker"


def drawn(seed: int, steps: int) -> list[tuple[int, int, str]]:
    """A history of deaths."""
    chance = random.Random(seed)
    deaths = [(chance.randrange(WORKERS), chance.randrange(steps - 2), chance.choice(POINTS)) for _ in range(2)]
    return [*deaths, (chance.randrange(WORKERS), 1, chance.choice(RECOVERING))]


def test_alone_each_sample_is_used_once_in_an_epoch(kind: str, alone: dict[str, Any]) -> None:
    steps = EPOCHS * KINDS[kind]
    assert list(alone["losses"]) == list(range(1, steps + 1))
    others = {"stream": [5, 10, 15, 20], "schedule": [4, 8, 16, 24], "loops": [4, BREAK, 8, 12, 16]}
    ends = others.get(kind, [4, 8, 12, 16])
    assert list(alone["evaluated"]) == ends
    uses = alone["state"]["net._orig_mod.uses" if kind == "compiled" else "net.uses"]
    if kind == "stream":  # the micro-batches of the last steps are fewer, and so count for more
        assert (uses[:90] <= -EPOCHS / 6 + TOLERANCE).all() and not uses[90:].any()
    else:
        once = -EPOCHS / 6 if kind != "schedule" else -2 / 6 - 2 / 3
        assert torch.allclose(uses, torch.full_like(uses, once), rtol=TOLERANCE, atol=TOLERANCE), uses
    assert alone["scale"] == (128.0 if kind == "scaler" else 1.0)


def seeds() -> list[Any]:
    """With each change one history of each kind, and some of the first kind."""
    often = [("plain", seed) for seed in range(3)] + [(kind, 0) for kind in KINDS if kind not in ("plain", "compiled")]
    rest = [(kind, seed) for kind in KINDS for seed in range(20) if (kind, seed) not in often]
    return [*often, *(pytest.param(*each, marks=pytest.mark.chaos) for each in rest)]


@pytest.mark.parametrize(("kind", "seed"), seeds(), indirect=["kind"], scope="module")
def test_random_deaths(kind: str, seed: int, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"{kind}-random{seed}", module_of(kind), drawn(seed, EPOCHS * KINDS[kind]), workers=WORKERS)
    for each in found:
        check(each, alone)


@pytest.mark.parametrize(
    "kind",
    ["plain", "memory", "trainer", *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("stream", "beside"))],
    indirect=True,
)
def test_all_die_and_the_task_resumes_from_its_checkpoint(kind: str, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"{kind}-all", module_of(kind), [(-1, SAVED + 2, "micro_batch")], workers=WORKERS)
    assert len(found) == WORKERS
    for each in found:
        check(each, alone)
    first = min(min(each["losses"]) for each in found)
    assert first == SAVED + 2 if kind == "memory" else SAVED < first <= SAVED + 3
    said = "".join(path.read_text() for path in (world.folder / f"{kind}-all" / "agents").glob("*.log"))
    assert ("task_resumes_from_memory" in said) == (kind == "memory")
    if kind == "beside":
        kept = sorted(path.name for path in (world.folder / "beside-all" / "checkpoints").glob("*.ckpt"))
        assert kept == ["step=15.ckpt", "step=16.ckpt"]


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.chaos), "trainer"])
def test_a_reproducible_run_has_the_bits_of_one_process(kind: str, world: Site) -> None:
    name = f"{kind}-exact"
    alone = single_of(world, kind, reproducible=True)
    steps = EPOCHS * KINDS[kind]
    histories = [drawn(11, steps), drawn(12, steps), [(-1, SAVED + 1, "micro_batch"), (1, 2, "launched")]]
    for number, history in enumerate(histories):
        (world.folder / f"{name}{number}").mkdir()
        (world.folder / f"{name}{number}" / "reproducible").touch()
        for each in run(world, f"{name}{number}", module_of(kind), history, workers=WORKERS):
            assert each["state"].keys() == alone["state"].keys()
            assert [key for key, value in each["state"].items() if not torch.equal(value, alone["state"][key])] == []
            for part in ("losses", "evaluated"):
                assert each[part] == {step: alone[part][step] for step in each[part]}
    log = (world.folder / name / "log" / "alone.log").read_text()
    assert log.count("reproducible: ") == 2 and log.count("reproducible: digest ") == 1


@pytest.mark.parametrize("kind", ["loops"], indirect=True)
@pytest.mark.parametrize("rank", [1, -1])
def test_what_follows_a_loop_that_is_left_out_is_that_of_the_task(
    kind: str, rank: int, world: Site, alone: dict[str, Any]
) -> None:
    """A replacement, and all workers of a new life, leave out the first loop, and have its model no more."""
    name = f"{kind}-between{rank}"
    found = run(world, name, module_of(kind), [(rank, SAVED + BREAK + 1, "micro_batch")], workers=WORKERS)
    said = "".join(path.read_text() for path in (world.folder / name / "agents").glob("*.log"))
    # Workers that came before the first one had left out the loop start again, and may come when the others have ended.
    late = said.count("FitPassed: ") + (rank == 1)
    assert len(found) >= max(1, WORKERS - late)
    for each in found:
        check(each, alone)
        assert each["evaluated"][BREAK] == pytest.approx(alone["evaluated"][BREAK], rel=TOLERANCE)
    saved, expected = (torch.load(path, weights_only=True) for path in _between(world, kind, name))
    for key, value in expected["net"].items():
        assert torch.allclose(saved["net"][key].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE), key


def _between(world: Site, kind: str, name: str) -> list[Path]:
    """Return the paths of the checkpoints between the loops: of the task, and of one process."""
    return [world.folder / name / BETWEEN, world.folder / f"{kind}-single" / "alone" / BETWEEN]


def test_a_second_run_begins_with_the_first_ranks_model(world: Site) -> None:
    alone = single(world, world.folder / "second-single", "loop.second_worker", "second-alone")
    found = run(world, "second", "loop.second_worker", [], workers=WORKERS, least=WORKERS)
    assert len(found) == WORKERS
    for each in found:
        check(each, alone)
