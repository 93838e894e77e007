"""The first act: train one task through three failures, and prove their cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unicron_lightning.coordinator.incidents.facts import (
    AgentLoss,
    EpochPublished,
    FirstStep,
    WorkerDeath,
    read_fact,
)
from unicron_lightning.demo.cluster import (
    Exactness,
    OneTask,
    ProofLine,
    WorkProof,
    draw_losses,
    longest_gap,
    loss_curve,
    prove_exactness,
    prove_work,
    report,
    step_times,
    worlds,
)


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One event; ``milliseconds`` after the kill."""

    what: str
    milliseconds: float
    detail: str


def moments(events: Sequence[dict[str, Any]], killed_at: float, until: float) -> list[TimelineEvent]:
    """Events after a kill, in order, without repetitions by several workers; all times by one machine's clock."""
    found = [m for event in events if killed_at <= event["at"] < until for m in _moment(event)]
    first: dict[tuple[str, str], TimelineEvent] = {}
    for at, what, detail in sorted(found):
        first.setdefault((what, detail), TimelineEvent(what=what, milliseconds=1e3 * (at - killed_at), detail=detail))
    return list(first.values())


def _moment(event: dict[str, Any]) -> Iterator[tuple[float, str, str]]:
    name, fields, at = event["name"], event["fields"], event["at"]
    match read_fact(name, fields, at):
        case WorkerDeath() as death:
            code = "" if death.code is None else f" {death.code}"
            yield at, "detected", f"worker {death.worker}: {death.cause}{code}"
        case AgentLoss(agent=agent):
            yield at, "detected", f"agent {agent} is lost"
        case EpochPublished() as epoch:
            yield at, f"epoch {epoch.number}", f"{epoch.kind}, {len(epoch.members)} workers"
        case FirstStep(name="recovered") as first:
            parts = ", ".join(map(str, first.recomputed))
            done = f"step {first.step} finished by {first.world}"
            yield first.at, "resumed", f"{done}; taken over: micro-batches {parts or 'none'}"
        case FirstStep(name="grown") as first:
            yield first.at, "rejoined", f"step {first.step} finished by {first.world}"
        case _ if name == "coordinator_restored":
            yield at, "coordinator back", "with its state"
        case _ if name == "worker_ready_to_join":
            yield at, "ready to join", f"worker {fields['worker']}"


TOLERANCE = 1e-5
"""Largest accepted parameter difference: rounding by another order of additions, amplified by AdamW over all steps."""
NODES = 3
_GAP_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class DemoFault:
    """A fault injected into the run."""

    name: str
    at: float
    step: int


@dataclass(frozen=True, kw_only=True)
class StruckRun:
    """The records of a run."""

    diary: list[ProofLine]
    faults: list[DemoFault]
    dead: set[int]
    events: list[ProofLine]


def show(console: Console, out: Path, steps_per_epoch: int) -> bool:
    """Play the act; return whether every claim was shown.

    Args:
        console: for the output.
        out: new folder for logs and the picture.
        steps_per_epoch: of two epochs.
    """
    arguments = ["--epochs", "2", "--steps-per-epoch", str(steps_per_epoch)]
    broken, clean = (out / name for name in ("failures", "reference"))
    console.rule("1. Training through failures")
    with OneTask(broken.absolute(), NODES, arguments) as cluster:
        run = _train_through_failures(cluster, console)
    console.rule("2. The same training without failures")
    with OneTask(clean.absolute(), NODES, arguments) as cluster:
        cluster.wait(300)
        reference = cluster.diary
    console.print(f"{len(loss_curve(reference))} steps done")
    console.rule("3. What happened")
    _tell(console, run)
    curves = loss_curve(run.diary), loss_curve(reference)
    picture = out / "loss.png"
    draw_losses(picture, curves, worlds(run.diary), [(fault.step, fault.name) for fault in run.faults])
    console.rule("4. What it cost")
    work = prove_work(run.diary, run.dead, steps_per_epoch)
    exactness = prove_exactness(broken, clean, curves)
    passed = _judge(console, run, work, exactness)
    console.print(f"loss curves: {picture}")
    return passed


def _train_through_failures(cluster: OneTask, console: Console) -> StruckRun:
    faults: list[DemoFault] = []
    dead: set[int] = set()

    def struck(name: str, at: float) -> None:
        faults.append(DemoFault(name=name, at=at, step=cluster.step()))
        console.print(f"step {cluster.step():>3}: {name}")

    cluster.wait_line(lambda: _in_step(cluster, 20, 1))
    dead.add(cluster.worker(1))
    struck("SIGKILL of a worker in the middle of its micro-batches", cluster.strike("kill node=node1"))
    cluster.wait_line(lambda: _world(cluster, NODES, faults[-1].at))
    console.print(f"step {cluster.step():>3}: the worker is back")
    wanted = cluster.step() + 15
    cluster.wait_line(lambda: _in_step(cluster, wanted, 0))
    dead.add(cluster.worker(0))
    struck("SIGKILL of an agent with its worker", cluster.strike("kill agent node=node0"))
    cluster.agents["node0"].wait()
    cluster.wait_line(lambda: _world(cluster, NODES - 1, faults[-1].at))
    cluster.start_node("node0")
    cluster.wait_line(lambda: _world(cluster, NODES, faults[-1].at + 1))
    console.print(f"step {cluster.step():>3}: a new agent and its worker have joined")
    wanted = cluster.step() + 15
    cluster.wait_line(lambda: _finished(cluster, wanted))
    struck("SIGKILL of the coordinator", cluster.strike("kill coordinator"))
    cluster.wait(300)
    return StruckRun(diary=cluster.diary, faults=faults, dead=dead, events=cluster.events())


def _in_step(cluster: OneTask, step: int, node: int) -> ProofLine | None:
    """The second micro-batch of a step not before ``step``, computed by the node's worker in a complete world."""
    if cluster.step() < step or _world(cluster, NODES, 0) is None:
        return None
    pid = cluster.worker(node)
    mine = [x for x in cluster.diary if x["event"] == "micro_batch" and x["pid"] == pid]
    return mine[-1] if len(mine) > 1 and mine[-1]["step"] == mine[-2]["step"] == cluster.step() else None


def _world(cluster: OneTask, size: int, after: float) -> ProofLine | None:
    """A step finished by ``size`` workers."""
    return next((x for x in cluster.diary if x["event"] == "step" and x["at"] > after and x["world"] == size), None)


def _finished(cluster: OneTask, step: int) -> ProofLine | None:
    return next((x for x in cluster.diary if x["event"] == "step" and x["step"] >= step), None)


def _tell(console: Console, run: StruckRun) -> None:
    table = Table(title="milliseconds after each kill")
    for name in ("fault", "ms", "what", "detail"):
        table.add_column(name, justify="right" if name == "ms" else "left", overflow="fold")
    times = step_times(run.diary)
    for number, fault in enumerate(run.faults):
        until = run.faults[number + 1].at if number + 1 < len(run.faults) else float("inf")
        story = moments(run.events, fault.at, until)
        table.add_row(fault.name, "0.0", "killed", f"during step {fault.step + 1}", style="red")
        for moment in story:
            table.add_row("", f"{moment.milliseconds:.1f}", moment.what, moment.detail)
        gap = 1e3 * longest_gap(times, fault.at, fault.at + _GAP_SECONDS)
        table.add_row("", f"{gap:.1f}", "longest gap", f"between finished steps in the first {_GAP_SECONDS} s")
        table.add_section()
    console.print(table)


def _judge(console: Console, run: StruckRun, work: WorkProof, exactness: Exactness) -> bool:
    losses = exactness.val_losses
    checks = [
        ("every failure was healed", len(run.faults) == 3 and worlds(run.diary)[max(worlds(run.diary))] == NODES),
        (f"finished micro-batches of survivors computed again: {work.wasted}", work.wasted == 0),
        (f"micro-batches taken over from dead workers and computed again: {work.recomputed} of {work.needed}", True),
        (
            f"samples lost: {work.lost_samples}, used twice: {work.repeated_samples}",
            work.lost_samples == work.repeated_samples == 0,
        ),
        ("all workers end with bitwise equal parameters", exactness.identical),
        (
            f"largest parameter difference to the run without failures: {exactness.largest_difference:.2e}",
            exactness.largest_difference <= TOLERANCE,
        ),
        (f"largest difference of the loss curves: {exactness.losses:.2e}", exactness.losses <= TOLERANCE),
        (
            f"validation loss {losses[0]:.6f} with failures, {losses[1]:.6f} without",
            abs(losses[0] - losses[1]) <= TOLERANCE,
        ),
    ]
    return report(console, checks)
