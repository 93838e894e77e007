"""The transition table of the severity workflow: the first rule that holds determines the action.

docs/detection.md shows this table; a test holds the two together. The predicates depend on a `Case` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from unicron_lightning.coordinator.events import Limits
from unicron_lightning.coordinator.severity.record import REPORTED_ONLY, Failure, SeverityRecord

Trigger = Literal["SEV3", "SEV2", "SEV1", "judged"]
RuleAction = Literal["tell", "reattempt", "escalate", "restart", "isolate", "cordon", "revert", "stop"]

TRIALS: Final = 2
"""Failures allowed in a layout without a finished step: one may happen by chance, two in a row are the layout's."""


EXITS: Final = 3
"""Rounds of one agent that may end by themselves before any worker of the task has registered."""

RECURRENCES: Final = 4
"""Times that an exception recurs regularly until it is the script's: three equal distances are no chance."""


@dataclass(frozen=True, kw_only=True)
class FailureContext:
    """The present situation.

    Attributes:
        members: agent and node of each live member of the newest epoch, in rank order.
        spared: nodes without which every task that runs there still has its minimum of agents.
        agents: the task's agents.
        running: those of them whose workers run, or wait for their next start after a failure.
        trial: whether no step was finished yet in the layout that was ordered.
    """

    members: tuple[tuple[str, str], ...] = ()
    spared: frozenset[str] = frozenset()
    agents: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()
    trial: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """The basis of a rule's decision. ``error`` is None when epochs or starts are judged."""

    record: SeverityRecord
    limits: Limits
    view: FailureContext
    now: float
    error: Failure | None = None
    alone: bool = False
    """No worker trains on without this one: it is a member, or there is no member yet."""

    @property
    def node(self) -> str:
        """The node of the error."""
        return "" if self.error is None else self.error.node

    @property
    def retried(self) -> int:
        """Number of SEV3 errors handled in place within the window, since a step was finished."""
        return sum(1 for at in self.record.reattempts if self.now - at < self.limits.severity.reattempt_window)

    @property
    def in_a_row(self) -> int:
        """Number of the node's failures within the window, each of a worker that had just joined."""
        series = self.record.series.get(self.node)
        return (
            0 if series is None else sum(1 for at in series.times if self.now - at < self.limits.severity.cordon_window)
        )

    @property
    def blamed(self) -> bool:
        """Whether the node causes the repeated failures, and not the script.

        A script that cannot get past a step fails on all nodes and stops all workers. So the node is to blame if other
        workers have finished steps since its failures began, or if no other node has failed.
        """
        if self.in_a_row < self.limits.severity.cordon_failures:
            return False
        record = self.record
        if self.limits.severity.strict:
            return True
        if record.mark - record.series[self.node].mark >= self.limits.severity.soon_steps:
            return True
        return all(failure.node == self.node for failure in [*record.failed, *record.unjudged])

    @property
    def never_starts(self) -> bool:
        """Whether the workers of all agents fail at their start, so that no node is to blame."""
        exits = self.record.exits
        return self.record.most_exits >= EXITS and all(agent in exits for agent in self.view.running)

    @property
    def wrong_value(self) -> bool:
        """Whether a setting of the task is refused; that of a joiner alone may be its node's."""
        return _is("config_error")(self) and self.alone and not self.view.trial

    @property
    def spared(self) -> bool:
        """Whether all tasks can spare the node, or have to."""
        return self.limits.severity.strict or self.node in self.view.spared

    @property
    def gone(self) -> bool:
        """Whether the agent is gone, or was: a lost agent may have returned before it is judged, and is accepted."""
        error = self.error
        return error is not None and (error.kind == "lost_connection" or error.agent not in self.view.agents)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row. ``when`` and ``then`` describe ``holds`` and the action in words."""

    name: str
    on: Trigger
    when: str = "else"
    holds: Callable[[Case], bool] = lambda _: True
    action: RuleAction
    then: str = "the task ends, with its diagnosis"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action to carry out.

    Attributes:
        rule: name of the rule.
        action: the action.
        error: the error that caused it; None for "revert" and "stop".
        reason: readable reason.
        facts: additional fields for the event log.
    """

    rule: str
    action: RuleAction
    error: Failure | None
    reason: str
    facts: dict[str, Any]


def _is(kind: str) -> Callable[[Case], bool]:
    return lambda case: case.error is not None and case.error.kind == kind


RULES: Final = (
    Rule(
        name="the loss is no number",
        on="SEV3",
        when="the kind is `nan_loss`, and `health.nan_loss` is `stop`",
        holds=lambda case: _is("nan_loss")(case) and case.limits.nan_loss == "stop",
        action="stop",
    ),
    Rule(
        name="the parameters differ",
        on="SEV3",
        when="the kind is `parameters_differ`",
        holds=_is("parameters_differ"),
        action="stop",
    ),
    Rule(
        name="the programs differ",
        on="SEV3",
        when="the kind is `programs_differ`",
        holds=_is("programs_differ"),
        action="stop",
        then="the task ends, with its diagnosis: a restart would take the same paths",
    ),
    Rule(
        name="nothing has failed",
        on="SEV3",
        when=f"the kind is {' or '.join(f'`{kind}`' for kind in REPORTED_ONLY)}",
        holds=lambda case: case.error is not None and case.error.kind in REPORTED_ONLY,
        action="tell",
        then="the event log records it; workers are not affected",
    ),
    Rule(
        name="connection fails again",
        on="SEV3",
        when="renewed in place `reattempt_limit` times within `reattempt_window` without a finished step",
        holds=lambda case: case.retried >= case.limits.severity.reattempt_limit,
        action="escalate",
        then="SEV2 `keeps_failing` on the suspect",
    ),
    Rule(
        name="connection fails",
        on="SEV3",
        action="reattempt",
        then="a new epoch and communicator, the same members and processes",
    ),
    Rule(
        name="a value is wrong",
        on="SEV2",
        when="the kind is `config_error`, of a member or before any worker trains, and no layout is on trial",
        holds=lambda case: case.wrong_value,
        action="stop",
        then="the task ends, with its diagnosis: no retry can change a setting",
    ),
    Rule(
        name="the gradients differ",
        on="SEV2",
        when="the kind is `gradients_differ`",
        holds=_is("gradients_differ"),
        action="restart",
        then="all members end by it, and the task resumes from a checkpoint on disk; no node is blamed",
    ),
    Rule(
        name="node keeps failing",
        on="SEV2",
        when="`cordon_failures` consecutive failures within `cordon_window`, the node is at fault and can be spared",
        holds=lambda case: case.blamed and case.spared,
        action="cordon",
        then="as SEV1: no task runs workers there until `unicron undrain NODE`",
    ),
    Rule(
        name="needed node keeps failing",
        on="SEV2",
        when="the same, but a task needs the node for its minimum",
        holds=lambda case: case.blamed,
        action="restart",
        then="as below; the event has `withheld`",
    ),
    Rule(
        name="process fails",
        on="SEV2",
        action="restart",
        then="the agent's remaining workers are killed; torchrun restarts them and they join",
    ),
    Rule(
        name="lost node keeps failing",
        on="SEV1",
        when="as for SEV2: at fault, and can be spared",
        holds=lambda case: case.blamed and case.spared,
        action="cordon",
        then="its next agents get no slot until `unicron undrain NODE`",
    ),
    Rule(
        name="node is lost",
        on="SEV1",
        when="the agent is lost",
        holds=lambda case: case.gone,
        action="isolate",
        then="the others continue; a stand-by gets the slot; a new agent of the node may join",
    ),
    Rule(
        name="node is broken",
        on="SEV1",
        when="the agent is connected",
        action="cordon",
        then="its workers leave at a step boundary, if no task needs them for its minimum; no new ones until "
        "`unicron undrain NODE`",
    ),
    Rule(
        name="no way into a layout",
        on="judged",
        when=f"{TRIALS} epochs, or rounds of one agent's workers, failed before a step was finished in it",
        holds=lambda case: case.view.trial and case.record.tries >= TRIALS,
        action="revert",
        then="the task resumes in the previous layout, from the same checkpoint",
    ),
    Rule(
        name="the program fails",
        on="judged",
        when="two lives, or two rounds of one agent before any worker trained, ended by the same exception of the "
        "program: type, place and step; or two workers in a row of one agent, the second in its first validation, "
        "test, prediction, checkpoint or end of a data epoch: type and place; or it recurred regularly, "
        f"{RECURRENCES} times within `cordon_window`",
        holds=lambda case: case.record.repeated is not None and not case.view.trial,
        action="stop",
        then="the task ends, with its diagnosis and the traceback",
    ),
    Rule(
        name="the script does not start",
        on="judged",
        when=f"one agent's workers ended by themselves in {EXITS} rounds, those of each other agent in one or more, "
        "and no worker of the task has registered",
        holds=lambda case: case.never_starts,
        action="stop",
    ),
    Rule(
        name="no way past a step",
        on="judged",
        when="`crash_attempts` epochs failed at the same step, each a second or more after the one before",
        holds=lambda case: case.record.attempts >= case.limits.severity.crash_attempts,
        action="stop",
    ),
    Rule(
        name="no way past a checkpoint",
        on="judged",
        when="`crash_lives` consecutive lives ended by failures of workers, none got further than those before",
        holds=lambda case: case.record.lives >= case.limits.severity.crash_lives,
        action="stop",
    ),
    Rule(
        name="no way to start",
        on="judged",
        when="one agent's workers failed in `crash_attempts` rounds before any worker trained",
        holds=lambda case: case.record.most_starts >= case.limits.severity.crash_attempts,
        action="stop",
    ),
)


def first(on: Trigger, case: Case) -> Rule | None:
    """Return the first rule that holds; None if no action is due, which is possible only for "judged"."""
    return next((rule for rule in RULES if rule.on == on and rule.holds(case)), None)
