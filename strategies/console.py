"""A worker's lines and progress bar on its user's console, through changes of the world.

Each agent's first worker prints one line at each change, e.g. ``rank 0 on n1 exited (signal 9); 2 workers left; step
521 continues``: through the progress bar if this worker shows it, else to Lightning's log, as ``INFO`` of
``lightning.pytorch.unicron``. The progress bar is shown by rank 0 alone. A worker that becomes rank 0 takes it over;
its counts are those of the loops.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from pathlib import Path
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
        self._absent: Counter[str] = Counter()
        """Number of workers of each node that were members and have left, or were lost."""

    def take(self, notice: wire.Notice) -> None:
        """[any thread] Remember how a worker ended."""
        fact = read_fact(notice.name, notice.fields, notice.at)
        if isinstance(fact, ErrorFact) and fact.ends and fact.worker is not None:
            self._ends = dict([*self._ends.items(), (fact.worker, f"failed: {fact.cause}")][-_KEPT:])
        elif isinstance(fact, WorkerDeath) and fact.cause != REPORTED:
            self._ends = dict([*self._ends.items(), (fact.worker, _how(fact))][-_KEPT:])
        elif isinstance(fact, AgentLoss) and not any(_agent(worker) == fact.agent for worker in self._world.workers):
            self._absent = self._absent | Counter([fact.node])

    def line(self, world: World, step: int, *, spares: int = 0) -> str | None:
        """Return the line of a change; None if there is none, or another worker of this agent prints it.

        Args:
            world: entered now.
            step: finished optimizer steps.
            spares: members of ``world`` that wait for partners, and so are in no replica of the model.
        """
        before, self._world = self._world, world
        if before.epoch in (0, world.epoch) or not world.workers:
            return None
        if world.kind == "pause":
            return None  # until the state is saved
        gone = [rank for rank, worker in enumerate(before.workers) if worker not in world.workers]
        new = [rank for rank, worker in enumerate(world.workers) if worker not in before.workers]
        left, came = Counter(before.nodes[rank] for rank in gone), Counter(world.nodes[rank] for rank in new)
        back = came & self._absent
        self._absent = self._absent - back + left
        parts = _ends(before, gone, self._ends) if world.kind == "fail" else _moved(left, world.nodes, "left")
        here = [node for rank, node in enumerate(world.nodes) if rank not in new]
        parts += [*_moved(back, here, "back"), *_moved(came - back, [*here, *back], "joined")]
        if not _is_first_of_agent(world) or not (parts or world.kind == "fail"):
            return None
        if world.kind != "fail":
            held = ", held below the minimum" if world.hold else ""
            return f"{'; '.join(parts)}: {_workers(world.size, spares)}{held}"
        rest = f"{_workers(world.size, spares, ' left')}"
        parts = [*parts, rest] if gone else [f"connections of {_workers(world.size)} renewed"]
        return "; ".join([*parts, "held below the minimum" if world.hold else f"step {step} continues"])


def say_saved(trainer: pl.Trainer, world: World, path: Path) -> None:
    """Print where the state of a pausing task is saved, and how it is resumed; on the first worker of each agent."""
    if world.kind == "pause" and _is_first_of_agent(world):
        resumes = "to resume after its end, give this path to trainer.fit(ckpt_path=...)"
        say(trainer, f"the task pauses: step {trainer.global_step} is saved in {path}; {resumes}")


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
        if trainer.training:
            bar.train_progress_bar_id = bar._add_task(
                _total(trainer), bar._get_train_description(trainer.current_epoch)
            )
    elif isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar = bar.init_train_tqdm()
        bar.train_progress_bar.total = convert_inf(_total(trainer))
        bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")


def _total(trainer: pl.Trainer) -> int | float:
    """Return the number of batches in the data epoch, as a bar has it that is made at its start.

    Without ``max_epochs`` the bar ends at ``max_steps``; Lightning's `total_train_batches` counts those from now on.
    """
    batches: int | float = trainer.num_training_batches
    if trainer.max_epochs != -1 or trainer.max_steps <= 0:
        return batches
    done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    return min(batches, done + trainer.max_steps - trainer.global_step)


def _how(death: WorkerDeath) -> str:
    if death.cause == "signal":
        return f"exited (signal {death.code})"
    if death.cause == "exit":
        return f"exited (status {death.code})"
    return {"silent": "was silent", "sibling": "was stopped with its node's workers"}.get(death.cause, "was lost")


def _ends(before: World, gone: list[int], ends: dict[str, str]) -> list[str]:
    lines = [f"rank {rank} on {before.nodes[rank]} {ends.get(before.workers[rank], 'was lost')}" for rank in gone]
    return lines if len(lines) <= _NAMED else [*lines[:_NAMED], f"{len(lines) - _NAMED} other ranks were lost"]


def _moved(numbers: Counter[str], here: Collection[str], how: str) -> list[str]:
    """Say how workers of nodes have left or come: by the node, unless other workers of it were or are members.

    Args:
        numbers: of the workers, by node.
        here: nodes of the other members.
        how: ``left``, ``joined`` or ``back``.
    """
    whole = [node for node in numbers if node not in here]
    some = {node: number for node, number in numbers.items() if node in here}
    subjects = [(_nodes(whole), len(whole))] if whole else []
    subjects += [(f"{_workers(number)} on {node}", number) for node, number in list(some.items())[:_NAMED]]
    if len(some) > _NAMED:
        number = sum(list(some.values())[_NAMED:])
        subjects.append((f"{_workers(number)} on other nodes", number))
    return [f"{name} {how if how != 'back' else 'is back' if number == 1 else 'are back'}" for name, number in subjects]


def _nodes(nodes: list[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= _NAMED else f"{', '.join(nodes[:_NAMED])} and {len(nodes) - _NAMED} others"


def _workers(number: int, spares: int = 0, left: str = "") -> str:
    text = f"{number} worker{'' if number == 1 else 's'}{left}"
    return f"{text}, {spares} of them spare" if spares else text


def _agent(worker: str) -> str:
    return worker.rpartition("/")[0]


def _is_first_of_agent(world: World) -> bool:
    own = _agent(world.workers[world.rank])
    return all(_agent(worker) != own for worker in world.workers[: world.rank])
