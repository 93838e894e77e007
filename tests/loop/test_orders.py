"""Workers of a loop leave and return by orders: nothing is computed again, and the result is that of one process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from joins.running import SECONDS, Site, World, results, site
from loop.running import check, single
from loop.worker import STOPPED, WORKERS

from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

FIRST, SECOND = 4, 9
"""Steps at which orders are given."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("orders"), "loop.worker") as made:
        yield made


@pytest.fixture(scope="module")
def alone(world: Site) -> dict[str, Any]:
    return single(world, world.folder / "single", "loop.worker", "plain-alone")


def run(
    site: Site, name: str, orders: dict[int, Callable[[World], None]], ends: int = 0, further: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """Run a loop in a task, and give orders; return the results of its workers.

    Args:
        site: has the coordinator.
        name: of the loop.
        orders: by the step at which each is given, and its epoch awaited.
        ends: status with which agents end that the task needs; one that leaves while others stay ends with 0.
        further: steps at which a further epoch is awaited, as not all agents obey at once.
    """
    folder = site.folder / name
    folder.mkdir(exist_ok=True)
    (folder / "orders.json").write_text(json.dumps([*orders, *further]))
    task = f"orders-{name}-{len(list(folder.iterdir()))}"
    started = site.start_world(task, folder / f"agents-{len(list(folder.iterdir()))}", WORKERS, least=1, restarts=6)
    try:
        started.start("loop.worker", str(folder), name)
        for step, order in orders.items():
            until(f"step {step}", (folder / f"at-{step}").exists, SECONDS)
            order(started)
        until("the end", started.has_ended, SECONDS)
        codes = started.codes()
    finally:
        started.stop()
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("agents-*/*.log")))
    assert ends in codes and set(codes) <= {0, ends}, f"{codes}\n{logs}"
    return results(folder)


def faults(site: Site, name: str) -> set[str]:
    events = [e for e in site.cluster.events() if (e.get("task") or "").startswith(f"orders-{name}-")]
    assert events
    return {event["name"] for event in events} & {"worker_died", "agent_lost", "comm_error"}


def test_a_node_is_drained_and_used_again(world: Site, alone: dict[str, Any]) -> None:
    cluster = world.cluster
    orders: dict[int, Callable[[World], None]] = {
        FIRST: lambda task: cluster.drain(task.label(1)),
        SECOND: lambda task: cluster.undrain(task.label(1)),
    }
    found = run(world, "plain-drain", orders)
    for each in found:
        check(each, alone)
    *stayed, returned = sorted(min(each["losses"]) for each in found)
    assert len(stayed) == WORKERS - 1 and stayed[-1] <= FIRST < returned == SECOND + 2
    assert not faults(world, "plain-drain")


def test_a_task_is_resized(world: Site, alone: dict[str, Any]) -> None:
    def resize(nodes: str) -> Callable[[World], None]:
        return lambda task: world.cluster.fetch(f"/v1/tasks/{task.task}/resize", method="POST", nodes=nodes)

    found = run(world, "plain-resize", {FIRST: resize("1"), SECOND: resize("all")})
    for each in found:
        check(each, alone)
    assert len(found) == WORKERS
    assert not faults(world, "plain-resize")


def test_all_nodes_get_sigterm_and_the_task_is_started_again(world: Site, alone: dict[str, Any]) -> None:
    """The workers write a checkpoint first, which the next task loads."""

    def end(task: World) -> None:
        for process in task.processes.started.values():
            process.send_signal(signal.SIGTERM)

    last = FIRST + WORKERS - 1  # each agent's end may have an epoch of its own
    run(world, "plain-ended", {FIRST: end}, ends=143, further=tuple(range(FIRST + 1, last + 1)))
    folder = world.folder / "plain-ended"
    (saved,) = (folder / "checkpoints").glob("last-pause-step=*.ckpt")
    step = int(saved.stem.partition("=")[2])
    assert FIRST < step <= last + 2
    found = run(world, "plain-ended", {})
    for each in found:
        check(each, alone)
    assert min(min(each["losses"]) for each in found) == step + 1


def test_one_rank_ends_the_loop_on_all(world: Site, alone: dict[str, Any]) -> None:
    found = run(world, "stop-one", {})
    assert len(found) == WORKERS
    (step,) = {each["step"] for each in found}
    assert STOPPED <= step <= STOPPED + 1
    for each in found:
        assert [*each["losses"]] == [*range(min(each["losses"]), step + 1)]
        for number, values in each["losses"].items():
            assert values == pytest.approx(alone["losses"][number], rel=1e-12, abs=1e-12)
