"""Nodes with a daemon: registration, and the torchrun agents that each daemon has to run.

A daemon runs an agent of a job at every place that the plan assigns to the job. A launched agent stays until the job is
over, as a stand-by if the place now belongs to another task: regaining the place then costs a start of workers but none
of torchrun. After a successful job the agents exit by themselves; otherwise they are stopped.

A daemon that is away for longer than the grace period takes its places with it. The agents it runs have connections of
their own and are judged by those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.orders import jobs
from unicron_lightning.coordinator.state import Cluster, Lasting, Node, Task
from unicron_lightning.jobs import Job, problem
from unicron_lightning.wire.daemon import Launch, NodeHello, NodeReport, NodeRun, NodeTask


def of_conn(cluster: Cluster, conn: int) -> Node | None:
    """Return the node whose daemon has this connection."""
    return next((node for node in cluster.nodes.values() if node.conn == conn), None)


def hello(cluster: Cluster, turn: Turn, conn: int, message: NodeHello) -> None:
    """Handle a daemon's (new) connection."""
    old = cluster.nodes.get(message.node)
    reason = _refusal(old, message)
    if reason is not None:
        turn.refuse(conn, reason)
        return
    if old is not None:
        turn.cancel("node_lost", agent=old.label)
        if old.conn is not None and old.conn != conn:
            if (old.host, old.pid) == (message.host, message.pid):
                turn.close(old.conn, "the daemon has a newer connection")
            else:
                turn.refuse(old.conn, f"a newer daemon has the label {old.label!r}")
    tasks = _usable(turn, message.node, message.tasks)
    for each in tasks:
        _adopt(cluster, turn, each.job)
    same = old is not None and (old.host, old.pid) == (message.host, message.pid)
    cluster.lasting.lost.pop(message.node, None)
    cluster.nodes[message.node] = Node(
        label=message.node,
        host=message.host,
        pid=message.pid,
        started_at=message.started_at,
        conn=conn,
        slots=message.slots,
        kind=message.kind or "",
        launches=[Launch(job=each.job, slot=each.slot) for each in tasks],
        tasks=tasks,
        unsent=True,
    )
    about: dict[str, Any] = {"node": message.node, "host": message.host, "pid": message.pid, "slots": message.slots}
    turn.emit_of_cluster("node_registered", **about, resumed=same)
    _changed(turn)


def report(turn: Turn, node: Node, message: NodeReport) -> None:
    """Handle a daemon's report of the agents it runs."""
    before = {key_of(each): each for each in node.tasks}
    tasks = [each for each in message.tasks if problem(each.job) is None]
    for each in tasks:
        known = before.get(key_of(each))
        if each.pid is None and each.code is not None and (known is None or known.pid is not None):
            fields = {"node": node.label, "slot": each.slot, "code": each.code, "starts": each.starts}
            turn.emit_of_cluster("launch_ended", of=each.job.name, **fields, reason=each.reason)
    node.tasks = tasks
    turn.places_changed = True  # not saved: daemons report it again


def disconnected(turn: Turn, node: Node) -> None:
    """Handle the end of the daemon's connection: a grace period to return begins."""
    node.conn = None
    turn.timer("node_lost", turn.limits.reconnect_grace, agent=node.label)


def lost_due(cluster: Cluster, turn: Turn, label: str) -> None:
    """Declare the node lost: the daemon did not return in time."""
    node = cluster.nodes.get(label)
    if node is None or node.conn is not None:
        return
    del cluster.nodes[label]
    cluster.lasting.record_lost(label, turn.now)
    turn.emit_of_cluster("node_lost", node=label)
    _changed(turn)


def restore(cluster: Cluster, turn: Turn) -> None:
    """Restore the nodes of an earlier coordinator process: no daemon is connected yet."""
    for node in cluster.nodes.values():
        node.conn = None
        turn.timer("node_lost", turn.limits.restart_grace, agent=node.label)


class SentOrders:
    """What decides which nodes have to be looked at for new orders."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] | None = None

    def are_for_other_jobs(self, lasting: Lasting) -> bool:
        """Whether any node may need other orders: the jobs have changed, or agents are ending."""
        return self._jobs != lasting.jobs

    def are(self, lasting: Lasting, *, ending: bool) -> None:
        """Record that all orders are sent; daemons with ending agents are updated again when these have exited."""
        if ending:
            self._jobs = None
        elif self._jobs != lasting.jobs:
            self._jobs = dict(lasting.jobs)


def review(cluster: Cluster, turn: Turn, told: SentOrders, nodes: Collection[str] | None) -> None:
    """Send each daemon the agents it has to run, if they have changed. Idempotent.

    Args:
        cluster: the whole state.
        turn: receives the orders.
        told: the orders sent so far.
        nodes: nodes whose places may have been given to other tasks since the last call; None if any may.
    """
    look_at: Iterable[Node] = cluster.nodes.values()
    if nodes is not None and not told.are_for_other_jobs(cluster.lasting):
        look_at = [node for node in look_at if node.unsent or node.label in nodes]
    ending = False
    for node in look_at:
        if node.unsent or not _is_told(cluster, node):
            launches = _wanted(cluster, node)
            if launches != node.launches or node.unsent:
                node.launches = launches
                if node.conn is not None:
                    node.unsent = False
                    turn.actions.append(ev.Send(conn=node.conn, message=NodeRun(launches=launches)))
        ending = ending or any(launch.ending for launch in node.launches)
    told.are(cluster.lasting, ending=ending)


def review_ended(cluster: Cluster, turn: Turn) -> list[Task]:
    """End and return the jobs whose torchrun agents have all exited by themselves.

    Either torchrun failed (its restarts are exhausted, or its options are refused), or it succeeded while the
    coordinator was away, so that its agent could not report.
    """
    ended: list[Task] = []
    alone = [job for job in cluster.lasting.jobs.values() if job.name in cluster.tasks]
    alone = [job for job in alone if not cluster.tasks[job.name].agents and cluster.tasks[job.name].over is None]
    if not alone:
        return ended
    nodes = cluster.nodes.values()
    run: dict[tuple[str, float], list[tuple[Node, NodeTask]]] = {}
    for node, each in [(one, each) for one in filter(attrgetter("tasks"), nodes) for each in one.tasks]:
        run.setdefault((each.job.name, each.job.submitted_at), []).append((node, each))
    for job in alone:
        task = cluster.tasks[job.name]
        of_job = run.get((job.name, job.submitted_at), [])
        failed = [(node, each) for node, each in of_job if each.pid is None and (each.code or 0) > 0]
        done = failed or [(node, each) for node, each in of_job if each.pid is None and each.code == 0]
        if done and all(each.pid is None for _, each in of_job):
            node, each = done[0]
            reason = f"torchrun ended with status {each.code} at {node.label}/{each.slot}"
            reason = f"torchrun at {node.label}/{each.slot} {each.reason}" if each.reason else reason
            jobs.finish(task, turn, succeeded=not failed, reason=reason)
            ended.append(task)
    return ended


def outdated(cluster: Cluster, message: wire.Register) -> str | None:
    """Return why a daemon's agent can't register: its job is over. None if it may, or was not started by a daemon.

    The agent was still starting when the job ended. It must not start the task again.
    """
    node = cluster.nodes.get(message.node)
    own = next((each for each in node.tasks if each.pid == message.pid), None) if node else None
    if own is None or own.job.name != message.task or cluster.lasting.jobs.get(message.task) == own.job:
        return None
    return f"job {message.task!r} is over"


def _refusal(old: Node | None, message: NodeHello) -> str | None:
    if message.protocol != wire.PROTOCOL_VERSION:
        return (
            f"the daemon speaks protocol {message.protocol}, the coordinator {wire.PROTOCOL_VERSION}: use one version"
        )
    if not message.node or "/" in message.node or not message.slots or len(set(message.slots)) < len(message.slots):
        return f"expected a label without '/' and different slots, got {message.node!r} with {message.slots}"
    if old is not None and old.conn is not None and old.started_at > message.started_at:
        return f"a newer daemon (process {old.pid} on {old.host}) has the label {message.node!r}"
    return None


def _usable(turn: Turn, node: str, tasks: Sequence[NodeTask]) -> list[NodeTask]:
    """Return the valid jobs of a daemon; it is ordered to stop the others."""
    usable: list[NodeTask] = []
    for each in tasks:
        if (wrong := problem(each.job)) is None:
            usable.append(each)
        else:
            turn.emit_of_cluster("job_not_adopted", node=node, slot=each.slot, reason=wrong)
    return usable


def _adopt(cluster: Cluster, turn: Turn, job: Job) -> None:
    """Accept a job that only a daemon knows of, because the coordinator has lost its store."""
    known = cluster.lasting.jobs.get(job.name)
    result = jobs.result_of(cluster.lasting, job.name)
    if known is None and (result is None or result.submitted_at < job.submitted_at):
        jobs.adopt(cluster, turn, job, created_at=turn.now)


def _is_told(cluster: Cluster, node: Node) -> bool:
    """Whether nothing can have changed for the node: its launches match its jobs and its places."""
    lasting = cluster.lasting
    for launch in node.launches:
        job = lasting.jobs.get(launch.job.name)
        if launch.ending or (job is not launch.job and job != launch.job):
            return False
    for slot in node.slots:
        task = lasting.assigned.get(f"{node.label}/{slot}", "")
        if task in lasting.jobs and not any(each.job.name == task and each.slot == slot for each in node.launches):
            return False
    return True


def _wanted(cluster: Cluster, node: Node) -> list[Launch]:
    lasting = cluster.lasting
    runs = {key_of(each) for each in node.tasks if each.pid is not None}
    wanted: list[Launch] = []
    for launch in node.launches:
        job = launch.job
        if lasting.jobs.get(job.name) == job:
            wanted.append(launch)
        elif _succeeded(cluster, job) and key_of(launch) in runs:
            wanted.append(Launch(job=job, slot=launch.slot, ending=True))
    have = {key_of(launch) for launch in wanted}
    for slot in node.slots:
        assigned = lasting.jobs.get(lasting.assigned.get(f"{node.label}/{slot}", ""))
        if assigned is not None:
            launch = Launch(job=assigned, slot=slot)
            if key_of(launch) not in have:
                wanted.append(launch)
    return wanted


def _succeeded(cluster: Cluster, job: Job) -> bool:
    result = jobs.result_of(cluster.lasting, job.name)
    return result is not None and result.submitted_at == job.submitted_at and result.state == "succeeded"


def key_of(each: NodeTask | Launch) -> tuple[str, float, str]:
    """Return what identifies an agent that a daemon runs, or is to run."""
    return each.job.name, each.job.submitted_at, each.slot


def _changed(turn: Turn) -> None:
    turn.places_changed = True
    turn.save_lasting()
