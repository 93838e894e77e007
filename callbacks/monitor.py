"""Unicron's view of a task, on the terminal and in the user's logger."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import lightning.pytorch as pl
from typing_extensions import override

from unicron_lightning.callbacks.history import History, Sighting, in_words
from unicron_lightning.cli.output import visible
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.fault_tolerant import strategy_of
from unicron_lightning.worker.engine import Engine


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


Display = Literal["auto", "live", "lines", "off"]
_SHOWN: Final = 5
"""Number of incidents on the terminal."""
_REFRESH_PER_SECOND: Final = 4
_SPEED_SECONDS: Final = 10.0
"""Window of the speed in steps per second."""


class UnicronMonitor(pl.Callback):
    """Shows the world, its epoch, the step, the phase and the incidents with their costs, and logs these as numbers.

    Logged under ``unicron/`` every ``log_every_n_steps``, and at once when something has changed:

        world_size, epoch            of the present world
        incidents                    so far
        compute_ms, reduce_ms, ...   of this worker's last steps, by phase: docs/detection.md
        degraded, stragglers         whether steps are slower than before; number of ranks that delay the others
        recomputed_micro_batches     so far, by all workers together
        recovery_ms                  after an incident: from the coordinator's report to the next finished step
        detection_ms, transition_ms, sub_healthy_s      when it is over: the coordinator's account of it

    No communication is needed: every worker keeps the same history, and the first one shows and logs it. When that
    worker is lost the next one continues, from the step on in which the loss happened.

    Args:
        display: ``live``: a picture that is kept up to date; ``lines``: a line per incident that is recovered from,
            one when it is over, and one when something becomes slow; ``off``: nothing; ``auto``: live on a terminal
            without other progress bars, else lines.

    Raises:
        ConfigError: ``display`` is none of these, or, at the start, the strategy is not ``unicron``.
    """

    def __init__(self, display: Display = "auto") -> None:
        if display not in get_args(Display):
            raise ConfigError(f"display={display!r}: expected one of {', '.join(get_args(Display))}")
        self.history = History()
        self._display = display
        self._engine: Engine | None = None
        self._trainer: pl.Trainer | None = None
        self._phase_seconds: dict[str, float] = {}
        self._told_epoch = -1
        self._told_conditions: dict[str, str] = {}
        self._total: int | None = None
        self._ends: list[tuple[float, int]] = []
        self._live: Any = None

    # ---- Lightning's hooks

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer, self._engine = trainer, strategy_of(trainer, self).engine
        control = self._engine.control
        if control is not None and self.history.take not in control.listeners:
            control.listeners.append(self.history.take)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = trainer.estimated_stepping_batches
        self._total = None if total == float("inf") else int(total)
        self._show()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._engine is not None
        world, news, conditions = self._engine.world, self.history.news(), self.history.conditions
        slow = [words for name, words in conditions.items() if self._told_conditions.get(name) != words]
        changed = bool(news) or conditions != self._told_conditions or world.epoch != self._told_epoch
        self._told_epoch, self._told_conditions = world.epoch, conditions
        self._ends = [*(end for end in self._ends if end[0] > time.monotonic() - _SPEED_SECONDS)]
        self._ends.append((time.monotonic(), trainer.global_step))
        if not trainer.is_global_zero:
            return
        if changed:
            self._show()
        if changed or trainer._logger_connector.should_update_logs:
            self._phase_seconds = self._phases()  # in this thread, because the statistics are not thread-safe
            self._log(trainer, self._metrics(news))
        if self._live is None and self._display != "off":
            for line in [*(sighting.line() for sighting, _ in news), *slow]:
                self._say(trainer, line)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hide()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._hide()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._hide()
        control = None if self._engine is None else self._engine.control
        if control is not None and self.history.take in control.listeners:
            control.listeners.remove(self.history.take)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.history.state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state(state_dict)

    # ---- the display

    def view(self) -> TaskView:
        """Return the task's present state."""
        trainer, engine = self._trainer, self._engine
        assert trainer is not None and engine is not None
        return TaskView(
            world=engine.world.size,
            declared=trainer.num_nodes * trainer.num_devices,
            epoch=engine.world.epoch,
            step=trainer.global_step,
            total=self._total,
            phase=engine.activity.now.phase,
            phase_seconds=self._phase_seconds,
            steps_per_second=self._speed(),
            incidents=self.history.count,
            recomputed=self.history.recomputed,
            conditions=list(self.history.conditions.values()),
            newest=self.history.newest(_SHOWN),
        )

    def _phases(self) -> dict[str, float]:
        """Return mean seconds of this worker's last steps, by phase, if a millisecond or more."""
        assert self._trainer is not None
        known = self._trainer.strategy.statistics  # type: ignore[attr-defined]
        return {} if known is None else {name: mean for name, mean in known.phases.items() if mean >= 1e-3}

    def _speed(self) -> float | None:
        if len(self._ends) < 2:
            return None
        (first, before), (last, after) = self._ends[0], self._ends[-1]
        return (after - before) / (last - first)

    def _metrics(self, news: list[tuple[Any, str]]) -> dict[str, float]:
        assert self._engine is not None
        world, history = self._engine.world, self.history
        metrics: dict[str, float] = {"world_size": world.size, "epoch": world.epoch, "incidents": history.count}
        metrics["recomputed_micro_batches"] = history.recomputed
        conditions = history.conditions
        metrics["degraded"] = float("degraded" in conditions)
        metrics["stragglers"] = len(conditions.keys() - {"degraded"})
        metrics |= {f"{name}_ms": 1e3 * mean for name, mean in self._phase_seconds.items()}
        for sighting, what in news:
            if what == "recovered":
                metrics["recovery_ms"] = 1e3 * sighting.transition
            else:
                metrics["detection_ms"] = 1e3 * sighting.detection
                metrics["transition_ms"] = 1e3 * sighting.transition
                metrics["sub_healthy_s"] = sighting.sub_healthy
        return metrics

    def _log(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        named = {f"unicron/{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _say(self, trainer: pl.Trainer, line: str) -> None:
        bar = trainer.progress_bar_callback
        if bar is not None and not getattr(bar, "is_disabled", False):
            bar.print(visible(line))
        else:
            print(visible(line), file=sys.stderr, flush=True)

    # ---- the live picture

    def _show(self) -> None:
        """Start the picture if this worker shows it."""
        assert self._trainer is not None
        if self._live is not None or not self._trainer.is_global_zero or self._display in ("lines", "off"):
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        if self._display == "auto" and (not console.is_terminal or self._trainer.progress_bar_callback is not None):
            return
        self._live = Live(
            get_renderable=lambda: picture(self.view()), console=console, refresh_per_second=_REFRESH_PER_SECOND
        )
        self._live.start()

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
