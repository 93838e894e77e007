"""Sequences of a task's errors for the severity workflow alone, with one for each row of its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.driver import limits_of

from unicron_lightning.coordinator.severity.record import REPORTED_ONLY, Failure, SeverityRecord
from unicron_lightning.coordinator.severity.rules import Case, Decision, FailureContext
from unicron_lightning.coordinator.severity.workflow import (
    Error,
    named,
    new_life,
    occurred,
    overdue,
    progressed,
    settled,
)

NODES = ("a", "b", "c")


class Story:
    """A task with an agent and a worker on each node, with equal names."""

    def __init__(self, *, spared: str = "abc", nodes: str = "abc", **limits: Any) -> None:
        self.limits = limits_of(limits)
        self.record = SeverityRecord()
        self.nodes = nodes
        self.spared = frozenset(spared)
        self.trial = False
        self.now = 1000.0
        self.round = 0
        self.all: list[Decision] = []
        self.settle(0)

    def case(self, gone: str = "") -> Case:
        view = FailureContext(
            members=tuple((node, node) for node in self.nodes),
            spared=self.spared,
            agents=frozenset(self.nodes) - set(gone),
            running=frozenset(self.nodes) - set(gone),
            trial=self.trial,
        )
        return Case(record=self.record, limits=self.limits, view=view, now=self.now)

    def decided(self, decisions: list[Decision]) -> list[Decision]:
        self.all += decisions
        return decisions

    def see(self, error: Error, *, gone: str = "") -> list[Decision]:
        return self.decided(occurred(self.case(gone), error))

    def named(self, agent: str) -> None:
        named(self.record, agent)

    def finished(self, step: int) -> None:
        progressed(self.record, step, self.limits)

    def settled(self, step: int, members: Mapping[str, str], gone: str = "") -> list[Decision]:
        return self.decided(settled(self.case(gone), step, members))

    def new_life(self) -> list[Decision]:
        return self.decided(new_life(self.case()))

    def overdue(self, *agents: str) -> list[Decision]:
        return self.decided(overdue(self.case(), [(agent, agent) for agent in agents]))

    def settle(self, step: int, without: str = "", *, gone: str = "") -> list[Decision]:
        """Begin an epoch with all other agents as members, after a while; those that were not members have new
        workers.
        """
        self.now += 2.0
        members = {f"{node}#{self.round}": node for node in self.nodes if node not in without}
        kept = {worker: member.node for worker, member in self.record.joined.items()}
        names = {worker: node for worker, node in kept.items() if node not in without}
        names |= {worker: node for worker, node in members.items() if node not in names.values()}
        return self.settled(step, names, gone)

    def fail(
        self,
        node: str,
        kind: str = "exited_abnormally",
        *,
        gone: str = "",
        fault: str = "",
        place: str = "",
        step: int = 0,
        cause: str = "exit 1",
    ) -> list[Decision]:
        """Fail a member on the node; its agent starts another."""
        worker = next(worker for worker, member in self.record.joined.items() if member.node == node)
        self.round += 1
        about = {"cause": cause, "fault": fault, "place": place}
        failure = Failure(kind=kind, node=node, agent=node, worker=worker, at=self.now, step=step, **about)
        return self.see(Error(failure=failure), gone=gone)

    def fail_and_return(self, node: str, step: int, kind: str = "exited_abnormally", *, gone: str = "") -> None:
        """A member fails after ``step`` finished steps, the others continue, and its successor joins them."""
        self.fail(node, kind, gone=gone)
        self.settle(step, without=node, gone=gone)
        self.settle(step)

    def start_fails(
        self,
        node: str,
        kind: str = "exited_abnormally",
        *,
        training: bool,
        sent: bool = False,
        fault: str = "",
        registered: bool = True,
    ) -> list[Decision]:
        """Fail a worker that is no member yet."""
        self.round += 1
        about = {"kind": kind, "node": node, "agent": node, "worker": f"{node}?", "cause": "x", "fault": fault}
        failure = Failure(at=self.now, **about)
        return self.see(Error(failure=failure, round=self.round, training=training, sent=sent, registered=registered))

    def tell(self, node: str, kind: str) -> list[Decision]:
        """Report an error that ends nothing."""
        return self.see(Error(failure=Failure(kind=kind, node=node, agent=node, at=self.now)))

    def disconnect(self) -> list[Decision]:
        return self.see(Error(failure=Failure(kind="connection_failed", node="", agent="", at=self.now)))

    def broken(self, node: str, kind: str = "ecc_error") -> list[Decision]:
        return self.see(Error(failure=Failure(kind=kind, node=node, agent=node, at=self.now)))

    def rules(self) -> list[str]:
        return [decision.rule for decision in self.all]

    def actions(self) -> list[str]:
        return [decision.action for decision in self.all]


# ---- one way into each row of the table


def nothing_has_failed() -> Story:
    story = Story()
    for kind in REPORTED_ONLY:
        story.tell("b", kind)
    return story


def the_loss_is_no_number() -> Story:
    story = Story(nan_loss="stop")
    story.tell("b", "nan_loss")
    return story


def the_parameters_differ() -> Story:
    story = Story()
    story.tell("b", "parameters_differ")
    return story


def the_programs_differ() -> Story:
    story = Story()
    story.tell("b", "programs_differ")
    return story


def the_gradients_differ() -> Story:
    story = Story()
    for number in range(5):  # no node is blamed, however often
        for node in NODES:
            story.fail(node, "gradients_differ")
        story.settle(10 + 2 * number)
    return story


def connection_fails() -> Story:
    story = Story()
    story.disconnect()
    return story


def connection_fails_again() -> Story:
    story = Story()
    for _ in range(4):
        story.named("b")
        story.disconnect()
    return story


def process_fails() -> Story:
    story = Story()
    story.fail_and_return("b", 10)
    return story


def node_keeps_failing() -> Story:
    story = Story()
    for number in range(5):
        story.fail_and_return("b", 10 + 2 * number)
    return story


def needed_node_keeps_failing() -> Story:
    story = Story(spared="")
    for number in range(5):
        story.fail_and_return("b", 10 + 2 * number)
    return story


def lost_node_keeps_failing() -> Story:
    story = Story()
    for number in range(5):
        story.fail_and_return("b", 10 + 2 * number, "lost_connection", gone="b")
    return story


def node_is_lost() -> Story:
    story = Story()
    story.fail_and_return("b", 10, "lost_connection", gone="b")
    return story


def node_is_broken() -> Story:
    story = Story()
    story.broken("b")
    return story


def no_way_into_a_layout() -> Story:
    story = Story()
    story.finished(7)
    story.new_life()
    story.trial = True
    story.settle(0)
    for _ in range(2):
        story.fail_and_return("b", 0)
    return story


def no_way_past_a_step() -> Story:
    story = Story()
    for number in range(5):
        story.finished(7)
        story.fail(NODES[number % 3])
        story.new_life()
        story.settle(0)
    return story


def a_value_is_wrong() -> Story:
    story = Story()
    story.fail("b", "config_error")
    return story


def the_program_fails() -> Story:
    story = Story()
    for _ in range(2):
        story.finished(7)
        for node in NODES:
            story.fail(node, "other_software_error", fault="KeyError in train.py:3 step")
        story.new_life()
        story.settle(0)
    return story


def no_way_past_a_checkpoint() -> Story:
    story = Story()
    story.finished(150)
    for number in range(10):
        story.fail(NODES[number % 3])
        story.new_life()
        story.settle(100)
        story.finished(110 + number)
    return story


def no_way_to_start() -> Story:
    story = Story()
    story.new_life()
    for _ in range(5):
        for node in NODES:
            story.start_fails(node, training=False)
    return story


def the_script_does_not_start() -> Story:
    story = Story()
    for node in (*NODES, *NODES, "a"):
        story.start_fails(node, training=False, registered=False)
    return story


WAYS = {
    "the loss is no number": the_loss_is_no_number,
    "the parameters differ": the_parameters_differ,
    "the programs differ": the_programs_differ,
    "nothing has failed": nothing_has_failed,
    "the gradients differ": the_gradients_differ,
    "connection fails": connection_fails,
    "connection fails again": connection_fails_again,
    "process fails": process_fails,
    "a value is wrong": a_value_is_wrong,
    "the program fails": the_program_fails,
    "node keeps failing": node_keeps_failing,
    "needed node keeps failing": needed_node_keeps_failing,
    "lost node keeps failing": lost_node_keeps_failing,
    "node is lost": node_is_lost,
    "node is broken": node_is_broken,
    "no way into a layout": no_way_into_a_layout,
    "the script does not start": the_script_does_not_start,
    "no way past a step": no_way_past_a_step,
    "no way past a checkpoint": no_way_past_a_checkpoint,
    "no way to start": no_way_to_start,
}
