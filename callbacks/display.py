"""The terminal display of `UnicronMonitor`: rich renderables, imported when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unicron_lightning.callbacks.history import Sighting, in_words


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """The task as its first worker sees it.

    Attributes:
        world, declared: present workers, and requested workers.
        total: total number of steps; None if it is open.
        phase: present phase of this worker's training thread; ``phase_seconds``: mean duration of each phase in a step.
        conditions: problems that are not incidents, e.g. a slow rank.
        newest: the last incidents, oldest first.
    """

    world: int
    declared: int
    epoch: int
    step: int
    total: int | None
    phase: str
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    steps_per_second: float | None
    incidents: int
    recomputed: int
    conditions: Sequence[str] = ()
    newest: Sequence[Sighting] = field(default=())


def picture(view: TaskView) -> Any:
    """Return the view as a rich renderable."""
    from rich.console import Group
    from rich.markup import escape
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    colour = "green" if view.world >= view.declared and not view.conditions else "yellow"
    speed = "" if view.steps_per_second is None else f"  {view.steps_per_second:.2f} steps/s"
    step = f"step {view.step}" if view.total is None else f"step {view.step} of {view.total}"
    head = (
        f"[{colour}]world {view.world} of {view.declared}[/]  epoch {view.epoch}  {step}  {escape(view.phase)}{speed}"
    )
    parts: list[Any] = [Text.from_markup(head)]
    if view.phase_seconds:
        means = (f"{name} {in_words(seconds)}" for name, seconds in view.phase_seconds.items())
        parts.append(Text("this worker's step: " + ", ".join(means), style="dim"))
    if view.total is not None:
        parts.append(ProgressBar(total=view.total, completed=view.step))
    parts += [Text(condition, style="yellow") for condition in view.conditions]
    if view.newest:
        parts.append(_incidents(view))
    return Group(*parts)


def _incidents(view: TaskView) -> Any:
    from rich.table import Table

    table = Table(
        title=f"{view.incidents} incidents, {view.recomputed} micro-batches computed again", title_justify="left"
    )
    for column in ("incident", "cause", "where", "detection", "transition", "sub-healthy", "outcome"):
        table.add_column(column)
    for sighting in view.newest:
        times = (sighting.detection, sighting.transition, sighting.sub_healthy)
        table.add_row(
            sighting.id,
            sighting.cause,
            sighting.where,
            *("" if seconds is None else in_words(seconds) for seconds in times),
            sighting.outcome or "",
        )
    return table
