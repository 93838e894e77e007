"""Counts for /metrics, of the real machine's inputs and facts on a fake clock."""

from __future__ import annotations

import pytest
from coordinator.driver import FakeAgent, World, settle
from coordinator.fake_daemon import FakeDaemon
from coordinator.incidents.test_accounting import come_back, die, form_task, recover, tell

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.metrics import ENDED_KEPT_SECONDS, Histogram, Meters, encoded, families
from unicron_lightning.coordinator.severity.record import SEVERITY

PROCESS = {"version": "1.2", "started_at": 5.0, "store_failing": False}


class Observed(World):
    """A world whose machine is observed, as by the server."""

    def start(self) -> None:
        self.meters = Meters()
        super().start()
        handle = self.machine.handle

        def observed(event: ev.Input, now: float) -> list[ev.Action]:
            actions = handle(event, now)
            self.meters.observe(event, actions, self.machine.cluster, now)
            return actions

        self.machine.handle = observed  # type: ignore[method-assign]

    def samples(self) -> dict[tuple[str, ...], float]:
        """All samples by name and values of labels, except buckets."""
        self.meters.review(self.machine.cluster, self.now)
        found = families(self.meters, self.machine.cluster, **PROCESS)
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in found
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }


def progress(world: World, agent: FakeAgent, step: int) -> None:
    agent.say(wire.Progress(worker=agent.worker(), step=step, metrics={}, at=world.now, samples_per_step=24))


def steps(world: World, agents: list[FakeAgent], numbers: range, seconds: float = 1.0) -> None:
    for number in numbers:
        world.advance(seconds)
        for agent in agents:
            progress(world, agent, number)


def training(count: int) -> tuple[Observed, list[FakeAgent]]:
    world = Observed(join_grace=0.0)
    return world, form_task(world, count)


def kinds(found: dict[tuple[str, ...], float]) -> dict[str, float]:
    return {key[2]: value for key, value in found.items() if key[0] == "unicron_task_time_seconds_total" and value}


def test_a_failure_costs_time_by_kind():
    world, agents = training(4)
    first = world.task().measured.pace.step
    steps(world, agents, range(first + 1, first + 11))
    before = world.samples()
    world.advance(0.5)
    die(world, agents[1], 0.25)
    recover(world, agents[0], 0.5)
    others = [agent for agent in agents if agent is not agents[1]]
    steps(world, others, range(first + 11, first + 15))
    found = world.samples()
    spent = {kind: value - kinds(before).get(kind, 0) for kind, value in kinds(found).items()}
    assert spent == pytest.approx({"productive": 0.5 + 3, "detection": 0.25, "transition": 0.5, "sub_healthy": 1})
    assert found["unicron_steps_total", "t"] - before["unicron_steps_total", "t"] == 4
    assert found["unicron_micro_batches_total", "t"] == found["unicron_steps_total", "t"] * world.task().capacity()
    assert found["unicron_samples_total", "t"] == found["unicron_steps_total", "t"] * 24
    assert found["unicron_step_seconds_sum", "t"] == pytest.approx(9 + 3)
    assert found["unicron_incidents_total", "t", "SEV2"] == 1
    assert found["unicron_failures_total", "t", "signal"] == 1
    assert found["unicron_incidents_open", "t", "sub_healthy"] == 1
    assert found["unicron_task_workers", "t"] == 3
    come_back(world, agents[1], agents[0])
    found = world.samples()
    assert found["unicron_incidents_open", "t", "sub_healthy"] == 0
    assert found["unicron_incident_phase_seconds_sum", "detection"] == pytest.approx(0.25)
    assert found["unicron_incident_lost_worker_seconds_total", "t", "transition"] == pytest.approx(4 * 0.5)


def test_a_wrong_word_of_a_worker_does_not_end_the_figures():
    world, agents = training(2)
    die(world, agents[1], 0.0)
    settle(world)
    fields = {"epoch": world.task().number, "step": 3, "world": "x", "recomputed": 3}
    agents[0].say(wire.WorkerEvent(worker=agents[0].worker(), name="recovered", at=world.now, fields=fields))
    assert world.samples()["unicron_micro_batches_recomputed_total", "t"] == 0


def test_a_spread_models_micro_batches_are_those_that_it_reports():
    world, agents = training(2)
    first = world.task().measured.pace.step
    layout = wire.Layout(tensor=2, pipeline=1)
    world.task().layouts.spread = wire.Spread(
        layout=layout, ordered=False, workers=2, micro_batches=6, tensor_divides={}, pipeline_divides={}
    )
    steps(world, agents, range(first + 1, first + 5))
    found = world.samples()
    assert found["unicron_micro_batches_total", "t"] == 6 * found["unicron_steps_total", "t"] > 0


def test_steps_after_a_checkpoint_are_repeated_ones():
    world, agents = training(1)
    (agent,) = agents
    first = world.task().measured.pace.step
    steps(world, agents, range(first + 1, first + 6))
    agent.saved("/c", first + 2)
    die(world, agent, 0.1)
    world.advance(1)
    agent.rendezvous().boot()
    settle(world)
    tell(world, agent, "started")
    begun = world.task().measured.pace.step
    steps(world, agents, range(begun + 1, first + 8))
    found = world.samples()
    assert world.task().life == 2
    assert found["unicron_steps_total", "t"] == 5 + first + 7 - begun
    assert found["unicron_steps_repeated_total", "t"] == first + 5 - begun
    assert found["unicron_checkpoints_total", "t"] == 1


def test_labels_name_no_worker_agent_or_incident():
    world, agents = training(3)
    die(world, agents[1], 0.25)
    recover(world, agents[0], 0.5)
    world.meters.review(world.machine.cluster, world.now)
    values = {
        value
        for family in families(world.meters, world.machine.cluster, **PROCESS)
        for sample in family.samples
        for name, value in sample.labels.items()
        if name not in ("le", "version")
    }
    nodes = {agent.node for agent in agents}
    words = {value for value in values if value not in {"t", *nodes}}
    assert not [word for word in words if "/" in word or "#" in word or word.startswith("i1")]
    assert words <= {*SEVERITY, *_closed_words()}


def _closed_words() -> set[str]:
    from unicron_lightning.coordinator import metrics
    from unicron_lightning.coordinator.api.status import TASK_STATES

    return {
        *TASK_STATES,
        *metrics.AGENT_STATES,
        *metrics.NODE_STATES,
        *metrics.TIME_KINDS,
        *("SEV1", "SEV2", "SEV3", "exit", "signal", "silent", "node_lost"),
    }


def test_a_task_that_has_ended_stays_for_a_while():
    world, agents = training(1)
    world.do(ev.Cancel(task="t"))
    world.do(ev.Disconnected(conn=agents[0].conn or 0))
    world.advance(ENDED_KEPT_SECONDS / 2)
    assert "t" not in world.machine.tasks
    assert ("unicron_steps_total", "t") in world.samples()
    world.advance(ENDED_KEPT_SECONDS)
    assert ("unicron_steps_total", "t") not in world.samples()


def test_a_histogram_counts_in_the_bucket_of_its_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, number=3)
    assert histogram.counts == [2, 4, 1]
    assert histogram.sum == 18.0


def test_openmetrics_and_prometheus_text():
    world, _ = training(1)
    world.meters.review(world.machine.cluster, world.now)
    found = families(world.meters, world.machine.cluster, **PROCESS)
    text, content_type = encoded(found, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.decode().endswith("# EOF\n")
    plain, content_type = encoded(found, "")
    assert content_type.startswith("text/plain")
    assert 'unicron_task_state{state="running",task="t"} 1.0' in plain.decode()


def test_a_task_that_writes_a_checkpoint_before_it_stops_is_pausing():
    world, _ = training(2)
    world.do(ev.Cancel(task="t", save=True))
    samples = world.samples()
    assert [key for key, value in samples.items() if key[0] == "unicron_task_state" and value] == [
        ("unicron_task_state", "t", "pausing")
    ]


def test_a_node_is_up_while_one_of_its_agents_is_connected():
    world = Observed(join_grace=0.0)
    daemon = FakeDaemon(world, "n", "0").connect()
    world.agent("a", place="n/0").start()
    daemon.drop()
    assert world.machine.cluster.nodes["n"].conn is None
    assert (world.samples()["unicron_node_up", "n"], world.samples()["unicron_nodes", "ready"]) == (1.0, 1.0)


def test_each_node_has_its_samples():
    world = Observed(join_grace=0.0)
    world.nodes = (1, 1000)
    for number in range(30):
        world.agent(f"n{number}").start()
    assert sum(1 for key in world.samples() if key[0] == "unicron_node_up") == 30
