"""Orders to daemons while the store cannot be written.

A daemon forgets an agent that has ended once the agent is no longer in its orders. If the coordinator then ended before
it could write that the job is over, its successor would run the job again. Until the decision is written, removed
agents therefore stay in the orders as ``ending``: the daemon does not start them again, and continues to report their
ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unicron_lightning.jobs import problem
from unicron_lightning.wire.daemon import Launch, NodeRun, NodeTask


class NodeOrders:
    """The newest orders of each daemon's connection."""

    def __init__(self) -> None:
        self._sent: dict[int, list[Launch]] = {}
        self._held: dict[int, NodeRun] = {}

    def met(self, conn: int, tasks: Sequence[NodeTask]) -> None:
        """Record the agents that a daemon reports when it connects: an earlier connection's orders."""
        self._sent[conn] = [Launch(job=each.job, slot=each.slot) for each in tasks if problem(each.job) is None]

    def take(self, conn: int, order: NodeRun, *, durable: bool) -> NodeRun:
        """Return what is to be sent now in place of an order.

        Args:
            conn: number of the connection.
            order: the machine's.
            durable: whether all decisions are written.
        """
        self._held.pop(conn, None)
        if not durable:
            wanted = {(launch.job.name, launch.job.submitted_at, launch.slot) for launch in order.launches}
            gone = [
                Launch(job=launch.job, slot=launch.slot, ending=True)
                for launch in self._sent.get(conn, [])
                if (launch.job.name, launch.job.submitted_at, launch.slot) not in wanted
            ]
            if gone:
                self._held[conn] = order
                order = NodeRun(launches=[*order.launches, *gone])
        self._sent[conn] = order.launches
        return order

    def due(self) -> Iterator[tuple[int, NodeRun]]:
        """Iterate over the orders that were held back, after all decisions are written."""
        for conn, order in list(self._held.items()):
            yield conn, self.take(conn, order, durable=True)

    def forget(self, conn: int) -> None:
        """Handle the end of a connection."""
        self._sent.pop(conn, None)
        self._held.pop(conn, None)
