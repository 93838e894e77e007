"""Rows of streams, of one batch as in evaluations and of several as in predictions of a sharded model: each batch once,
whatever replicas find the ends.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from data.test_stream_batches import batches_of
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.data.passes import RowPart
from unicron_lightning.data.streams import ENDS, StreamChanged

Row = tuple[int, int]


class Cut(Exception):
    """A partner has left."""


class Replica:
    """The exchange of a replica's workers; one of them runs at a time."""

    def __init__(self, size: int, condition: threading.Condition) -> None:
        self.condition = condition
        self.words: list[list[int | None]] = []
        self.cut = False
        self._size = size

    def exchange(self, shard: int, rows: list[int], word: int) -> list[int]:
        """Exchange a worker's word about its next row."""
        rows[0] += 1
        while len(self.words) < rows[0]:
            self.words.append([None] * self._size)
        words = self.words[rows[0] - 1]
        words[shard] = word
        self.condition.notify_all()
        while None in words:
            if self.cut:
                raise Cut
            assert self.condition.wait(10), "the shards disagree on the number of rows"
        return [each for each in words if each is not None]

    def leave(self) -> None:
        self.cut = True
        self.condition.notify_all()


@dataclass
class Worker:
    """A worker, with what it has predicted as (stream, number) and what it has computed for its partners."""

    shard: int
    finished: set[int] = field(default_factory=set)
    samples: list[Row] = field(default_factory=list)
    stand_ins: list[Row] = field(default_factory=list)
    error: StreamChanged | None = None

    def run(self, replica: Replica, batches: Any, stop: int | None) -> None:
        """Run its rows, or the first ones of them."""
        done = 0
        with replica.condition:
            try:
                for number, counts in batches.rows():
                    if done == stop:
                        break
                    done += 1
                    if counts:
                        self.samples.append(tuple(batches.get(number).tolist()))
                        self.finished.add(number)
                    else:
                        self.stand_ins.append(tuple(batches.stand_in(number).tolist()))
                batches.end()
            except Cut:
                pass
            except StreamChanged as error:
                self.error = error
            finally:
                replica.leave()


def run(
    workers: list[Worker], lengths: list[int], size: int, most: float, known: frozenset[int], stops: list[int | None]
) -> None:
    """Run an attempt of all workers; those beyond the complete replicas are spares."""
    of_shard: dict[int, list[tuple[Worker, int | None]]] = defaultdict(list)
    for worker, stop in zip(workers, stops, strict=True):
        of_shard[worker.shard].append((worker, stop))
    replicas = min(len(of_shard[shard]) for shard in range(size))
    condition, threads = threading.Condition(), []
    for place in range(replicas):
        replica = Replica(size, condition)
        for shard in range(size):
            worker, stop = of_shard[shard][place]
            batches, exchanged = batches_of(lengths, most), [0]

            def exchange(
                word: int, replica: Replica = replica, shard: int = shard, exchanged: list[int] = exchanged
            ) -> list[int]:
                return replica.exchange(shard, exchanged, word)

            batches.part = RowPart(size=size, shard=shard, exchange=exchange)
            batches.plan(known, place, replicas, worker.finished)
            threads.append(threading.Thread(target=worker.run, args=(replica, batches, stop)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error


@given(st.data())
@settings(deadline=None, max_examples=120)
def test_each_batch_is_predicted_once_through_failures(data: st.DataObject) -> None:
    """The worker that dies loses all it has predicted; its partners stop before or in its row."""
    size = data.draw(st.integers(1, 3))
    replicas = data.draw(st.integers(1, 6 // size))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=size * 3))
    limit = data.draw(st.sampled_from([math.inf, 0, 1, 3]))
    workers = [Worker(shard) for _ in range(replicas) for shard in range(size)]
    known: frozenset[int] = frozenset()
    while True:
        numbers = [sum(worker.shard == shard for worker in workers) for shard in range(size)]
        mortal = [worker for worker in workers if numbers[worker.shard] > 1]
        if not mortal or data.draw(st.booleans()):
            break
        stops = [data.draw(st.none() | st.integers(0, 7)) for _ in workers]
        run(workers, lengths, size, limit, known, stops)
        workers.remove(data.draw(st.sampled_from(mortal)))
        known = frozenset[int]().union(*(worker.finished for worker in workers))
    run(workers, lengths, size, limit, known, [None for _ in workers])
    expected = [(stream, n) for stream, length in enumerate(lengths) for n in range(int(min(length, limit)))]
    assert sorted(sample for worker in workers for sample in worker.samples) == expected
    assert all(number == 0 for worker in workers for _, number in worker.stand_ins)


def test_a_worker_reads_its_devices_stream_and_computes_stand_ins_after_its_end() -> None:
    workers = [Worker(shard) for _ in range(2) for shard in range(2)]
    run(workers, [3, 1, 0, 2], 2, math.inf, frozenset(), [None] * 4)
    assert [worker.samples for worker in workers] == [[(0, 0), (0, 1), (0, 2)], [(1, 0)], [], [(3, 0), (3, 1)]]
    assert [worker.stand_ins for worker in workers] == [[], [(0, 0)] * 2, [(3, 0)] * 2, []]
    ends = [ENDS + length * 4 + stream for stream, length in enumerate([3, 1, 0, 2])]
    assert [sorted(worker.finished)[-1] for worker in workers] == ends


def test_a_dead_workers_batches_are_predicted_without_those_of_its_partner() -> None:
    survivor = Worker(0, {0, 2, 4, ENDS + 3 * 2})
    other = Worker(1)
    run([survivor, other], [3, 2], 2, math.inf, frozenset(survivor.finished), [None, None])
    assert other.samples == [(1, 0), (1, 1)] and survivor.stand_ins == [(1, 0)] * 2 and not survivor.samples


def test_replicas_share_the_rows_of_a_group() -> None:
    workers = [Worker(shard) for _ in range(2) for shard in range(2)]
    run(workers, [5, 4], 2, math.inf, frozenset(), [None] * 4)
    assert [worker.samples for worker in workers[::2]] == [[(0, 0), (0, 2), (0, 4)], [(0, 1), (0, 3)]]
    assert [worker.samples for worker in workers[1::2]] == [[(1, 0), (1, 2)], [(1, 1), (1, 3)]]


def test_replicas_that_share_a_group_may_learn_of_an_end_in_different_rows() -> None:
    """Row 2 is needed for the second stream, until its end is known."""
    workers = [Worker(shard) for _ in range(2) for shard in range(2)]
    run(workers, [7, 1], 2, math.inf, frozenset({4}), [None] * 4)
    assert [worker.samples for worker in workers[::2]] == [[(0, 0), (0, 4), (0, 6)], [(0, 1), (0, 3), (0, 5)]]
    assert [worker.samples for worker in workers[1::2]] == [[(1, 0)], []]


def test_a_spare_has_no_rows() -> None:
    assert not batches_of([3, 3]).plan(frozenset(), None, 1, set())


def test_a_stream_that_has_become_shorter_is_noticed() -> None:
    with pytest.raises(StreamChanged, match="stream 1 of 2 ends after 2 batches, but batch 2 existed"):
        run([Worker(0), Worker(1)], [4, 2], 2, math.inf, frozenset({1, 3, 5}), [None, None])
