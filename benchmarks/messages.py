"""Count bytes of the coordinator's messages after a death among n members, by encoding the real messages.

    python benchmarks/messages.py [--members 4 100 1024 16384]

Each member has an agent of its own, four micro-batches and four buckets in the interrupted step. Counted are the epoch
as a difference, a worker's report, and the sum of the reports (`Go`) in three cases: survivors have finished
everything; each has finished one or two micro-batches; the model is spread over replicas of four workers.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import msgspec

from unicron_lightning import wire
from unicron_lightning.wire.epoch_changes import change_of
from unicron_lightning.wire.report_sums import summed

MICRO_BATCHES, BUCKETS, SHARDS = 4, 4, 4
STEP = 1000
CASES = ("whole", "partial", "spread")


def member(rank: int) -> wire.Member:
    """A member with names of usual length."""
    node = f"node{rank:04d}"
    return wire.Member(worker=f"{node}-1a2b3c4d/0#1", agent=f"{node}-1a2b3c4d", node=node, host=node, local_rank=0)


def epoch(number: int, members: list[wire.Member]) -> wire.Epoch:
    """An epoch of these members."""
    about: dict[str, Any] = {"hold": False, "incident": "i1", "published_at": 1764090000.123}
    store = wire.Address(host=members[0].host, port=41234)
    return wire.Epoch(number=number, kind="fail", members=members, store=store, key="0" * 32, **about)


def states(members: int, case: str) -> list[dict[str, Any]]:
    """Reports of the survivors of a death in the middle of the ranks."""
    chance, found = random.Random(0), []
    for rank in range(members):
        done = list(range(rank, MICRO_BATCHES * members, members))
        report: dict[str, Any] = {"finished": done, "reduced": list(range(BUCKETS))}
        if case == "partial":
            report = {"finished": done[: chance.choice((1, 2))], "reduced": []}
        state = {"position": 3 * STEP, "step": STEP, "has_state": True, "operation": "step", "report": report}
        if case == "spread":
            replica, replicas = rank // SHARDS, -(-members // SHARDS)
            calls = [list(range(replica, MICRO_BATCHES * replicas, replicas))]
            state["report"] = {"calls": calls, "began": 1}
        if rank != members // 2:
            found.append(state)
    return found


def count(members: int) -> list[int]:
    """Bytes: epoch, report, then `Go` and formerly each report, for each case."""
    everyone = [member(rank) for rank in range(members)]
    rest = [one for rank, one in enumerate(everyone) if rank != members // 2]
    change = change_of(epoch(1, everyone), epoch(2, rest))
    assert change is not None
    whole = states(members, "whole")
    report = wire.WorkerReady(worker=rest[-1].worker, epoch=2, state=whole[-1])
    sizes = [len(wire.encode(change)), len(wire.encode(report))]
    for case in CASES:
        told = states(members, case)
        every = {one.worker: state for one, state in zip(rest, told, strict=True)}
        sizes += [len(wire.encode(summed(2, told))), len(msgspec.json.encode(every))]
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 100, 1024, 16384])
    options = parser.parse_args()
    names = ["n", "epoch", "a report", *(f"{name}, {case}" for case in CASES for name in ("`Go`", "every report"))]
    print("| " + " | ".join(names) + " |")
    print("|---" * len(names) + "|")
    for members in options.members:
        print("| " + " | ".join(f"{size:,}" for size in [members, *count(members)]) + " |")


if __name__ == "__main__":
    main()
