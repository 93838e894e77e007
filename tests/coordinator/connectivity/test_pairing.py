"""The pairwise check: choice of partners, and consequences; the agents' exchanges are simulated."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.driver import FakeAgent, World, members

from unicron_lightning import wire
from unicron_lightning.detection.pairs import FailedExchange, PairLimits, conclude, fault

LIMITS = PairLimits(check=True, bandwidth=100.0, retry=30.0)


class Net:
    """Agents of one task whose exchanges succeed, except with or between those given as bad."""

    def __init__(self, nodes: tuple[int, int] = (1, 4)) -> None:
        self.world = World(pairs=LIMITS)
        self.world.nodes = nodes
        self.agents: dict[str, FakeAgent] = {}
        self.bad: set[str] = set()
        """Bad nodes, or bad pairs of them in alphabetical order."""
        self.mute: set[str] = set()
        """Nodes whose agents report no exchanges."""
        self.tried: list[str] = []
        self._heard: dict[str, int] = {}

    def start(self, name: str, node: str = "") -> FakeAgent:
        agent = self.agents[name] = self.world.agent(name)
        agent.node = node or name
        agent.start()
        self.settle()
        return agent

    def settle(self) -> None:
        """Have all agents carry out their orders, until there are no more."""
        while sum(self._answer(agent) for agent in list(self.agents.values())):
            pass

    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)
        self.settle()

    def _answer(self, agent: FakeAgent) -> bool:
        news = agent.inbox[self._heard.get(agent.name, 0) :]
        self._heard[agent.name] = len(agent.inbox)
        orders = [word for word in news if isinstance(word, wire.PairServe | wire.PairConnect | wire.PairEnd)]
        for order in [] if agent.node in self.mute or agent.conn is None else orders:
            self._obey(agent, order)
        return bool(orders)

    def _obey(self, agent: FakeAgent, order: wire.PairServe | wire.PairConnect | wire.PairEnd) -> None:
        match order:
            case wire.PairServe():
                agent.say(wire.PairServing(check=order.check, host=agent.name, port=1, key="k"))
            case wire.PairEnd():
                agent.say(wire.PairResult(check=order.check, cause="no agent has connected"))
            case wire.PairConnect():
                self.tried.append(f"{agent.name}-{order.agent}")
                pair = {agent.node, self.agents[order.agent].node}
                failed = self.bad & {*pair, "".join(sorted(pair))}
                agent.say(good(order.check) if not failed else failure(order.check))

    def granted(self) -> list[str]:
        return [name for name, agent in self.agents.items() if agent.granted]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.world.events if event.name == name]


def good(check: str, speed: float = 1e9) -> wire.PairResult:
    return wire.PairResult(check=check, round_trip=1e-4, sent=speed, received=1e9)


def failure(check: str) -> wire.PairResult:
    return wire.PairResult(check=check, cause="not connected within 2 s")


def bad(*nodes: str) -> list[FailedExchange]:
    return [FailedExchange(agent=node, node=node, cause="too slow") for node in nodes]


@pytest.mark.parametrize(
    ("failed", "others", "before", "follows"),
    [
        ([], True, False, "try"),
        (bad("a"), True, False, "try"),
        (bad("a", "b"), True, False, "bar"),
        (bad("a", "b"), True, True, "bar"),
        (bad("a"), False, False, "bar"),
        (bad("a"), False, True, "admit"),
        ([], False, False, "admit"),
    ],
)
def test_what_follows_from_failed_exchanges(
    failed: list[FailedExchange], others: bool, before: bool, follows: str
) -> None:
    assert conclude(failed, others=others, before=before) == follows


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (good("c"), ""),
        (good("c", 12.5e6), ""),
        (good("c", 12.4e6), "sent at 99.2 Mbit/s; expected 100"),
        (wire.PairResult(check="c", sent=1e9, received=1e3), "received at 0.008 Mbit/s; expected 100"),
        (failure("c"), "not connected within 2 s"),
    ],
)
def test_an_exchange_is_judged_by_its_slower_direction(result: wire.PairResult, why: str) -> None:
    assert fault(result, LIMITS) == why
    assert fault(result, PairLimits(bandwidth=0.0)) == result.cause


def test_without_the_option_nobody_exchanges_anything() -> None:
    net = Net()
    net.world = World()
    net.world.nodes = (1, 4)
    net.start("a")
    net.start("b")
    assert net.granted() == ["a", "b"] and net.tried == []


def test_the_first_is_admitted_alone_and_each_other_after_a_good_exchange() -> None:
    net = Net()
    for name in "abc":
        net.start(name)
    assert net.tried == ["b-a", "c-a"]
    assert net.granted() == ["a", "b", "c"]
    checked = net.events("pair_checked")
    assert [(each["node"], each["partner_node"]) for each in checked] == [("b", "a"), ("c", "a")]
    assert (checked[0]["round_trip"], checked[0]["sent"], checked[0]["received"]) == (1e-4, 1e9, 1e9)


def test_an_agent_is_checked_once_and_its_node_too() -> None:
    net = Net()
    net.start("a")
    b = net.start("b")
    net.start("b2", node="b")
    b.boot()
    b.die()
    b.rendezvous()
    net.settle()
    assert b.granted and net.tried == ["b-a"]


def test_bad_with_two_is_its_own_fault_and_is_told_once_until_it_is_well() -> None:
    net = Net()
    net.bad = {"c"}
    for name in "abc":
        net.start(name)
    assert net.tried == ["b-a", "c-a", "c-b"]
    assert net.granted() == ["a", "b"]
    (told,) = net.events("error_reported")
    assert (told["kind"], told["severity"], told["node"]) == ("link_degraded", "SEV3", "c")
    assert told["cause"] == (
        "the exchange of data failed with a: not connected within 2 s; with b: not connected within 2 s (its own link)"
    )
    assert told["details"]["partners"][0]["partner_cause"] == "no agent has connected"
    assert net.agents["c"].last(wire.Barred).reason == told["cause"]
    net.advance(31)
    assert net.tried[3:] == ["c-a", "c-b"]
    net.bad = set()
    net.advance(31)
    assert net.granted() == ["a", "b", "c"]
    assert net.agents["c"].last(wire.Barred).reason == ""
    assert len(net.events("error_reported")) == 1
    assert net.events("node_healthy") == [{"agent": "c", "node": "c", "checks": ["exchange"]}]


def test_good_with_the_second_admits_and_suspects_the_first() -> None:
    net = Net()
    net.start("a")
    net.start("b")
    net.bad = {"ac"}
    net.start("c")
    assert net.tried == ["b-a", "c-a", "c-b"]
    assert net.granted() == ["a", "b", "c"]
    (noted,) = net.events("link_suspected")
    assert noted == {"agent": "a", "node": "a", "by": "c", "cause": "not connected within 2 s"}
    assert net.events("error_reported") == []
    net.start("d")
    assert net.tried[3:] == ["d-b"], "a suspect is asked last"


def test_one_that_waits_and_was_admitted_alone_has_to_pass_once_it_is_suspected() -> None:
    net = Net(nodes=(3, 4))
    net.bad = {"a"}
    for name in "abcd":
        net.start(name)
    assert net.granted() == ["b", "c", "d"]
    assert [each["node"] for each in net.events("error_reported")] == ["b", "a"]
    assert [each["node"] for each in net.events("link_suspected")] == ["a"]
    net.bad = set()
    net.advance(31)
    assert net.granted() == ["a", "b", "c", "d"]


def test_with_one_partner_the_newcomer_waits_until_that_is_gone() -> None:
    net = Net()
    net.bad = {"ab"}
    a = net.start("a")
    net.start("b")
    assert net.granted() == ["a"]
    assert net.events("error_reported")[0]["cause"].endswith("(without a third node, either link may be at fault)")
    a.drop()
    del net.agents["a"]
    net.advance(1)
    assert net.granted() == ["b"], "at once, as nothing follows any more from what a has done"


def test_a_third_node_that_comes_settles_it_at_once() -> None:
    net = Net()
    net.bad = {"a"}
    for name in "abc":
        net.start(name)
    assert net.granted() == ["a", "b", "c"]
    assert net.events("link_suspected")[0]["node"] == "a"


def test_a_partner_that_dies_meanwhile_costs_nothing_but_its_loss() -> None:
    net = Net()
    a = net.start("a")
    net.start("b")
    net.mute = {"a"}
    c = net.start("c")
    assert not c.granted
    a.drop()
    del net.agents["a"]
    net.advance(1)
    assert c.granted and net.tried == ["b-a", "c-b"]
    assert net.events("error_reported") == net.events("link_suspected") == []


def test_a_partner_that_lives_and_says_nothing_costs_a_time() -> None:
    net = Net()
    net.start("a")
    net.start("b")
    net.mute = {"a"}
    c = net.start("c")
    net.advance(13)
    assert c.granted and net.tried == ["b-a", "c-b"]
    assert net.events("link_suspected")[0]["cause"] == "its agent does not answer"


def test_one_that_can_not_serve_is_passed_over() -> None:
    net = Net()
    net.start("a")
    net.start("b")
    net.mute = {"a"}
    c = net.start("c")
    net.agents["a"].say(wire.PairResult(check=net.agents["a"].last(wire.PairServe).check, cause="no such address"))
    net.settle()
    assert c.granted
    assert net.events("link_suspected")[0]["cause"] == "it cannot serve: no such address"


def test_one_exchange_at_a_time_for_each_node() -> None:
    net = Net()
    net.start("a")
    net.mute = set("bcd")
    for name in "bcd":
        net.start(name)
    assert [len(net.agents[name].all(wire.PairServe)) for name in "abcd"] == [1, 0, 0, 1]
    net.mute = set()
    for _ in range(60):  # an unanswered exchange is abandoned
        net.advance(1)
    assert net.granted() == ["a", "b", "c", "d"]


def test_a_coordinator_that_starts_anew_begins_what_was_going_on_anew() -> None:
    net = Net()
    net.start("a")
    net.mute = {"b"}
    b = net.start("b")
    net.world.start()
    net.mute = set()
    net.agents["a"].register()
    b.register()
    net.settle()
    assert b.granted and net.tried == ["b-a"]


def test_those_that_train_are_left_alone() -> None:
    net = Net()
    net.start("a").boot()
    net.start("b").boot()
    for epoch in (1, 2):
        for agent in net.agents.values():
            if epoch <= agent.epoch:
                agent.ready(agent.epoch, step=3)
    before = members(net.world)
    assert len(before) == 2
    net.bad = {"c"}
    net.start("c")
    net.advance(100)
    assert members(net.world) == before
    assert net.world.task().incident is None
