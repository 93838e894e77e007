"""Sharded models in a loop end under random deaths as whole ones do in one process, and use each sample once."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from joins.running import Site, World, site
from loop.running import RECOVERING, TOLERANCE, single
from loop.running import check as check_all
from loop.running import run as run_workers
from loop.sharded_worker import SHARDS, WORKERS
from loop.worker import EPOCHS, SAVED

from unicron_lightning.errors import UnicronError

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

STEPS = EPOCHS * 4
POINTS = ("forward", "call", "reduce", "reduced", "gate", "commit", "committed", "body", "validation", "evaluated")
MODULE = "loop.sharded_worker"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("sharded"), MODULE) as made:
        yield made


@pytest.fixture(scope="module")
def alone(world: Site) -> dict[str, Any]:
    return single(world, world.folder / "single", MODULE)


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
    act: Any = None,
    **options: Any,
) -> list[dict[str, Any]]:
    (world.folder / name).mkdir()
    (world.folder / name / "options.json").write_text(json.dumps({"workers": workers, **options}))
    return run_workers(world, name, MODULE, history, workers=workers, least=2, act=act)


def check(found: dict[str, Any], alone: dict[str, Any]) -> None:
    """Compare a worker with one process; the script's own average is that of the worker's shard."""
    check_all(found, alone)
    shard, own = found.get("average", (0, {}))
    for name in own:
        value = alone["average"][1][name]
        rows = -(-len(value) // found["shards"])
        expected = value[shard * rows : (shard + 1) * rows]
        assert torch.allclose(own[name], expected, rtol=TOLERANCE, atol=TOLERANCE), (name, shard)


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


@pytest.mark.chaos  # the random deaths below are beside states that are kept, and beside streams
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_random_deaths(seed: int, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"random{seed}", drawn(seed))
    for each in found:
        check(each, alone)


@pytest.fixture(scope="module")
def alone_with_streams(world: Site) -> dict[str, Any]:
    return single(world, world.folder / "single", MODULE, "alone-stream")


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.chaos) for seed in (0, 1)), 2])
def test_random_deaths_with_streams(seed: int, world: Site, alone_with_streams: dict[str, Any]) -> None:
    history = [*drawn(50 + seed), (seed, STEPS // 2, "validation")] if seed else []
    found = run(world, f"stream{seed}", history)
    for each in found:
        check(each, alone_with_streams)
    outputs = sorted(loss for each in found for _, loss in each["predicted"])
    assert outputs == pytest.approx(sorted(loss for _, loss in alone_with_streams["predicted"]), rel=TOLERANCE)


def witnessed(
    world: Site, name: str, history: list[tuple[int, int, str]], **options: Any
) -> tuple[list[dict[str, Any]], list[str], list[dict[str, Any]]]:
    """Run with a witness in every second step; return results, cordoned nodes, and suspects."""
    found = run(world, name, history, run={"witness_every": 2}, **options)
    task = f"{MODULE.replace('.', '-')}-{name}"
    events = [each for each in world.cluster.events() if each["task"] == task]
    errors = [each["fields"] for each in events if each["name"] == "error_reported"]
    suspects = [each["details"]["suspect"] for each in errors if each["kind"] == "silent_data_corruption"]
    cordoned = [each["fields"]["node"].removeprefix(f"{task}-") for each in events if each["name"] == "node_cordoned"]
    return found, sorted(cordoned), suspects


def test_replicas_without_wrong_bits_are_left_alone(world: Site, alone: dict[str, Any]) -> None:
    found, cordoned, _ = witnessed(world, "quiet", [])
    assert len(found) == WORKERS and cordoned == []
    for each in found:
        check(each, alone)
    logs = "".join(path.read_text() for path in (world.folder / "quiet" / "agents").glob("*.log"))
    assert "gradients_differ" not in logs and "witness_every=2: " in logs


@pytest.mark.parametrize(("workers", "same"), [(4, False), (6, True)])
def test_a_replica_with_a_node_whose_bits_flip_is_found(
    workers: int, same: bool, world: Site, alone: dict[str, Any]
) -> None:
    """With three replicas also if they flip in the same way each time."""
    flips = {"node": "-1", "step": 6, "same": same}
    found, cordoned, suspects = witnessed(world, f"flips{workers}", [], workers=workers, flips=flips)
    assert len(found) == workers - SHARDS
    for each in found:
        check(each, alone)
    assert len(cordoned) == SHARDS and "1" in cordoned, "the nodes of one replica"
    assert {(each["step"], each["last_right"]) for each in suspects} == {(6, 4)}


@pytest.mark.chaos  # wrong bits of shards are found above, and test_witness has deaths beside wrong bits
@pytest.mark.parametrize("point", ["compared", "call", "reduced", "commit", "exchange"])
def test_a_death_beside_wrong_bits(point: str, world: Site, alone: dict[str, Any]) -> None:
    """In the same step, or in the recovery from it: whether they are found or not, nothing hangs.

    If the wrong node's worker is the killed one, the next one there may compute a whole step before it is compared.
    """
    flips = {"node": "-1", "step": 6, "same": False}
    name = f"flips-{point}"
    found, cordoned, suspects = witnessed(world, name, [(0, 5, point)], workers=6, flips=flips)
    deaths = [each["fields"] for each in world.cluster.events("worker_died")]
    killed = [each["worker"] for each in deaths if each.get("code") == 9 and f"{name}-1-" in each["worker"]]
    assert found and ("1" in cordoned or killed), "if it is the killed one, the next one may be there only at the end"
    if len(cordoned) == SHARDS and {each["step"] for each in suspects} == {6}:
        for each in found:
            check(each, alone)


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.chaos)])
def test_a_worker_dies_in_a_prediction(rank: int, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"predicting{rank}", [(rank, STEPS, "validation")])
    check_predictions(found, alone)
    for each in found:
        check(each, alone)


KINDS: dict[str, dict[str, Any]] = {
    "file": {},
    "folder": {"beside": True, "keep": 2},
    "memory": {"memory_every_n_steps": 2},
}


@pytest.mark.parametrize(
    "kind", ["folder", *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("file", "memory"))]
)
def test_all_die_and_the_task_resumes(kind: str, world: Site, alone: dict[str, Any]) -> None:
    found = run(world, f"all-{kind}", [(-1, SAVED + 2, "call")], run=KINDS[kind])
    assert len(found) == WORKERS
    for each in found:
        check(each, alone)
    first = min(min(each["losses"]) for each in found)  # some join the new life later
    assert first == SAVED + 2 if kind == "memory" else SAVED < first <= SAVED + 3
    said = "".join(path.read_text() for path in (world.folder / f"all-{kind}" / "agents").glob("*.log"))
    assert ("task_resumes_from_memory" in said) == (kind == "memory")
    kept = sorted(path.name for path in (world.folder / f"all-{kind}" / "checkpoints").glob("*.ckpt"))
    assert kept == (["step=11.ckpt", "step=12.ckpt"] if kind == "folder" else ["step=5.ckpt"])


@pytest.mark.parametrize("kind", ["memory", pytest.param("folder", marks=pytest.mark.chaos)])
def test_random_deaths_with_states_kept_beside_the_training(kind: str, world: Site, alone: dict[str, Any]) -> None:
    for each in run(world, f"random-{kind}", drawn(20), run=KINDS[kind]):
        check(each, alone)


def test_a_folder_of_shards_continues_in_another_number_of_them(world: Site, alone: dict[str, Any]) -> None:
    run(world, "folders", [], run={"beside": True}, average=False)
    path = world.folder / "folders" / "checkpoints" / f"step={SAVED}.ckpt"
    assert path.is_dir()
    found = run(world, "folders-3", [], workers=3, shards=3, load=str(path), average=False)
    for each in found:
        check(each, alone)
        assert min(each["losses"]) == SAVED + 1


@pytest.mark.chaos  # to keep `make test` short
def test_a_reproducible_run_has_the_same_bits_with_any_replicas(world: Site) -> None:
    """Each replica has the same number of shards."""
    exact = {"run": {"reproducible": True}, "batch_norm": False}
    expected, *_ = run(world, "exact-one", [], workers=SHARDS, **exact)
    for number, history in enumerate((drawn(31), drawn(32), [(-1, SAVED + 1, "call"), (1, 2, "reduce")])):
        for each in run(world, f"exact-{number}", history, **exact):
            assert each["state"].keys() == expected["state"].keys()
            changed = [key for key, value in each["state"].items() if not torch.equal(value, expected["state"][key])]
            assert changed == []
            for part in ("losses", "evaluated"):
                assert each[part] == {step: expected[part][step] for step in each[part]}
    logs = [
        "".join(p.read_text() for p in (world.folder / f"exact-{name}").glob("agents/*.log")) for name in ("one", 0)
    ]
    digests = {line for log in logs for line in log.splitlines() if "reproducible: digest " in line}
    assert len({line.partition("reproducible: ")[2] for line in digests}) == 1


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


@pytest.mark.parametrize(
    ("name", "history"),
    [
        ("shampoo", [(1, 2, "update"), (2, 4, "updated"), (0, 6, "commit"), (3, 8, "body"), (0, 1, "exchange")]),
        pytest.param("soap", [(0, 2, "updated"), (3, 5, "update"), (-1, SAVED + 2, "update")], marks=pytest.mark.chaos),
    ],
)
def test_deaths_in_updates_of_whole_matrices(name: str, history: list[tuple[int, int, str]], world: Site) -> None:
    """The other model of the loop is not sharded; after the death of all workers states in memory are continued."""
    options, folder = {"whole_updates": name}, world.folder / f"single-{name}"
    folder.mkdir()
    (folder / "options.json").write_text(json.dumps(options))
    alone = single(world, folder, MODULE)
    for each in run(world, f"whole-{name}", history, run=KINDS["memory"], **options):
        check(each, alone)


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
    found = run(world, "relayout", [], act=act, average=False)
    assert act.done and len(found) == WORKERS
    for each in found:
        check(each, alone)
        assert each["shards"] == 4 and min(each["losses"]) > 3
