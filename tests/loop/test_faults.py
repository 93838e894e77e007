"""A loop under random deaths ends as it does in one process without any, and uses each sample once in an epoch."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from joins.running import SECONDS, Site, results, site
from loop.worker import BETWEEN, BREAK, EPOCHS, KINDS, SAVED, WORKERS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

POINTS = ("forward", "micro_batch", "launched", "reduced", "commit", "committed", "body", "validation", "evaluated")
RECOVERING = ("exchange", "connect", "join")
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("loop"), "loop.worker") as made:
        yield made


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def alone(kind: str, world: Site) -> dict[str, Any]:
    return single(world, kind)


def single(world: Site, kind: str, *, reproducible: bool = False) -> dict[str, Any]:
    """Train in one process, once."""
    folder = world.folder / f"{kind}-{'exact' if reproducible else 'single'}"
    if folder.exists():
        return torch.load(folder / "alone" / "result.pt")
    folder.mkdir()
    if reproducible:
        (folder / "reproducible").touch()
    process = world.start_alone(folder / "log")
    process.start("alone", "loop.worker", str(folder), f"{kind}-alone")
    limit = time.monotonic() + SECONDS
    while not process.has_ended() and time.monotonic() < limit:
        time.sleep(0.05)
    codes = process.codes()
    process.stop()
    assert codes == [0], (folder / "log" / "alone.log").read_text()
    return torch.load(folder / "alone" / "result.pt")


def drawn(seed: int, steps: int) -> list[tuple[int, int, str]]:
    """A history of deaths."""
    chance = random.Random(seed)
    deaths = [(chance.randrange(WORKERS), chance.randrange(steps - 2), chance.choice(POINTS)) for _ in range(2)]
    return [*deaths, (chance.randrange(WORKERS), 1, chance.choice(RECOVERING))]


def run(
    world: Site, name: str, history: list[tuple[int, int, str]], *, reproducible: bool = False
) -> list[dict[str, Any]]:
    folder = world.folder / name
    started = world.start_world(f"loop-{name}", folder / "agents", WORKERS, least=1, restarts=6)
    folder.mkdir(exist_ok=True)
    (folder / "history.json").write_text(json.dumps(history))
    if reproducible:
        (folder / "reproducible").touch()
    try:
        started.start("loop.worker", str(folder), name)
        limit = time.monotonic() + SECONDS
        while not started.has_ended() and time.monotonic() < limit:
            time.sleep(0.02)
        codes = started.codes()
    finally:
        started.stop()
    logs = "\n".join(path.read_text()[-3000:] for path in sorted((folder / "agents").glob("*.log")))
    assert set(codes) == {0}, f"{history} {codes}\n{logs}"
    assert list(folder.glob("died-*")), f"{history}: nothing has died"
    return results(folder)


def check(found: dict[str, Any], alone: dict[str, Any]) -> None:
    for key, value in alone["state"].items():
        assert torch.allclose(found["state"][key].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE), key
    assert found["step"] == alone["step"]
    assert found["rate"] == alone["rate"] and found["scale"] == alone["scale"]
    assert torch.equal(found["random"], alone["random"])
    for part in ("losses", "evaluated"):
        for number, values in found[part].items():
            assert values == pytest.approx(alone[part][number], rel=TOLERANCE, abs=TOLERANCE), (part, number)


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
    often = [("plain", seed) for seed in range(6)] + [(kind, 0) for kind in KINDS if kind != "plain"]
    rest = [(kind, seed) for kind in KINDS for seed in range(20) if (kind, seed) not in often]
    return [*often, *(pytest.param(*each, marks=pytest.mark.chaos) for each in rest)]


@pytest.mark.parametrize(("kind", "seed"), seeds(), indirect=["kind"], scope="module")
def test_random_deaths(kind: str, seed: int, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"{kind}-random{seed}", drawn(seed, EPOCHS * KINDS[kind]))
    assert found
    for each in found:
        check(each, alone)


@pytest.mark.parametrize("kind", ["plain", "stream", "beside", "memory"], indirect=True)
def test_all_die_and_the_task_resumes_from_its_checkpoint(kind: str, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"{kind}-all", [(-1, SAVED + 2, "micro_batch")])
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


def test_a_reproducible_loop_has_the_bits_of_one_process(world: Site) -> None:
    alone = single(world, "plain", reproducible=True)
    steps = EPOCHS * KINDS["plain"]
    histories = [drawn(11, steps), drawn(12, steps), [(-1, SAVED + 1, "micro_batch"), (1, 2, "launched")]]
    for number, history in enumerate(histories):
        found = run(world, f"plain-exact{number}", history, reproducible=True)
        assert found
        for each in found:
            assert each["state"].keys() == alone["state"].keys()
            assert [key for key, value in each["state"].items() if not torch.equal(value, alone["state"][key])] == []
            for part in ("losses", "evaluated"):
                assert each[part] == {step: alone[part][step] for step in each[part]}
    log = (world.folder / "plain-exact" / "log" / "alone.log").read_text()
    assert log.count("reproducible: ") == 2 and log.count("reproducible: digest ") == 1


@pytest.mark.parametrize("kind", ["loops"], indirect=True)
@pytest.mark.parametrize("rank", [1, -1])
def test_what_follows_a_loop_that_is_left_out_is_that_of_the_task(
    kind: str, rank: int, world: Site, alone: dict[str, Any]
) -> None:
    """A replacement, and all workers of a new life, leave out the first loop, and have its model no more."""
    name = f"{kind}-between{rank}"
    found = run(world, name, [(rank, SAVED + BREAK + 2, "micro_batch")])
    assert len(found) == WORKERS
    for each in found:
        check(each, alone)
        assert each["evaluated"][BREAK] == pytest.approx(alone["evaluated"][BREAK], rel=TOLERANCE)
    saved, expected = (torch.load(path, weights_only=True) for path in _between(world, kind, name))
    for key, value in expected["net"].items():
        assert torch.allclose(saved["net"][key].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE), key


def _between(world: Site, kind: str, name: str) -> list[Path]:
    """Return the paths of the checkpoints between the loops: of the task, and of one process."""
    return [world.folder / name / BETWEEN, world.folder / f"{kind}-single" / "alone" / BETWEEN]
