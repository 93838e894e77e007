"""Workers that are alive without progress are found by comparing ranks, reported with stacks, killed and replaced.

Slow workers are reported, and get smaller shares if configured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from system.cluster import Cluster, Note
from system.judge import Reference, check_exact
from system.test_other_faults import group

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


def test_workers_that_hang_are_named_killed_and_replaced(tmp_path: Path, reference: Reference) -> None:
    schedule = [
        group("hang rank=1 point=training_step", settled=12),
        group("hang gil rank=2 point=training_step", settled=16),
    ]
    with Cluster(tmp_path, schedule=schedule) as cluster:
        cluster.finish()
        hung = cluster.notes("fault")
        reports = cluster.events("error_reported")
        assert [report["kind"] for report in reports] == ["task_hang"] * 2, reports
        for line, report in zip(hung, reports, strict=True):
            print(f"hung; reported after {report['happened_at'] - line['at']:.2f} s: {report['cause']}")
            assert (report["rank"], report["node"]) == (line["rank"], line["node"])
            assert "injector.py" in report["details"]["stacks"], report
            assert (
                "unicron-control" in report["details"]["stacks"] or "control/thread.py" in report["details"]["stacks"]
            )
        assert reports[0]["phase"] == "compute"
        assert reports[0]["details"]["waiting"] in (1, 2), "one that waits is enough; the other's word may come later"
        deaths = cluster.events("worker_died")
        assert [death["cause"] for death in deaths] == ["reported"] * 2, "told once: the kill is no failure of its own"
        check_exact(tmp_path, reference, workers=3)


def test_frozen_processes_are_told_from_slow_ones_long_before_they_time_out(
    tmp_path: Path, reference: Reference
) -> None:
    schedule = [
        group("stop rank=0 micro_batch=0", settled=12),
        group("stop rank=1 bucket=1", settled=12),
        group("hang gil rank=2 point=training_step", settled=12),
    ]
    with Cluster(tmp_path, schedule=schedule, conf="worker_timeout=60") as cluster:
        cluster.finish()
        frozen, reports = cluster.notes("fault"), cluster.events("error_reported")
        assert [report["kind"] for report in reports] == ["task_hang"] * 3, reports
        for line, report, why in zip(frozen, reports, ("is stopped", "is stopped", "use no CPU"), strict=True):
            print(f"frozen; reported after {report['happened_at'] - line['at']:.2f} s: {report['cause']}")
            assert (report["rank"], why in report["cause"]) == (line["rank"], True), report
            assert report["happened_at"] - line["at"] < 20, "a third of the time-out, on any machine"
        assert [death["cause"] for death in cluster.events("worker_died")] == ["reported"] * 3
        check_exact(tmp_path, reference, workers=3)


def test_frozen_processes_are_found_in_validations_and_checkpoints(tmp_path: Path, reference: Reference) -> None:
    """A checkpoint that is merely slow raises no alarm."""
    schedule = [
        group("stop rank=1 point=validation_step", settled=12),
        group("stop rank=0 point=checkpoint_write", settled=12),
        group("hang rank=0 point=checkpoint_write for=4s", settled=12),
    ]
    with Cluster(tmp_path, schedule=schedule, conf="worker_timeout=60", settings={"keep": -1}) as cluster:
        cluster.finish()
        (*frozen, slow), reports = cluster.notes("fault"), cluster.events("error_reported")
        assert [report["kind"] for report in reports] == ["task_hang"] * 2, reports
        assert slow["kind"] == "hang"
        for line, report, phase in zip(frozen, reports, ("validation", "checkpoint"), strict=True):
            print(f"stopped; reported after {report['happened_at'] - line['at']:.2f} s: {report['cause']}")
            assert (report["rank"], report["phase"], "is stopped" in report["cause"]) == (line["rank"], phase, True)
            assert report["happened_at"] - line["at"] < 20, "a third of the time-out, on any machine"
        assert [death["cause"] for death in cluster.events("worker_died")] == ["reported"] * 2
        check_exact(tmp_path, reference, workers=3)


def test_a_slow_rank_is_shown_and_gets_fewer_micro_batches(tmp_path: Path, reference: Reference) -> None:
    schedule = [group("kill rank=0 micro_batch=0", settled=40)]
    settings = {"lag": {"n1": 0.08}, "pace": 0.02, "rebalance": True}
    with Cluster(tmp_path, schedule=schedule, settings=settings) as cluster:

        def relieved(after: float = 0.0) -> list[Note]:
            """Full steps of the complete world in which the slow rank had one of the six micro-batches."""
            full = [line for line in cluster.notes("step", world=3) if line["step"] % 10 != 9]
            return [line for line in full if line["node"] == "n1" and line["at"] > after and len(line["ids"]) == 1]

        cluster.watch(relieved, "fewer micro-batches for the slow rank", 90)
        cluster.watch(lambda: cluster.events("straggler"), "word of the straggler", 90)
        struck = cluster.watch(lambda: cluster.notes("fault"), "the fault", 90)[0]["at"]
        cluster.wait_world(3, after=struck)
        cluster.watch(lambda: relieved(struck), "fewer again in the world after", 90)
        assert {event["node"] for event in cluster.events("straggler")} == {"n1"}
        shares = [event["shares"] for event in cluster.events("worker.rebalanced")]
        print(f"shares {shares}, straggler {cluster.events('straggler')[0]['times']}x")
        assert all(sum(share) == 6 and min(share) >= 1 for share in shares)
        assert not cluster.events("error_reported"), "slow is no hang"
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


@pytest.mark.chaos
def test_a_slow_rank_gets_fewer_micro_batches_of_each_size_of_steps(
    tmp_path: Path, reference_for: Callable[..., Reference]
) -> None:
    """Steps have six micro-batches in two data epochs, nine in the next two, and so on."""
    rounds = {str(epoch): 2 + epoch // 2 % 2 for epoch in range(0, 60, 2)}
    settings = {"lag": {"n1": 0.08}, "pace": 0.02, "rebalance": True, "accumulation": 1, "rounds": rounds}
    schedule = [group("kill rank=0 micro_batch=0", settled=40)]
    with Cluster(tmp_path, schedule=schedule, settings=settings) as cluster:

        def relieved(after: float = 0.0) -> bool:
            """Whether the shares of both sizes have been changed."""
            events = cluster.events("worker.rebalanced")
            return {sum(event["shares"]) for event in events if event["at"] > after} == {6, 9}

        struck = cluster.watch(lambda: cluster.notes("fault"), "the fault", 90)[0]["at"]
        assert relieved(), "both sizes come before the death"
        cluster.wait_world(3, after=struck)
        cluster.watch(lambda: relieved(struck), "fewer again in the world after", 120)
        events = cluster.events("worker.rebalanced")
        print(f"shares {[event['shares'] for event in events]}")
        assert not cluster.events("error_reported"), "slow is no hang"
        cluster.finish()
        check_exact(tmp_path, reference_for(accumulation=1, rounds=rounds), workers=3)
