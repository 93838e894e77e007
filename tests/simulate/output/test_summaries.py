"""Rows, ratios, means over seeds, and the tables made of them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from pyarrow import parquet
from rich.console import Console
from simulate.scenes import CLUSTER, costs, random_trace, two_tasks

from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.__main__ import variant_of
from unicron_lightning.simulate.output import (
    SummaryRow,
    WafCurve,
    as_markdown,
    as_table,
    curves_picture,
    median_of,
    num_jobs,
    read_curves,
    save_result,
    save_table,
    summary,
    with_ratio,
)
from unicron_lightning.simulate.settings import simulate


def row(policy: str, seed: int, waf: float, variant: str = "") -> SummaryRow:
    numbers = {f"lost_{loss}": 0.1 for loss in ("detection", "transition", "sub_healthy", "overhead")}
    return {
        "policy": policy,
        "trace": "b",
        "workload": "six",
        "variant": variant,
        "seed": seed,
        "waf": waf,
        **numbers,
        "of_ideal": waf / 10,
        "ettr": 0.9,
        "detection_seconds": 3.0,
        "transition_seconds": 300.0,
        "incidents": 4,
    }


def test_ratios_are_of_the_same_situation_and_seed() -> None:
    rows = [row("unicron", 0, 8.0), row("megatron", 0, 4.0), row("unicron", 1, 9.0), row("megatron", 1, 3.0)]
    other = [
        row("unicron", 0, 6.0, "costs.x=1"),
        row("unicron", 0, 5.0, "costs.x=2"),
        row("megatron", 0, 2.0, "costs.x=2"),
    ]
    ratios = [each.get("ratio") for each in with_ratio([*rows, *other], "megatron")]
    assert ratios == [2.0, 1.0, 3.0, 1.0, 1.5, 2.5, 1.0]
    assert "ratio" not in with_ratio([row("unicron", 0, 8.0)], "megatron")[0]


def test_means_are_over_seeds() -> None:
    means = summary(
        with_ratio([row(p, s, w) for s, w in ((0, 4.0), (1, 5.0)) for p in ("megatron", "unicron")], "megatron")
    )
    assert [(each["policy"], each["seeds"], each["waf"]) for each in means] == [
        ("megatron", 2, 4.5),
        ("unicron", 2, 4.5),
    ]
    assert (means[0]["of_ideal_least"], means[0]["of_ideal_most"]) == (0.4, 0.5)
    text = as_markdown(means)
    assert text.splitlines()[0].startswith("| trace | policy | WAF % | ratio |")
    assert "| b | unicron | 45.0 [40.0-50.0] | 1.00 |" in text
    assert "5.0 min" in text


def test_tables_are_the_same_in_both_formats(tmp_path: Path) -> None:
    rows = [row("unicron", 0, 8.0), {**row("megatron", 0, 4.0), "ratio": 1.0}]
    text = save_table(tmp_path / "x", rows, "csv")
    table = parquet.read_table(save_table(tmp_path / "x", rows, "parquet")).to_pylist()
    with text.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [each["policy"] for each in read] == [each["policy"] for each in table] == ["unicron", "megatron"]
    assert [float(each["waf"]) for each in read] == [each["waf"] for each in table] == [8.0, 4.0]
    assert (read[0]["ratio"], table[0]["ratio"], table[1]["ratio"]) == ("", None, 1.0)


@pytest.mark.parametrize(
    ("overrides", "variant"),
    [
        (["policy=unicron", "trace=b", "seed=3", "workload=six", "output.format=parquet"], ""),
        (["trace=b", "trace.days=3", "+costs.x=1"], "+costs.x=1 trace.days=3"),
        (["cluster.num_nodes=4", "experiment=llama3"], "cluster.num_nodes=4"),
    ],
)
def test_the_variant_is_what_else_was_overridden(overrides: list[str], variant: str) -> None:
    assert variant_of(overrides) == variant


def test_jobs_of_a_sweep_are_counted() -> None:
    def jobs(*overrides: str, **params: str) -> int:
        return num_jobs(OmegaConf.create({"sweeper": {"params": params}, "overrides": {"task": list(overrides)}}))

    assert jobs("policy=a,b,c", "trace=a,b", "seed=range(5)", "output.format=csv") == 30
    assert jobs("policy=a") == 1
    assert jobs("policy=a,b", policy="a,b,c", seed="range(5)") == 10, "the command line precedes the experiment"
    assert num_jobs(OmegaConf.create({"sweeper": {}, "overrides": {"task": ["seed=1,2"]}})) == 2


def test_further_columns_are_shown_by_name(tmp_path: Path) -> None:
    rows = [{**row("unicron", 0, 8.0), "workers": 64, "flops_per_second": 6.4e15}]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(as_table(rows, "title", ["workers", "TFLOP/s per worker", "samples/s"]))
    text = console.export_text()
    assert "TFLOP/s per worker" in text and "100.0" in text and "samples/s" not in text
    with pytest.raises(ConfigError, match=r"output.columns=\['luck'\]: expected some of workers, samples/s, "):
        as_table(rows, "title", ["luck"])


def test_pictures_show_the_median_seed() -> None:
    curves = [
        WafCurve(row=row("unicron", seed, waf), seconds=None, waf=None) for seed, waf in enumerate((3.0, 9.0, 5.0))
    ]  # type: ignore[arg-type]
    assert median_of(curves).row["seed"] == 2


def test_a_picture_of_several_seeds_has_a_band(tmp_path: Path) -> None:
    def curve(seed: int, waf: float) -> WafCurve:
        times, values = np.array([0.0, 3600.0]), np.array([waf, 2 * waf])
        return WafCurve(row={**row("unicron", seed, waf), "days": 1.0, "ideal": 1e6}, seconds=times, waf=values)

    pictures = {}
    for number in (1, 3):
        path = tmp_path / f"{number}.png"
        curves_picture(path, [curve(seed, waf) for seed, waf in enumerate((5.0, 1.0, 9.0)[:number])])
        pictures[number] = path.read_bytes()
    assert pictures[1] != pictures[3]


def test_a_result_whose_writing_is_interrupted_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = simulate("megatron", CLUSTER, two_tasks(), random_trace(1), costs())
    save_result(tmp_path / "0", result, row("megatron", 0, 8.0), "csv")

    def interrupted(path: Path, text: str, encoding: str) -> None:
        with path.open("w", encoding=encoding) as file:
            file.write(text[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_result(tmp_path / "1", result, row("megatron", 1, 8.0), "csv")
    (curve,) = read_curves(tmp_path)
    assert curve.row["seed"] == 0
