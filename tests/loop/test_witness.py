"""Wrong bits on some nodes: they are found before the commit, and the others end as without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from joins.running import Site, results, site
from loop.running import check
from loop.test_faults import single_of
from loop.worker import SAVED, WORKERS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

Flip = tuple[int, int, str, list[int] | None, bool]
"""As of `loop.worker.Flips`."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("witness"), "loop.worker") as made:
        yield made


def run(
    world: Site,
    name: str,
    *flips: Flip,
    every: int = 1,
    workers: int = WORKERS,
    history: list[Any] | None = None,
    codes: set[int] | None = None,
    **options: Any,
) -> tuple[list[dict[str, Any]], str, list[dict[str, Any]]]:
    """Run a loop with a witness; return its results, the agents' output, and the suspects of its incidents."""
    folder = world.folder / name
    started = world.start_world(f"w-{name}", folder / "agents", workers, least=1, restarts=6)
    folder.mkdir(exist_ok=True)
    options = {"witness_every": every, "digest_every": 0, **options}
    (folder / "witness.json").write_text(json.dumps({"options": options, "flips": flips, "workers": workers}))
    (folder / "history.json").write_text(json.dumps(history or []))
    found = started.run("loop.worker", str(folder), name)
    logs = "\n".join(path.read_text()[-6000:] for path in sorted((folder / "agents").glob("*.log")))
    assert set(found) == (codes or {0}), f"{flips} {found}\n{logs}"
    events = [each for each in world.cluster.events() if each["task"] == f"w-{name}"]
    errors = [each["fields"] for each in events if each["name"] == "error_reported"]
    suspects = [each["details"]["suspect"] for each in errors if each["kind"] == "silent_data_corruption"]
    cordoned = {each["fields"]["node"] for each in events if each["name"] == "node_cordoned"}
    assert cordoned == {each["node"] for each in suspects}
    return results(folder), logs, suspects


@pytest.mark.parametrize(
    ("place", "same"),
    [
        *(("gradient", True), ("activation", False), ("parameter", True)),
        *(pytest.param(*each, marks=pytest.mark.chaos) for each in (("gradient", False), ("activation", True))),
    ],
)
def test_a_node_whose_bits_flip_is_found(place: str, same: bool, world: Site) -> None:
    """In the first step with a witness, at whose start they begin to."""
    found, logs, suspects = run(world, f"plain-{place}-{same}", (1, 6, place, None, same), every=3)
    assert len(found) == WORKERS - 1, logs
    for each in found:
        check(each, single_of(world, "plain"))
    [suspect] = suspects
    assert suspect["node"] == f"w-plain-{place}-{same}-1" and suspect["device"] == "cpu" and suspect["host"]
    assert (suspect["step"], suspect["last_right"], suspect["steps_since_right"]) == (6, 3, 3)
    told = f"rank {suspect['rank']} on node {suspect['node']} (host {suspect['host']}, device cpu), last found right 3 "
    assert f"silent_data_corruption: SilentCorruption: {told}" in world.cluster.unicron("incidents", "--csv").stdout


@pytest.mark.parametrize("same", [True, False])
def test_nodes_of_two_of_three_workers(same: bool, world: Site) -> None:
    """If each is wrong in another way, the third one continues."""
    flips = [(0, 4, "gradient", None, False), (2, 4, "activation", None, same)]
    found, logs, suspects = run(world, f"plain-two-{same}", *flips)
    assert len(found) == 1, logs
    check(found[0], single_of(world, "plain"))
    assert {each["node"] for each in suspects} == {f"w-plain-two-{same}-{node}" for node in (0, 2)}


@pytest.mark.parametrize("call", [1, 2])
def test_one_wrong_call_of_many(call: int, world: Site) -> None:
    """Of the micro-batch that is repeated, and of the repetition: the rank that was wrong is found by its next runs."""
    found, logs, suspects = run(world, f"plain-once{call}", (1, 6, "gradient", [call], False), every=3)
    assert len(found) == WORKERS - 1, logs
    for each in found:
        check(each, single_of(world, "plain"))
    assert [each["node"] for each in suspects] == [f"w-plain-once{call}-1"]


@pytest.mark.parametrize("workers", [2])
def test_of_two_workers_the_one_that_is_wrong_in_many_ways(workers: int, world: Site) -> None:
    found, logs, suspects = run(world, "plain-pair", (0, 6, "gradient", None, False), workers=workers)
    assert len(found) == 1, logs
    check(found[0], single_of(world, "plain"))
    assert [each["node"] for each in suspects] == ["w-plain-pair-0"]


def test_of_two_workers_none_is_believed_and_the_task_ends(world: Site) -> None:
    """Without a majority they restart from the newest checkpoint, and end if that does not help."""
    found, logs, suspects = run(world, "plain-tie", (0, SAVED + 2, "gradient", None, True), workers=2, codes={1})
    assert found == [] and suspects == []
    assert f"GradientsDiffer: in step {SAVED + 2} the gradients of micro-batches" in logs


def test_a_wrong_parameter_of_one_of_two_workers_goes_with_the_restart(world: Site) -> None:
    """Its checkpoint is from before."""
    found, logs, _ = run(world, "plain-once-wrong", (0, SAVED + 2, "parameter", [1], True), workers=2)
    assert f"GradientsDiffer: in step {SAVED + 2} the gradients of micro-batches" in logs
    assert len(found) == 2
    for each in found:
        check(each, single_of(world, "plain"))


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "scaler",
        "stream",
        *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("compiled", "gan", "schedule", "memory")),
    ],
)
def test_a_loop_without_wrong_bits_is_left_alone(kind: str, world: Site) -> None:
    """With dropout, batch norm, a compiled model, a scaler, two models: no false alarm, and no trace of repetitions."""
    found, logs, suspects = run(world, f"{kind}-quiet")
    assert len(found) == WORKERS
    for each in found:
        check(each, single_of(world, kind))
    assert "gradients_differ" not in logs and suspects == []
    assert "witness_every=1:" in logs


def test_a_world_of_one_has_no_witness(world: Site) -> None:
    found, logs, suspects = run(world, "plain-one", workers=1)
    check(found[0], single_of(world, "plain"))
    assert "witness_every=1: one worker has no witness" in logs and suspects == []


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        *((2, "compared"), (0, "exchange")),  # before the commit, and in the recovery; others are like the first one
        *(pytest.param(0, point, marks=pytest.mark.chaos) for point in ("micro_batch", "reduced", "commit")),
        pytest.param(2, "launched", marks=pytest.mark.chaos),
    ],
)
def test_a_death_beside_wrong_bits(rank: int, point: str, world: Site) -> None:
    """In the same step, or in the recovery from it.

    If the wrong node's worker is the killed one, the next one there may come too late for a comparison, or compute
    steps before one.
    """
    name = f"plain-{point}{rank}"
    found, logs, suspects = run(world, name, (1, 6, "gradient", None, False), every=3, history=[(rank, 5, point)])
    assert found, logs
    deaths = [each["fields"] for each in world.cluster.events("worker_died") if each["task"] == f"w-{name}"]
    (killed,) = [each["worker"] for each in deaths if each.get("code") == 9]
    at = [(each["node"], each["step"]) for each in suspects]
    assert at == [(f"w-{name}-1", 6)] or killed.startswith(f"w-{name}-1-")
    for each in found if at == [(f"w-{name}-1", 6)] else ():
        check(each, single_of(world, "plain"))
