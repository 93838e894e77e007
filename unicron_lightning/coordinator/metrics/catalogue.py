"""Metrics of ``/metrics``: name, type, labels, meaning, as in docs/monitoring.md. Rules and dashboards use no other.

Values of labels are bounded: tasks and nodes of the cluster, and words of closed sets. Ids of workers and agents,
incidents and texts of errors are never labels; they are in the event log.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from unicron_lightning.coordinator.metrics.task_time import TIME_KINDS

AGENT_STATES: Final = ("granted", "warm", "waiting", "none", "away")
NODE_STATES: Final = ("ready", "drained", "away", "lost")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric.

    Attributes:
        name: its name as queried; counters end with ``_total``.
        labels: names of its labels.
        meaning: one sentence.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...] = ()
    meaning: str


def _metric(kind: Literal["counter", "gauge", "histogram"], name: str, labels: str, meaning: str) -> Metric:
    return Metric(name=name, type=kind, labels=tuple(labels.split()), meaning=meaning)


_counter, _gauge, _histogram = partial(_metric, "counter"), partial(_metric, "gauge"), partial(_metric, "histogram")


METRICS: Final = (
    # tasks
    _counter("unicron_steps_total", "task", "Finished optimizer steps, repeated ones included."),
    _counter("unicron_steps_repeated_total", "task", "Steps finished before and repeated since, from a checkpoint."),
    _counter("unicron_micro_batches_total", "task", "Micro-batches of the finished steps."),
    _counter("unicron_samples_total", "task", "Data set items in the global batches of the finished steps."),
    _counter("unicron_micro_batches_recomputed_total", "task", "Micro-batches computed again for lost workers."),
    _counter("unicron_checkpoints_total", "task", "Complete checkpoints that workers have reported."),
    _histogram("unicron_step_seconds", "task", "Duration of a step; steps between two reports count with their mean."),
    _counter("unicron_task_time_seconds_total", "task kind", f"Time of the task by kind: {', '.join(TIME_KINDS)}."),
    _gauge("unicron_task_goodput_ratio", "task", "Productive share of the task's time so far."),
    _gauge("unicron_task_step", "task", "Newest finished step."),
    _gauge("unicron_task_workers", "task", "Members of the task's world that are alive."),
    _gauge("unicron_task_slots", "task", "Granted slots."),
    _gauge("unicron_task_slots_limit", "task", "Largest number of slots that the task may have now."),
    _gauge("unicron_task_state", "task state", "1 for the task's state, 0 for the others."),
    _gauge("unicron_task_degraded", "task", "1 if steps have taken 1.1 times as long as usual for a while."),
    _gauge("unicron_task_stragglers", "task", "Ranks whose own work takes longer than that of their peers."),
    _gauge("unicron_task_waf_flops", "task", "Weighted achieved FLOP/s at the present size, where FLOPs are known."),
    _gauge("unicron_task_agents", "task state", f"Agents by state: {', '.join(AGENT_STATES)}."),
    _gauge("unicron_task_checkpoint_step", "task", "Step of the newest checkpoint."),
    _gauge("unicron_task_memory_step", "task", "Step of the newest complete state in the memory of agents."),
    _gauge("unicron_task_memory_bytes", "task", "Bytes of all states in the memory of agents."),
    # incidents
    _counter("unicron_incidents_total", "task severity", "Incidents opened, by severity of the first event."),
    _counter("unicron_failures_total", "task kind", "Failures by kind: of docs/detection.md, exit, signal, node_lost."),
    _gauge("unicron_incidents_open", "task phase", "Open incidents by their present phase."),
    _histogram("unicron_incident_phase_seconds", "phase", "Duration of a phase of a closed incident."),
    _counter("unicron_incident_lost_worker_seconds_total", "task phase", "Worker-seconds lost by closed incidents."),
    _counter("unicron_incident_lost_flops_total", "task phase", "Weighted FLOP lost by closed incidents, where known."),
    # plans
    _counter("unicron_plans_total", "", "Plans computed."),
    _histogram("unicron_plan_seconds", "", "Time to compute a plan."),
    _gauge("unicron_plan_waf_flops", "", "Expected weighted FLOP/s of the newest plan."),
    _gauge("unicron_plan_places", "task", "Places of each task in the plan in force."),
    # nodes
    _gauge("unicron_nodes", "state", f"Nodes by state: {', '.join(NODE_STATES)}."),
    _gauge("unicron_node_up", "node", "1 if the node's daemon or one of its agents is connected."),
    _gauge("unicron_node_drained", "node", "1 if the node is drained, or cordoned by the coordinator."),
    _gauge("unicron_node_problems", "node", "Present problems of the node's health."),
    _gauge("unicron_node_memory_free_ratio", "node", "Free share of the node's memory."),
    _gauge("unicron_node_disk_free_bytes", "node", "Free bytes of the fullest watched folder."),
    _gauge("unicron_node_gpu_temperature_celsius", "node", "Temperature of the node's hottest GPU."),
    _gauge("unicron_node_gpu_errors", "node kind", "GPU errors since the agent's start: ecc, nvlink, xid."),
    # the coordinator itself
    _gauge("unicron_coordinator_info", "version", "1; the label is the coordinator's version."),
    _gauge("unicron_coordinator_start_time_seconds", "", "Start of the coordinator's process, since 1970."),
    _gauge("unicron_coordinator_connections", "", "Connections of registered agents."),
    _counter("unicron_coordinator_inputs_total", "", "Inputs that the coordinator's state machine has processed."),
    _histogram("unicron_coordinator_loop_lag_seconds", "", "Delay of a timer of the event loop, 4 samples a second."),
    _histogram("unicron_store_write_seconds", "", "Duration of a write to the store."),
    _gauge("unicron_store_failing", "", "1 if some state is not written, e.g. on a full disk."),
)
BY_NAME: Final = {metric.name: metric for metric in METRICS}
