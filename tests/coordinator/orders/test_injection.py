"""The coordinator's part: the target of an order, permission to strike, and the log entry before the strike."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from coordinator.driver import World, restart, running
from coordinator.shell import Coordinator

from unicron_lightning import wire
from unicron_lightning.cli.client import fetch
from unicron_lightning.cli.orders import _schedule
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.orders import injection
from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.faults.fault import Faults, parse, text
from unicron_lightning.tls import Access


def three() -> tuple[World, list[Any]]:
    world = World(allow_injection=True)
    return world, list(running(world, 3))


def order(world: World, words: str, draw: float = 0.0) -> None:
    given = ev.InjectFault(task="t", fault=parse(words), draw=draw)
    assert injection.refusal(world.task(), given) is None
    world.do(given)


@pytest.mark.parametrize(
    ("words", "draw", "told"),
    [
        ("kill rank=1", 0.0, {1: ("b/0#1", "kill rank=all")}),
        ("kill", 0.99, {2: ("c/0#1", "kill rank=all")}),
        ("stop node=node-a for=5s", 0.5, {0: ("a/0#1", "stop rank=all for=5s")}),
        ("hang spin rank=-1", 0.0, {2: ("c/0#1", "hang spin rank=all")}),
        ("kill rank=1 step=9", 0.0, {1: ("b/0#1", "kill rank=all step=9")}),
        ("kill agent rank=1", 0.0, {1: (None, "kill agent rank=all")}),
        ("drop network node=node-c for=1s", 0.0, {2: (None, "drop network rank=all for=1s")}),
        ("kill coordinator rank=1 step=3", 0.0, {1: ("b/0#1", "kill coordinator step=3")}),
        ("exit 1 task=t rank=all", 0.0, {i: (f"{'abc'[i]}/0#1", "exit 1 rank=all") for i in range(3)}),
    ],
)
def test_an_order_goes_to_whom_it_strikes(words: str, draw: float, told: dict[int, Any]) -> None:
    world, agents = three()
    order(world, words, draw)
    heard = {place: agent.all(wire.Inject) for place, agent in enumerate(agents)}
    assert {place: (m.worker, m.fault) for place, (m,) in ((p, ms) for p, ms in heard.items() if ms)} == told
    assert {m.ordered for agent in agents for m in agent.all(wire.Inject)} == {words.replace(" task=t", "")}
    at_once = parse(words).kind in ("kill", "stop", "kill agent", "drop network") and not parse(words).waits
    event = world.event("fault_injected" if at_once else "fault_ordered")
    assert event.fields["fault"] == words
    assert event.fields["at"] == world.now
    assert event.fields["node"] == f"node-{'abc'[max(told)]}"


def test_the_coordinator_strikes_itself_last() -> None:
    world, _ = three()
    given = ev.InjectFault(task="t", fault=parse("kill coordinator SIGTERM"), draw=0.0)
    actions = world.machine.handle(given, world.now)
    assert actions[-1] == ev.Strike(signal=15)
    (event,) = [action for action in actions if isinstance(action, ev.Emit)]
    assert event.name == "fault_injected" and event.fields["target"] == "coordinator"


def test_an_agent_can_be_struck_before_anybody_trains() -> None:
    world = World(allow_injection=True)
    world.agent("a").start()
    order(world, "kill agent node=node-a")
    assert world.event("fault_injected").fields["agent"] == "a"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("kill rank=3", "has no target; the task's ranks are: 0 on node-a, 1 on node-b, 2 on node-c"),
        ("kill agent node=z", "has no target"),
        ("kill rate=1/h", "strikes at once"),
        ("kill after=1s", "strikes at once"),
        ("kill task=other", "the task is t"),
        ("kill joiner=yes phase=join", "before they join"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(words: str, reason: str) -> None:
    world, _ = three()
    refused = injection.refusal(world.task(), ev.InjectFault(task="t", fault=parse(words), draw=0.0))
    assert refused is not None and reason in refused and words in refused


def test_an_order_for_an_agent_that_is_away_is_refused_instead_of_lost() -> None:
    world, (a, _, c) = three()
    restart(world, a, c)
    for words in ("kill rank=1", "kill agent node=node-b"):
        refused = injection.refusal(world.task(), ev.InjectFault(task="t", fault=parse(words), draw=0.0))
        assert refused is not None and "1 on node-b, whose agent is away, 2 on node-c" in refused
    order(world, "kill rank=2")
    assert c.last(wire.Inject).worker == "c/0#1"


def due(agent: Any, claim: str, most: int | None = 1, fault: str = "kill", key: str = "0: kill") -> wire.FaultRecorded:
    """Return the answer to a worker's due fault."""
    worker = f"{agent.name}/0#1"
    agent.say(wire.FaultDue(worker=worker, claim=claim, key=key, most=most, fault=fault, fields={"rank": 1}))
    noted: wire.FaultRecorded = agent.last(wire.FaultRecorded)
    assert noted.claim == claim
    return noted


def test_a_fault_strikes_as_often_as_it_may_whoever_asks() -> None:
    world, (a, b, _) = three()
    assert due(b, "first").strikes
    assert due(b, "first").strikes, "asked again, as after a broken connection"
    assert world.names().count("fault_injected") == 1
    refused = due(a, "second")
    assert not refused.strikes and refused.reason == "it has struck 1 times"
    assert [due(a, f"x{n}", most=2, key="1").strikes for n in range(3)] == [True, True, False]
    assert all(due(a, f"y{n}", most=None, key="2").strikes for n in range(5))
    event = world.event("fault_injected")
    assert event.fields["worker"] == "a/0#1" and event.fields["rank"] == 1 and event.fields["at"] == world.now


def test_what_has_struck_is_known_to_a_restarted_coordinator() -> None:
    world, (a, b, c) = three()
    assert due(b, "first").strikes
    restart(world, a, b, c)
    assert not due(a, "second").strikes


def test_a_script_kills_the_coordinator_only_where_that_is_allowed() -> None:
    _, (a, *_) = three()
    assert due(a, "1", fault="kill coordinator").strikes
    other = World()
    (b, *_) = running(other, 2)
    refused = due(b, "1", fault="kill coordinator")
    assert not refused.strikes and "allow_injection" in refused.reason
    assert "fault_injected" not in other.names()


def test_a_fault_of_a_newer_worker_is_refused_and_breaks_nothing() -> None:
    _, (a, *_) = three()
    refused = due(a, "1", fault="melt rank=1")
    assert not refused.strikes and "expected it to begin with" in refused.reason


def test_over_http(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "closed") as closed:
        endpoint = f"127.0.0.1:{closed.port}"
        with pytest.raises(UnicronError, match="allow_injection=true"):
            fetch(endpoint, "/v1/tasks/t/inject", method="POST", body={"fault": "kill"})
    with Coordinator(tmp_path / "open", "coordinator.allow_injection=true", env={"UNICRON_TOKEN": "t"}) as coordinator:
        endpoint = f"127.0.0.1:{coordinator.port}"
        with pytest.raises(CoordinatorUnavailable, match="cannot prove that it knows the token"):
            fetch(endpoint, "/v1/tasks/t/inject", method="POST", body={"fault": "kill"})
        with pytest.raises(UnicronError, match="no task 't'"):
            fetch(
                endpoint,
                "/v1/tasks/t/inject",
                Access(token=Token(secret="t", origin="a test")),
                method="POST",
                body={"fault": "kill"},
            )


def test_the_command_spreads_strikes_over_time() -> None:
    times = list(islice(_schedule(Faults(["kill rate=60/h seed=3", "stop after=2s", "kill step=4 times=2"]), 0), 20))
    assert [text(fault) for _, fault in times[:2]] == ["kill step=4 times=2", "stop"], "the worker counts what waits"
    assert [at for at, _ in times] == sorted(at for at, _ in times)
    assert [text(fault) for _, fault in times[2:5]] == ["kill seed=3", "kill seed=4", "kill seed=5"]
    assert len(list(_schedule(Faults(["kill rate=1/s times=7"]), 1))) == 7
    assert len(list(_schedule(Faults(["hang times=3"]), 1))) == 3
