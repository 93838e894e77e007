"""A worker's lines and progress bar on its user's console, through changes of the world.

Each agent's first worker prints one line at each change, e.g. ``rank 0 on n1 exited (signal 9); 2 workers left; step
521 continues``: through the progress bar if this worker shows it, else to Lightning's log, as ``INFO`` of
``lightning.pytorch.unicron``. The progress bar is shown by rank 0 alone. A worker that becomes rank 0 takes it over;
its counts are those of the loops.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf

from unicron_lightning import wire
from unicron_lightning.cli.output import visible
from unicron_lightning.coordinator.incidents.facts import REPORTED, AgentLoss, ErrorFact, WorkerDeath, read_fact
from unicron_lightning.worker.engine import World

logger = logging.getLogger("lightning.pytorch.unicron")

_NAMED: Final = 3
"""Most ranks or nodes that a line names."""
_KEPT: Final = 1000
"""Most ends of workers that are remembered until their epoch begins."""


class Announcements:
    """Derives the line of each change from two worlds, and from the coordinator's notices about ends of workers."""

    def __init__(self) -> None:
        self._world = World(epoch=0, kind="init", rank=0, size=1, hold=False)
        self._ends: dict[str, str] = {}
        self._absent: set[str] = set()
        """Nodes that were lost, or whose workers were members and have left."""

    def take(self, notice: wire.Notice) -> None:
        """[any thread] Remember how a worker ended."""
        fact = read_fact(notice.name, notice.fields, notice.at)
        if isinstance(fact, ErrorFact) and fact.ends and fact.worker is not None:
            self._ends = dict([*self._ends.items(), (fact.worker, f"failed: {fact.cause}")][-_KEPT:])
        elif isinstance(fact, WorkerDeath) and fact.cause != REPORTED:
            self._ends = dict([*self._ends.items(), (fact.worker, _how(fact))][-_KEPT:])
        elif isinstance(fact, AgentLoss):
            self._absent = self._absent | {fact.node}

    def line(self, world: World, step: int) -> str | None:
        """Return the line of a change; None if there is none, or another worker of this agent prints it.

        Args:
            world: entered now.
            step: finished optimizer steps.
        """
        before, self._world = self._world, world
        if before.epoch in (0, world.epoch) or not world.workers:
            return None
        if world.kind == "pause":
            return f"the task pauses: step {step} is saved" if _is_first_of_agent(world) else None
        gone = [rank for rank, worker in enumerate(before.workers) if worker not in world.workers]
        new = [rank for rank, worker in enumerate(world.workers) if worker not in before.workers]
        absent = self._absent
        self._absent = (absent | {before.nodes[rank] for rank in gone}) - set(world.nodes)
        parts = _ends(before, gone, self._ends) if world.kind == "fail" else _left(before, gone)
        parts += _arrivals(world, new, absent)
        if not _is_first_of_agent(world) or not (parts or world.kind == "fail"):
            return None
        if world.kind != "fail":
            held = ", held below the minimum" if world.hold else ""
            return f"{'; '.join(parts)}: {_workers(world.size)}{held}"
        parts = [*parts, f"{_workers(world.size)} left"] if gone else [f"connections of {_workers(world.size)} renewed"]
        return "; ".join([*parts, "held below the minimum" if world.hold else f"step {step} continues"])


def say(trainer: pl.Trainer, line: str) -> None:
    """Print a line without damage to the progress bar."""
    bar = trainer.progress_bar_callback
    if bar is not None and trainer.is_global_zero and not getattr(bar, "is_disabled", False):
        bar.print(visible(line))
    else:
        logger.info("%s", visible(line))


def take_over_bar(trainer: pl.Trainer) -> None:
    """Show the progress bar, as another worker showed it until now."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    bar.enable()
    if not trainer.training and not trainer.validating:
        return  # it is created when the loops begin
    if isinstance(bar, RichProgressBar):
        bar._init_progress(trainer)
    elif isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar = bar.init_train_tqdm()
        bar.train_progress_bar.total = convert_inf(bar.total_train_batches)
        bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")


def _how(death: WorkerDeath) -> str:
    if death.cause == "signal":
        return f"exited (signal {death.code})"
    if death.cause == "exit":
        return f"exited (status {death.code})"
    return {"silent": "was silent", "sibling": "was stopped with its node's workers"}.get(death.cause, "was lost")


def _ends(before: World, gone: list[int], ends: dict[str, str]) -> list[str]:
    lines = [f"rank {rank} on {before.nodes[rank]} {ends.get(before.workers[rank], 'was lost')}" for rank in gone]
    return lines if len(lines) <= _NAMED else [*lines[:_NAMED], f"{len(lines) - _NAMED} other ranks were lost"]


def _left(before: World, gone: list[int]) -> list[str]:
    nodes = list(Counter(before.nodes[rank] for rank in gone))
    return [f"{_nodes(nodes)} left"] if nodes else []


def _arrivals(world: World, new: list[int], absent: set[str]) -> list[str]:
    nodes = list(Counter(world.nodes[rank] for rank in new))
    back, joined = [node for node in nodes if node in absent], [node for node in nodes if node not in absent]
    parts = [f"{_nodes(back)} {'is' if len(back) == 1 else 'are'} back"] if back else []
    return [*parts, f"{_nodes(joined)} joined"] if joined else parts


def _nodes(nodes: list[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= _NAMED else f"{', '.join(nodes[:_NAMED])} and {len(nodes) - _NAMED} others"


def _workers(number: int) -> str:
    return f"{number} worker{'' if number == 1 else 's'}"


def _is_first_of_agent(world: World) -> bool:
    own = world.workers[world.rank].rpartition("/")[0]
    return all(worker.rpartition("/")[0] != own for worker in world.workers[: world.rank])
