"""A worker that differs is refused, with the differences; the others are not."""

from __future__ import annotations

import pytest

from unicron_lightning.worker.agreement import WorkersDiffer, accepted, check_agreement, digest

SAME = {"seed": "7", "optimizer": "SGD(lr=0.1)"}
OTHER = {"seed": "7", "optimizer": "SGD(lr=0.2)"}


def test_workers_that_agree_are_not_refused() -> None:
    check_agreement(SAME, [SAME, dict(SAME), SAME], node="n0")


def test_the_worker_that_differs_from_most_is_refused_with_both_values_and_its_node() -> None:
    said = [OTHER, SAME, SAME]
    check_agreement(SAME, said, node="n1")
    with pytest.raises(WorkersDiffer) as caught:
        check_agreement(OTHER, said, node="n0")
    message = str(caught.value)
    assert "node n0" in message and "optimizer is SGD(lr=0.2), expected SGD(lr=0.1)" in message
    assert "seed" not in message.partition(". All workers")[0]


def test_of_two_the_first_is_right() -> None:
    check_agreement(SAME, [SAME, OTHER], node="n0")
    with pytest.raises(WorkersDiffer, match=r"expected SGD\(lr=0.1\)"):
        check_agreement(OTHER, [SAME, OTHER], node="n1")


def test_what_is_missing_differs_and_long_values_are_shortened() -> None:
    check_agreement({**SAME, "more": "x" * 500}, [{**SAME, "more": "x" * 500}, SAME], node="n0")
    with pytest.raises(WorkersDiffer, match=r"more is missing, expected x{80}\.\.\."):
        check_agreement(SAME, [{**SAME, "more": "x" * 500}, SAME], node="n1")


@pytest.mark.parametrize("rates", [("0.01", "0.02"), ("0.001", "0.0001")])
@pytest.mark.parametrize("place", [0, 30, 70, 200])
def test_of_long_values_the_part_that_differs_is_shown(rates: tuple[str, str], place: int) -> None:
    one, two = (
        {"optimizer": f"AdamW({', '.join(['amsgrad=False'] * (place // 15))}, lr={rate}, {'eps=1e-08, ' * 20})"}
        for rate in rates
    )
    with pytest.raises(WorkersDiffer) as caught:
        check_agreement(two, [one, one, two], node="n2")
    shown, expected = str(caught.value).split("optimizer is ")[1].split(", expected ")
    assert f"lr={rates[1]}, eps" in shown and f"lr={rates[0]}, eps" in expected
    assert max(len(shown), len(expected.partition(". All workers")[0])) <= 86 + len("AdamW(")
    assert shown.startswith("AdamW(") and expected.startswith("AdamW(")


def test_each_item_has_a_majority_of_its_own() -> None:
    assert accepted([{"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {"a": "2", "b": "2"}]) == {"a": "1", "b": "2"}
    assert accepted([]) == {}


def test_a_digest_depends_on_order_and_values() -> None:
    assert digest([1, 2]) == digest([1, 2]) != digest([2, 1])
