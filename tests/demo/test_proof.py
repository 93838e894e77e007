"""The demo's conclusions from diaries and events."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from unicron_lightning.coordinator.incidents.facts import EpochPublished, WorkerDeath
from unicron_lightning.demo.cluster import draw_losses, longest_gap, loss_curve, prove_work, step_times
from unicron_lightning.demo.dataset import Windows
from unicron_lightning.demo.failures import moments

Line = dict[str, Any]


def micro_batch(pid: int, step: int, *samples: int) -> Line:
    return {"event": "micro_batch", "pid": pid, "step": step, "samples": list(samples), "at": 0.0}


def step(pid: int, number: int, at: float, loss: float = 1.0) -> Line:
    return {"event": "step", "pid": pid, "step": number, "at": at, "loss": loss, "world": 2}


def test_work_of_a_run_without_failures_is_exactly_what_was_needed() -> None:
    diary = [micro_batch(1, 0, 0, 1), micro_batch(2, 0, 2, 3), micro_batch(1, 1, 3, 2), micro_batch(2, 1, 1, 0)]
    proof = prove_work(diary, set(), steps_per_epoch=1)
    assert (proof.needed, proof.computed, proof.recomputed, proof.wasted) == (4, 4, 0, 0)
    assert (proof.lost_samples, proof.repeated_samples) == (0, 0)


def test_a_dead_workers_micro_batch_may_be_computed_again_and_a_survivors_may_not() -> None:
    diary = [micro_batch(1, 0, 0), micro_batch(2, 0, 1), micro_batch(1, 0, 1)]
    assert prove_work(diary, {2}, 1).wasted == 0
    assert prove_work(diary, set(), 1).wasted == 1
    assert prove_work(diary, {2}, 1).recomputed == 1
    read_later = [{**micro_batch(1, 0, 1), "at": 2.0}, {**micro_batch(2, 0, 1), "at": 1.0}]
    assert prove_work(read_later, {2}, 1).wasted == 0


@pytest.mark.parametrize(("last", "lost", "repeated"), [((1, 0), 0, 0), ((1, 1), 1, 1), ((1,), 1, 0)])
def test_lost_and_repeated_samples_are_counted_per_epoch(last: tuple[int, ...], lost: int, repeated: int) -> None:
    diary = [micro_batch(1, 0, 0, 1), micro_batch(1, 1, *last)]
    proof = prove_work(diary, set(), steps_per_epoch=1)
    assert (proof.lost_samples, proof.repeated_samples) == (lost, repeated)


def test_the_longest_gap_is_of_finished_steps_whoever_tells_of_them() -> None:
    diary = [step(1, 1, 10.0), step(2, 1, 10.2), step(1, 2, 11.0), step(2, 3, 14.0)]
    times = step_times(diary)
    assert times == [10.0, 11.0, 14.0]
    assert longest_gap(times, 10.5, 10.9) == 1.0
    assert longest_gap(times, 10.5, 12.0) == 3.0
    assert loss_curve(diary) == {1: 1.0, 2: 1.0, 3: 1.0}


def test_a_story_begins_with_the_kill_and_says_each_thing_once() -> None:
    recovered = {"step": 8, "world": 2, "recomputed": [1, 4], "at": 5.07}
    older, death = (
        WorkerDeath(worker=name, cause="signal", code=9, received_at=at) for name, at in (("old", 4.0), ("b/0#1", 5.02))
    )
    published = EpochPublished(number=2, kind="fail", hold=False, members=["a", "c"])
    events: list[Line] = [
        *({"at": fact.received_at, "name": fact.event, "fields": fact.entry} for fact in (older, death)),
        {"at": 5.03, "name": published.event, "fields": published.entry},
        {"at": 5.08, "name": "worker.recovered", "fields": recovered},
        {"at": 5.09, "name": "worker.recovered", "fields": recovered},
    ]
    story = moments(events, 5.0, 6.0)
    assert [(moment.what, round(moment.milliseconds)) for moment in story] == [
        ("detected", 20),
        ("epoch 2", 30),
        ("resumed", 70),
    ]
    assert story[2].detail == "step 8 finished by 2; taken over: micro-batches 1, 4"


def test_the_text_is_cut_into_windows_that_overlap_by_the_byte_to_predict() -> None:
    windows = Windows(0.0, 1.0, 16, 10)
    (first, text), (second, following) = windows[0], windows[1]
    assert (len(windows), first, second, len(text)) == (10, 0, 1, 17)
    assert text[-1] == following[0]


def test_the_picture_is_a_png_with_both_curves(tmp_path: Any) -> None:
    curve = {number: 5.0 / number for number in range(1, 30)}
    path = tmp_path / "loss.png"
    draw_losses(path, (curve, curve), dict.fromkeys(curve, 3), [(7, "SIGKILL")])
    with Image.open(path) as picture:
        assert picture.size[0] > 800
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
