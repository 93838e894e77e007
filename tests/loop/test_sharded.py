"""Sharded models in a loop end under random deaths as whole ones do in one process, and use each sample once."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from joins.running import SECONDS, Site, World, results, site
from loop.sharded_worker import WORKERS
from loop.worker import EPOCHS, SAVED

from unicron_lightning.errors import UnicronError

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

STEPS = EPOCHS * 4
POINTS = ("forward", "call", "reduce", "reduced", "gate", "commit", "committed", "body", "validation", "evaluated")
RECOVERING = ("exchange", "connect", "join")
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("sharded"), "loop.sharded_worker") as made:
        yield made


@pytest.fixture(scope="module")
def alone(world: Site) -> dict[str, Any]:
    folder = world.folder / "single"
    folder.mkdir()
    process = world.start_alone(folder / "log")
    process.start("alone", "loop.sharded_worker", str(folder), "alone")
    limit = time.monotonic() + SECONDS
    while not process.has_ended() and time.monotonic() < limit:
        time.sleep(0.05)
    codes = process.codes()
    process.stop()
    assert codes == [0], (folder / "log" / "alone.log").read_text()
    found: dict[str, Any] = torch.load(folder / "alone" / "result.pt")
    return found


def drawn(seed: int) -> list[tuple[int, int, str]]:
    """A history of deaths."""
    chance = random.Random(seed)
    deaths = [(chance.randrange(WORKERS), chance.randrange(STEPS - 2), chance.choice(POINTS)) for _ in range(2)]
    return [*deaths, (chance.randrange(WORKERS), 1, chance.choice(RECOVERING))]


def run(
    world: Site,
    name: str,
    history: list[tuple[int, int, str]],
    *,
    workers: int = WORKERS,
    act: Callable[[World], None] = lambda started: None,
    **options: Any,
) -> list[dict[str, Any]]:
    folder = world.folder / name
    started = world.start_world(f"sharded-{name}", folder / "agents", workers, least=2, restarts=6)
    folder.mkdir(exist_ok=True)
    (folder / "history.json").write_text(json.dumps(history))
    (folder / "options.json").write_text(json.dumps({"workers": workers, **options}))
    try:
        started.start("loop.sharded_worker", str(folder), name)
        limit = time.monotonic() + SECONDS
        while not started.has_ended() and time.monotonic() < limit:
            act(started)
            started.keep_up()
            time.sleep(0.02)
        codes = started.codes()
    finally:
        started.stop()
    logs = "\n".join(path.read_text()[-3000:] for path in sorted((folder / "agents").glob("*.log")))
    assert set(codes) == {0}, f"{history} {codes}\n{logs}"
    assert not history or list(folder.glob("died-*")), f"{history}: nothing has died"
    return results(folder)


def check(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["state"].keys() == alone["state"].keys()
    for key, value in alone["state"].items():
        assert torch.allclose(found["state"][key].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE), key
    assert found["step"] == alone["step"] == STEPS
    assert found["rate"] == alone["rate"]
    assert torch.equal(found["random"], alone["random"])
    for part in ("losses", "evaluated"):
        assert found[part]
        for number, values in found[part].items():
            assert values == pytest.approx(alone[part][number], rel=TOLERANCE, abs=TOLERANCE), (part, number)


def check_predictions(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """All workers together have the output of each batch once."""
    pairs = sorted((indices, loss) for each in found for indices, loss in each["predicted"])
    expected = sorted(alone["predicted"])
    assert [indices for indices, _ in pairs] == [indices for indices, _ in expected]
    assert [loss for _, loss in pairs] == pytest.approx([loss for _, loss in expected], rel=TOLERANCE)


def test_a_run_without_deaths_is_that_of_whole_models_in_one_process(world: Site, alone: dict[str, Any]) -> None:
    found = run(world, "undisturbed", [])
    assert len(found) == WORKERS
    for each in found:
        check(each, alone)
    check_predictions(found, alone)
    assert all(each["predicted"] for each in found), "joiners that take the same shard at a time form no replica"
    assert any("clip by step.clip_grad_norm_" in each["refused"] for each in found)


@pytest.mark.parametrize("seed", range(4))
def test_random_deaths(seed: int, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"random{seed}", drawn(seed))
    assert found
    for each in found:
        check(each, alone)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_worker_dies_in_a_prediction(rank: int, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"predicting{rank}", [(rank, STEPS, "validation")])
    assert found
    check_predictions(found, alone)
    for each in found:
        check(each, alone)


def test_all_die_and_the_task_resumes_from_its_checkpoint(world: Site, alone: dict[str, Any]) -> None:
    found = run(world, "all", [(-1, SAVED + 2, "call")])
    assert len(found) == WORKERS
    for each in found:
        check(each, alone)
        assert SAVED < min(each["losses"]) <= SAVED + 3


def test_a_checkpoint_continues_in_another_number_of_shards_and_replicas(world: Site, alone: dict[str, Any]) -> None:
    path = world.folder / "single" / "alone" / "checkpoints" / f"step={SAVED}.ckpt"  # of whole models
    found = run(world, "other", [], workers=3, shards=3, load=str(path))
    assert len(found) == 3
    for each in found:
        check(each, alone)
        assert min(each["losses"]) == SAVED + 1


class AtStep:
    """Acts once, when a task has done a number of steps.

    Args:
        site: has the coordinator.
        step: the number.
        action: returns whether it has been done.
    """

    def __init__(self, site: Site, step: int, action: Callable[[World], bool]) -> None:
        self._site, self._step, self._action = site, step, action
        self.done = False

    def __call__(self, started: World) -> None:
        """Act if it is time."""
        progress = self._site.cluster.task_status(started.task).get("progress") or {"step": 0}
        if not self.done and progress["step"] >= self._step:
            self.done = self._action(started)


def test_a_node_leaves_and_another_one_joins(world: Site, alone: dict[str, Any]) -> None:
    def leave(started: World) -> bool:
        started.replace(1, signal.SIGTERM)
        return True

    act = AtStep(world, 3, leave)
    found = run(world, "leave", [], act=act)
    assert act.done and found
    for each in found:
        check(each, alone)


def test_an_operator_changes_the_number_of_shards(world: Site, alone: dict[str, Any]) -> None:
    def order(started: World) -> bool:
        with suppress(UnicronError):  # it has not begun to train
            world.cluster.fetch(f"/v1/tasks/{started.task}/relayout", method="POST", shards="4")
            return True
        return False

    act = AtStep(world, 3, order)
    found = run(world, "relayout", [], act=act)
    assert act.done and len(found) == WORKERS
    for each in found:
        check(each, alone)
        assert each["shards"] == 4 and min(each["losses"]) > 3
