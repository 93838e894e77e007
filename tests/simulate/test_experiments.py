"""Experiments: figures moved to their limits have the intended effect, and the document is written with its
pictures.
"""

from __future__ import annotations

from pathlib import Path

import document as experiments
import pytest
from experiment_cases import at_our_worst, at_their_best, cases_of, composed, for_nothing, run, swings
from experiment_pictures import sweep_picture, tornado_picture
from PIL import Image

SHORT = ("trace=b_quick", "trace.days=0.5")


def waf(policy: str, moves: tuple[tuple[str, float], ...]) -> float:
    (case,) = cases_of((policy,), 1, *SHORT, moves=moves)
    return float(run(case).row["of_ideal"])


def test_ours_for_nothing_is_better_and_at_its_worst_is_worse() -> None:
    costs = composed(SHORT).costs
    assert waf("unicron", for_nothing(costs)) > waf("unicron", ()) > waf("unicron", at_our_worst(costs))


@pytest.mark.parametrize("policy", ["megatron", "varuna", "torchft"])
def test_others_at_their_best_are_better_and_ours_is_as_it_was(policy: str) -> None:
    best = at_their_best(composed(SHORT).costs)
    assert waf(policy, best) > waf(policy, ())
    assert waf("unicron", best) == waf("unicron", ())


def test_every_guess_is_swung() -> None:
    costs = composed(SHORT).costs
    swung = {key for key, _, _ in swings(costs)}
    assert {key for key, figure in costs.figures() if figure.origin == "guess"} <= swung


def test_names_of_policies_and_sections_hold() -> None:
    from unicron_lightning.simulate.settings import POLICIES

    static = {"unicron_equal", "unicron_by_weight", "unicron_by_size"}  # those of experiment=figure10
    assert {*experiments.ALL, *experiments.ABLATIONS, *static} == set(POLICIES)
    names = [each.name for each in experiments.EXPERIMENTS]
    assert len(set(names)) == len(names)


def test_the_document_has_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = experiments.Experiment(
        name="small",
        title="Small",
        text="Half a day.",
        cases=lambda seeds: cases_of(("unicron", "megatron"), seeds, *SHORT),
        show=experiments.table,
    )
    monkeypatch.setattr(experiments, "EXPERIMENTS", (small,))
    experiments.main(["--folder", str(tmp_path), "--seeds", "1", "--processes", "1"])
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("# Results of the simulator\n")
    assert "## Small\n\nHalf a day.\n\n| trace | policy | WAF % | ratio |" in text
    assert "| b_quick | megatron |" in text


def test_the_verdict_compares_with_the_best_of_each_sort() -> None:
    restarting = {"megatron": 0.4, "varuna": 0.5, "inprocess": 0.45}
    waf = {"unicron": 0.8, "oobleck": 0.6, "bamboo": 0.3, "torchft": 0.7, **restarting}
    rows = [{"policy": name, "trace": "b", "variant": "", "of_ideal": value} for name, value in waf.items()]
    rows.append({"policy": "unicron", "trace": "b", "variant": experiments.FREE, "of_ideal": 0.9})
    text = experiments.verdict(rows, "b")
    assert "2.00 times that of megatron" in text
    assert "1.60 times that of varuna" in text
    assert "1.14 times that of torchft" in text
    assert text.endswith("it would be 2.25, 1.80 and 1.29 times.")


def test_pictures_of_sweeps(tmp_path: Path) -> None:
    rows = [
        {"policy": policy, "variant": variant, "ettr": 0.9}
        for policy in ("unicron", "megatron")
        for variant in ("small", "large")
    ]
    sweep_picture(tmp_path / "sweep.png", rows, {"small": 8, "large": 800}, "GPUs", "ettr", "ETTR")
    tornado_picture(tmp_path / "tornado.png", "title", 2.0, {"a": (1.5, 2.5), "b": (1.9, 2.0)}, "ratio")
    for path in sorted(tmp_path.iterdir()):
        with Image.open(path) as picture:
            assert min(picture.size) > 200
