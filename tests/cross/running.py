"""Runs cases in worlds of forked processes, and alone, and compares what their trainings have at the end."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from cross.cases import RELAYOUT, Case, Order, smaller
from cross.training import OLD, written
from joins.running import Alone, Site, World

from unicron_lightning.checkpoints.beside import CheckpointLost
from unicron_lightning.cli.client import quoted
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.worker.session import FitPassed

SECONDS: Final = 120.0
"""Most time of a case: one with writers of folders takes 40 s where four processes share a core."""
ORDER_SECONDS: Final = 10.0
"""Most time in which the coordinator answers an order."""
PASSED: Final = f"{FitPassed.__module__}.{FitPassed.__qualname__}: "
"""Ends a worker that began late; the task may be over before its replacement comes."""
EVENTS: Final = ("worker_ready_to_join", "epoch_published", "epoch_settled", "task_over")
LATE_SECONDS: Final = 5.0
"""Most time in which a worker that is ready becomes a member, where many processes share a core."""
HOLDERS: Final = 2
"""Workers that hold each part of a checkpoint, at least."""
TOLERANCE: Final = 1e-9
"""Differences by the order of additions in float64, over some dozen steps; a hundred times as much of large values."""
TOLERANCE_MIXED: Final = 1e-6
"""The same with Megatron's own losses and probabilities of experts, which are in float32: with tensor parallelism they
are summed in another order also without a death, and parameters differ by 1e-7.
"""
TOLERANCE_FLOAT32: Final = 2e-5
"""The same in float32."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a case.

    Attributes:
        case: as it was run.
        faults: what is wrong; empty: nothing.
        died: number of workers that died.
        given: kinds of the orders that were given.
        joined: number of results by replacements.
        seconds: that it took.
        log: the end of the workers' output.
    """

    case: Case
    faults: tuple[str, ...]
    died: int
    given: tuple[str, ...]
    joined: int
    seconds: float
    log: str


def run(site: Site, name: str, case: Case) -> Verdict:
    """Run a case in a world and alone, and judge it."""
    began, folder = time.monotonic(), site.folder / name
    folder.mkdir()
    (folder / "case.json").write_text(case.text())
    given: list[str] = []
    alone = site.start_alone(folder / "single")
    world = site.start_world(f"cross-{name}", folder / "agents", case.script.workers, least=case.least, restarts=20)
    try:
        faults = _old(case, alone, folder, began)
        alone.start("alone", "cross.worker", str(folder / "alone"), "alone")
        world.start("cross.worker", str(folder), name)
        while (not world.has_ended() or not alone.has_ended()) and time.monotonic() - began < SECONDS:
            given += _give_orders(site, world, case, folder)
            time.sleep(0.02)
        events = [event for event in site.cluster.events() if event["task"] == world.task]
        again = _again(events, folder)
        codes = {"alone": alone.codes()} if again else {"alone": alone.codes(), "world": world.codes()}
    finally:
        world.stop()
        alone.stop()
    faults += [f"{who} ended with {found}" for who, found in codes.items() if any(found)]
    died = len(list(folder.glob("died-*")))
    logs = [*(folder / "agents").glob("*.log"), *(folder / "single").glob("*.log")]
    log = "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in logs)
    if not faults and not again:
        late = log.count(PASSED) + _came_at_the_end(events)
        lives = 1 + sum(event["name"] == "task_restarts" for event in events)
        faults = _compared(case, folder, died, given, late=late, lives=lives)
    elif any(codes["alone"]):
        faults = ["alone: " + _last_error(folder / "single" / "alone.log"), *faults]
    elif died >= HOLDERS and f"{CheckpointLost.__name__}: " in log:  # the task fails, with a reason
        faults = []
    if "gradients_differ step=" in log:
        faults = [*faults, "a witness has found a difference"]
    joined = len(set(re.findall(r"(\S+ is back)", log)))
    seconds = time.monotonic() - began
    found = {"faults": tuple(faults), "died": died, "given": tuple(given), "joined": joined}
    return Verdict(case=case, **found, seconds=seconds, log=log)  # type: ignore[arg-type]


def _old(case: Case, alone: Alone, folder: Path, began: float) -> list[str]:
    """Make the checkpoint of another run, if the case resumes one."""
    if not (case.script.resumes or case.script.returns):
        return []
    alone.start("old", "cross.worker", str(folder), "old")
    while not alone.has_ended() and time.monotonic() - began < SECONDS:
        time.sleep(0.02)
    return [] if (folder / OLD).exists() else ["no checkpoint to resume: " + _last_error(folder / "single" / "old.log")]


# ---- orders


def _give_orders(site: Site, world: World, case: Case, folder: Path) -> list[str]:
    """Give the orders that workers have come to; return their kinds."""
    kinds = []
    for number, order in enumerate(case.orders):
        mark = folder / f"given-{number}"
        if (folder / f"order-{number}").exists() and not mark.exists():
            _give(site, world, case, folder, number)
            mark.touch()
            kinds.append(order.kind)
    world.keep_up()
    return kinds


def _give(site: Site, world: World, case: Case, folder: Path, number: int) -> None:
    order: Order = case.orders[number]
    match order.kind:
        case "drain":
            path = f"/v1/nodes/{quoted(world.label(order.node))}"
            _ask(site, f"{path}/drain")
            world.later(0.4, lambda: _ask(site, f"{path}/undrain"))
        case "resize":
            path = f"/v1/tasks/{quoted(world.task)}/resize"
            _ask(site, path, nodes=max(1, world.least, world.size - 1))
            world.later(0.4, lambda: _ask(site, path, nodes="all"))
        case "agent":
            (folder / f"came-{number}").touch()
            world.replace(order.node, signal.SIGKILL)
        case "leave":
            (folder / f"came-{number}").touch()
            world.replace(order.node, signal.SIGTERM)
        case "everything":
            for node in range(world.size):
                (folder / f"died-order{number}-{node}").touch()
                world.replace(node, signal.SIGKILL)
        case kind if kind == RELAYOUT:
            size = 2 if case.script.shard_size == 1 else 1
            sizes = {"shards": size} if case.script.strategy == "unicron_fsdp" else {"tp": 1, "pp": size}
            _ask(site, f"/v1/tasks/{quoted(world.task)}/{RELAYOUT}", **sizes)
        case "coordinator":
            site.cluster.kill_coordinator()
            site.cluster.start_coordinator()


def _ask(site: Site, path: str, **fields: object) -> None:
    """Give an order; the coordinator may be away for a while, and the task may have ended."""
    limit = time.monotonic() + ORDER_SECONDS
    while time.monotonic() < limit:
        try:
            site.cluster.fetch(path, method="POST", **fields)
        except CoordinatorUnavailable:
            time.sleep(0.1)
        except UnicronError:
            return
        else:
            return


# ---- judgement


def _again(events: list[dict[str, Any]], folder: Path) -> bool:
    """Whether an agent came when the task was over: it has run the script again, as a task of its own.

    That task may wait for a second node until the case's time is over.
    """
    ends = [path.stat().st_mtime for path in folder.glob("result-*.json")]
    began = [event["at"] for event in events if event["name"] == "task_created"]
    return max(began) > min(ends, default=math.inf)


def _came_at_the_end(events: list[dict[str, Any]]) -> int:
    """Return the number of agents whose workers were ready so shortly before the end that no epoch had them.

    Epochs of the task's last life count.
    """
    began = max((event["at"] for event in events if event["name"] == "task_restarts"), default=0.0)
    last = [event for event in events if event["at"] >= began]
    named = {name: [event for event in last if event["name"] == name] for name in EVENTS}
    settled = {event["fields"]["number"] for event in named["epoch_settled"]}
    members = [each["fields"]["members"] for each in named["epoch_published"] if each["fields"]["number"] in settled]
    inside = {_agent(worker) for each in members for worker in each}
    end = max((event["at"] for event in named["task_over"]), default=math.inf)
    waited = {
        _agent(each["fields"]["worker"]) for each in named["worker_ready_to_join"] if each["at"] < end - LATE_SECONDS
    }
    agents = {event["fields"]["agent"] for event in events if event["name"] == "agent_registered"}
    return len(agents - inside - waited)


def _agent(worker: str) -> str:
    return worker.partition("/")[0]


def _compared(case: Case, folder: Path, died: int, given: list[str], *, late: int, lives: int) -> list[str]:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]
    workers, faults = case.script.workers, []
    tolerance = TOLERANCE if case.script.double else TOLERANCE_FLOAT32
    if case.script.layout in ("tensor", "context", "expert", "biased") and case.script.strategy == "unicron_megatron":
        tolerance = max(tolerance, TOLERANCE_MIXED)
    if case.script.reproducible and case.script.shard_size == 1:  # one process has one shard
        tolerance = 0.0
    if not (results and workers - died - late - 2 * len(given) <= len(results) <= workers + 2 * len(given)):
        faults.append(f"{len(results)} results of {workers} workers, {died} deaths")
    expected = json.loads((folder / "alone" / "result.json").read_text())
    for place, result in enumerate(each for each in results if not each["spare"]):  # a spare has its earlier state
        expected_here = _same_parts(result, expected)
        faults += [f"result {place}: {each}" for each in differences(result, expected_here, tolerance=tolerance)][:4]
    if not case.plain:
        former = lives > 1 or died >= workers
        disk, disk_alone = written(folder, folder / "alone", leftovers=not former), written(folder / "alone")
        if former and case.script.saves == "folder":  # writers of an earlier life may complete theirs later
            disk["kept"] = [each for each in disk["kept"] if each in disk_alone["kept"]]
        faults += [f"disk: {each}" for each in differences(disk, disk_alone, tolerance=tolerance)][:4]
    return faults


def _same_parts(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the expected state that a worker with a part of the model holds."""
    if "parts" not in result:
        return expected
    pairs = zip(result["parts"], expected["parts"], strict=True)
    return {**expected, "parts": [{name: whole.get(name) for name in part} for part, whole in pairs]}


def _last_error(path: Path) -> str:
    errors = [line for line in path.read_text(errors="replace").splitlines() if re.match(r"[\w.]+: ", line)]
    return errors[-1] if errors else "no result"


def differences(one: Any, other: Any, path: str = "", *, tolerance: float = TOLERANCE) -> Iterator[str]:
    """Yield the places at which two results differ. A dict with a place is compared with that part of a list.

    With a tolerance of 0 all bits of numbers are compared.
    """
    if isinstance(one, dict) and "at" in one:
        ranges = [slice(at, at + number) for at, number in zip(one["at"], one["of"], strict=True)]
        whole = torch.tensor(other, dtype=torch.float64)
        part = whole[tuple(ranges)].tolist() if 0 not in one["of"] else one["local"]
        yield from differences(one["local"], part, path, tolerance=tolerance)
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{path}.{key}", tolerance=tolerance)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}[{place}]", tolerance=tolerance)
    elif isinstance(one, list) and isinstance(other, list):
        unequal = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
        yield f"{path}: {len(one)} in the world, {len(other)} alone; from {unequal}: {one[unequal:]}, {other[unequal:]}"
    elif isinstance(one, float) and isinstance(other, float):
        same = math.isclose(one, other, rel_tol=100 * tolerance, abs_tol=tolerance) or (one != one and other != other)
        if tolerance == 0.0:
            same = repr(one) == repr(other)
        if not same:
            yield f"{path}: {one!r} in the world, {other!r} alone"
    elif one != other:
        yield f"{path}: {one!r} in the world, {other!r} alone"


def shrink(site: Site, verdict: Verdict, most: int = 25) -> Verdict:
    """Return a smaller case that fails, too."""
    tried = 0
    while True:
        for case in smaller(verdict.case):
            if tried >= most:
                return verdict
            tried += 1
            found = run(site, f"shrunk-{time.monotonic_ns()}", case)
            if found.faults:
                verdict = found
                break
        else:
            return verdict
