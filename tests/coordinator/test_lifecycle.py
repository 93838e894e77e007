"""The lifecycle of a task: transitions that exist and that do not, and stored tasks of earlier versions."""

from __future__ import annotations

import json

import msgspec
import pytest

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import lifecycle, parts, state
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.allocation.places import DaemonPlaces
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.state import Agent, Cluster, Task


def task(**now) -> Task:
    return Task(id="t", min_nodes=1, max_nodes=2, created_at=0.0, lifecycle=Lifecycle(**now))


def test_a_script_is_plain_until_a_worker_has_sent_its_hello():
    made = task()
    lifecycle.agents_changed(made)
    assert made.lifecycle.script == "changed" and not made.plain
    assert lifecycle.found_plain(made)
    assert made.plain
    lifecycle.found_elastic(made)
    assert made.elastic and not made.plain
    lifecycle.agents_changed(made)
    assert made.elastic
    with pytest.raises(AssertionError, match="task 't': script cannot move from elastic to plain"):
        lifecycle.found_plain(made)


@pytest.mark.parametrize("script", ["unknown", "changed", "elastic"])
def test_only_a_plain_script_regroups(script):
    with pytest.raises(AssertionError, match="cannot regroup"):
        lifecycle.regroup(task(script=script, slots="granted"))


def test_slots_are_granted_before_a_script_regroups():
    made = task(script="plain")
    with pytest.raises(AssertionError, match="slots cannot move from none to regrouping"):
        lifecycle.regroup(made)
    lifecycle.move(made, slots="granted")
    lifecycle.regroup(made)
    assert made.formed and made.regrouping
    lifecycle.move(made, slots="granted")
    assert made.formed and not made.regrouping


def test_a_join_is_due_only_after_candidates_have_waited():
    made = task(script="elastic", slots="granted")
    with pytest.raises(AssertionError, match="join cannot move from none to due"):
        lifecycle.move(made, join="due")
    lifecycle.move(made, join="waiting")
    lifecycle.move(made, join="due")
    assert not lifecycle.end_waiting_for_siblings(made)
    assert made.lifecycle.join == "none"


def test_a_restored_task_waits_for_its_agents_and_its_timer_is_gone():
    made = task(script="elastic", slots="granted", join="waiting")
    lifecycle.restore(made, waits=False)
    assert not made.restoring and not made.absent
    made.agents["a"] = Agent(id="a", task="t", node="n", host="h", pid=1, conn=None)
    lifecycle.restore(made, waits=True)
    assert made.restoring and made.lifecycle.join == "none"
    lifecycle.move(made, agents="present")
    del made.agents["a"]
    lifecycle.restore(made, waits=True)
    assert made.absent


def test_a_paused_script_that_turns_out_to_be_plain_gets_its_slots_together_without_a_regrouping():
    made = task(script="changed")
    agent = Agent(id="a", task="t", node="n", host="h", pid=1, conn=1, round=3, stopping=True)
    made.agents["a"] = agent
    turn = Turn(now=1.0, limits=ev.Limits(), cluster=Cluster(tasks={"t": made}), daemons=DaemonPlaces())
    parts.receive(made, turn, agent, wire.StoreUsed(round=3))
    assert made.plain and not made.formed and not made.regrouping


def test_the_lifecycle_is_replaced_only_by_its_transitions():
    made = task()
    with pytest.raises(AttributeError):
        made.lifecycle.over = True
    with pytest.raises(AttributeError):
        made.elastic = True


def test_a_task_stored_by_an_earlier_version_is_unreadable():
    stored = json.loads(state.encode(task(script="elastic", slots="granted")))
    del stored["lifecycle"]
    with pytest.raises(msgspec.DecodeError, match="missing required field `lifecycle`"):
        state.decode_task(json.dumps({**stored, "elastic": True, "formed": True}).encode())
