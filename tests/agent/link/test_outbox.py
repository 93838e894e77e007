"""The agent's queue of messages: progress reports of a large cluster are thinned out, and nothing else is."""

from __future__ import annotations

from unicron_lightning import wire
from unicron_lightning.agent.coordinator_session import Outbox


def progress(step: int, worker: str = "a/0#1") -> wire.Progress:
    return wire.Progress(worker=worker, step=step, metrics={})


def taken(outbox: Outbox, now: float) -> list[wire.Message]:
    found = []
    while (message := outbox.take(now)) is not None:
        found.append(message)
    return found


def test_the_newest_progress_of_each_worker_is_sent_after_the_least_time():
    outbox = Outbox()
    outbox.opened()
    outbox.progress_seconds = 3.0
    sent: list[tuple[int, list[wire.Message]]] = []
    for second in range(8):
        outbox.put(progress(second))
        outbox.put(progress(100 + second, "a/1#1"))
        sent.append((second, taken(outbox, float(second))))
    assert [(second, messages) for second, messages in sent if messages] == [
        (second, [progress(second), progress(100 + second, "a/1#1")]) for second in (0, 3, 6)
    ]


def test_a_report_is_preceded_by_the_workers_newest_progress():
    outbox = Outbox()
    outbox.opened()
    outbox.progress_seconds = 60.0
    outbox.put(progress(1))
    assert taken(outbox, 0.0) == [progress(1)]
    event = wire.WorkerEvent(worker="a/0#1", name="recovered", at=1.0, fields={})
    for message in (progress(2), progress(7, "a/1#1"), progress(3), event):
        outbox.put(message)
    assert taken(outbox, 1.0) == [progress(3), event], "the other worker's is held"


def test_progress_does_not_outlive_its_connection():
    outbox = Outbox()
    outbox.put(progress(1))
    assert taken(outbox, 0.0) == []
    outbox.opened()
    outbox.progress_seconds = 60.0
    for step in (2, 3):
        outbox.put(progress(step))
        taken(outbox, 0.0)
    outbox.closed(1.0)
    outbox.opened()
    assert taken(outbox, 100.0) == []
