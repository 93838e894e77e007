"""The coordinator's state and counts as families of prometheus_client, which encodes them.

The library is imported with the first request, not at the coordinator's start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from unicron_lightning import wire
from unicron_lightning.coordinator.allocation import estimates
from unicron_lightning.coordinator.api.status import TASK_STATES, agent_standing, node_standings, state_of_task
from unicron_lightning.coordinator.incidents.record import PHASES
from unicron_lightning.coordinator.metrics.catalogue import AGENT_STATES, BY_NAME, NODE_STATES
from unicron_lightning.coordinator.metrics.meters import Histogram, Meters, TaskCounts, usual_seconds
from unicron_lightning.coordinator.state import Cluster, Task

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_UNITS = ("seconds", "bytes", "ratio", "celsius")


class _Families:
    """Families by the names of the catalogue; a name that it lacks is a KeyError."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample of a counter or a gauge, unless its value is None."""
        if value is not None:
            self._family(name).add_metric(labels, value)

    def histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """Add a histogram."""
        bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
        self._family(name).add_metric(labels, buckets=buckets, sum_value=histogram.sum)

    def _family(self, name: str) -> Any:
        from prometheus_client import metrics_core

        family = self.made.get(name)
        if family is None:
            metric = BY_NAME[name]
            kinds = {
                "counter": metrics_core.CounterMetricFamily,
                "gauge": metrics_core.GaugeMetricFamily,
                "histogram": metrics_core.HistogramMetricFamily,
            }
            plain = name.removesuffix("_total")
            unit = next((unit for unit in _UNITS if plain.endswith(f"_{unit}")), "")
            family = kinds[metric.type](plain, metric.meaning, labels=metric.labels, unit=unit)
            self.made[name] = family
        return family


def families(meters: Meters, cluster: Cluster, *, version: str, started_at: float, store_failing: bool) -> list[Family]:
    """Return all families with their samples.

    Args:
        meters: the counts, reviewed just before.
        cluster: the machine's state.
        version: of this package.
        started_at: time.time() of the start of the coordinator's process.
        store_failing: whether some state is not written.
    """
    made = _Families()
    for name, meter in sorted(meters.tasks.items()):
        _counts(made, name, meter)
    for task in cluster.tasks.values():
        _task(made, cluster, task)
    for phase, histogram in meters.phases.items():
        made.histogram("unicron_incident_phase_seconds", histogram, phase)
    made.add("unicron_plans_total", meters.plans)
    made.histogram("unicron_plan_seconds", meters.plan_seconds)
    made.add("unicron_plan_waf_flops", meters.plan_waf)
    for name, places in cluster.lasting.allocation.items():
        made.add("unicron_plan_places", places, name)
    _nodes(made, cluster, meters)
    made.add("unicron_coordinator_info", 1, version)
    made.add("unicron_coordinator_start_time_seconds", started_at)
    made.add("unicron_coordinator_connections", len(cluster.conns))
    made.add("unicron_coordinator_inputs_total", meters.inputs)
    made.histogram("unicron_coordinator_loop_lag_seconds", meters.loop_lag)
    made.histogram("unicron_store_write_seconds", meters.store_seconds)
    made.add("unicron_store_failing", store_failing)
    return list(made.made.values())


def encoded(found: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Encode families; return the text and its content type.

    Args:
        found: the families.
        accept: the request's header Accept: OpenMetrics, or else Prometheus's text format.
    """
    from prometheus_client.exposition import choose_encoder

    kept = list(found)

    class Source:
        def collect(self) -> list[Family]:
            return kept

    encode, content_type = choose_encoder(accept)
    return encode(Source()), content_type


def _counts(made: _Families, name: str, meter: TaskCounts) -> None:
    made.add("unicron_steps_total", meter.steps, name)
    made.add("unicron_steps_repeated_total", meter.repeated, name)
    made.add("unicron_micro_batches_total", meter.micro_batches, name)
    made.add("unicron_samples_total", meter.samples, name)
    made.add("unicron_micro_batches_recomputed_total", meter.recomputed, name)
    made.add("unicron_checkpoints_total", meter.checkpoints, name)
    made.histogram("unicron_step_seconds", meter.step_seconds, name)
    for kind, seconds in meter.time.seconds.items():
        made.add("unicron_task_time_seconds_total", seconds, name, kind)
    made.add("unicron_task_goodput_ratio", meter.time.goodput, name)
    for severity in ("SEV1", "SEV2", "SEV3"):
        made.add("unicron_incidents_total", meter.incidents[severity], name, severity)
    for failure, number in sorted(meter.failures.items()):
        made.add("unicron_failures_total", number, name, failure)
    for phase, lost in meter.lost_worker_seconds.items():
        made.add("unicron_incident_lost_worker_seconds_total", lost, name, phase)
    for phase, lost in meter.lost_flops.items():
        made.add("unicron_incident_lost_flops_total", lost, name, phase)


def _task(made: _Families, cluster: Cluster, task: Task) -> None:
    state, newest = state_of_task(task, cluster.lasting.assigned.values()), task.foremost
    for each in TASK_STATES:
        made.add("unicron_task_state", each == state, task.id, each)
    made.add("unicron_task_step", newest.step if newest else None, task.id)
    made.add("unicron_task_workers", len(task.live_members()), task.id)
    made.add("unicron_task_slots", len(task.slots), task.id)
    made.add("unicron_task_slots_limit", task.limit, task.id)
    made.add("unicron_task_degraded", bool(task.watch.degraded), task.id)
    made.add("unicron_task_stragglers", len(task.watch.stragglers), task.id)
    made.add("unicron_task_waf_flops", waf_of(cluster, task), task.id)
    made.add("unicron_task_checkpoint_step", task.checkpoint.step if task.checkpoint else None, task.id)
    complete = task.memory.complete
    made.add("unicron_task_memory_step", complete.step if complete else None, task.id)
    made.add("unicron_task_memory_bytes", sum(agent.memory_bytes for agent in task.agents.values()), task.id)
    standing = Counter("away" if agent.conn is None else agent_standing(task, agent) for agent in task.agents.values())
    for word in AGENT_STATES:
        made.add("unicron_task_agents", standing[word], task.id, word)
    phases = Counter(each.phase for each in task.accounts.open)
    for phase in PHASES[1:]:
        made.add("unicron_incidents_open", phases[phase], task.id, phase)


def waf_of(cluster: Cluster, task: Task) -> float | None:
    """Return the weighted FLOP/s of a task at its present size; None if FLOPs or step time are unknown."""
    flops, seconds = estimates.flops_per_step(task, cluster.lasting.jobs.get(task.id)), usual_seconds(task)
    return None if flops is None or seconds is None else task.weight * flops / seconds


def _nodes(made: _Families, cluster: Cluster, meters: Meters) -> None:
    problems: Counter[str] = Counter()
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            problems[agent.node] = max(problems[agent.node], len(agent.problems))
    standings = node_standings(cluster)
    states = Counter(each.state for each in standings.values())
    for state in NODE_STATES:
        made.add("unicron_nodes", states[state], state)
    for node, each in standings.items():
        made.add("unicron_node_up", each.up, node)
        made.add("unicron_node_drained", each.drained, node)
        made.add("unicron_node_problems", problems[node], node)
        if node in meters.readings:
            _health(made, node, meters.readings[node])


def _health(made: _Families, node: str, reading: wire.NodeReading) -> None:
    free = reading.memory_free_percent
    made.add("unicron_node_memory_free_ratio", None if free is None else free / 100, node)
    made.add("unicron_node_disk_free_bytes", min(reading.disk_free_bytes.values(), default=None), node)
    heat = [gpu.celsius for gpu in reading.gpus if gpu.celsius is not None]
    made.add("unicron_node_gpu_temperature_celsius", max(heat, default=None), node)
    if reading.gpus:
        made.add("unicron_node_gpu_errors", sum(gpu.ecc_errors for gpu in reading.gpus), node, "ecc")
        made.add("unicron_node_gpu_errors", sum(gpu.nvlink_errors for gpu in reading.gpus), node, "nvlink")
        made.add("unicron_node_gpu_errors", sum(len(gpu.xids) for gpu in reading.gpus), node, "xid")
