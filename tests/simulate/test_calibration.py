"""Figures with their origin: the shipped file's values, overrides, sums of common parts, and refusals."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from typing import Any

import pytest
import yaml
from experiment_cases import moved

from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.costs import Calibration, read_calibration
from unicron_lightning.simulate.settings import POLICIES, system_of


@pytest.fixture
def data() -> dict[str, Any]:
    text = resources.files("unicron_lightning.conf.simulate").joinpath("costs/gpu.yaml").read_text()
    return yaml.safe_load(text)


@pytest.fixture
def shipped(data: dict[str, Any]) -> Calibration:
    return read_calibration(data)


def test_every_policy_has_costs_with_origins(shipped: Calibration) -> None:
    for policy in POLICIES:
        assert shipped.of(system_of(policy)).detects("lost_connection") > 0
    origins = Counter(figure.origin for _, figure in shipped.figures())
    assert min(origins[origin] for origin in ("measured", "published", "code", "guess")) > 5
    assert origins["given"] == 0
    for key, figure in shipped.figures():
        assert len(figure.source) > 5, key


def test_common_parts_are_added_for_all_alike(shipped: Calibration) -> None:
    before, key = shipped, "common.communicator"
    after = moved(before, key, dict(before.figures())[key].value + 20)
    for system in ("unicron", "torchft", "inprocess"):
        assert after.of(system).takes("continue") == pytest.approx(before.of(system).takes("continue") + 20)
    assert after.of("megatron") == before.of("megatron")


def test_a_plain_number_takes_the_place_of_a_figure(data: dict[str, Any]) -> None:
    data["megatron"]["detection"]["default"] = 600
    data["unicron"]["checkpoint_interval"] = 60
    costs = read_calibration(data)
    assert costs.of("megatron").detects("cuda_error") == 600
    assert costs.of("unicron").checkpoint_interval == 60
    assert dict(costs.figures())["megatron.detection.default"].origin == "given"


def test_moving_every_figure_changes_its_system_and_no_other(shipped: Calibration) -> None:
    for key, figure in shipped.figures():
        system = key.partition(".")[0]
        changed = moved(shipped, key, figure.value * 0.9 + 0.0123)
        different = {name for name in shipped.systems if changed.of(name) != shipped.of(name)}
        assert different == {system} if system != "common" else different, key


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("unicron.detektion", {}, r"costs.unicron.detektion=\{\}: unknown key, expected one of detection"),
        ("unicron.detection.fire", 3, r"'unicron': detection of \['fire'\]"),
        ("unicron.change.jump", 3, r"'unicron': change \['jump'\]"),
        ("unicron.detection.default", -1, r"costs.unicron.detection.default: value=-1.0: expected a finite number"),
        ("unicron.detection.default", "fast", r"costs.unicron.detection.default='fast': expected a mapping"),
        ("unicron.detection.default", {"value": 3, "origin": "hope"}, r"origin='hope'"),
        ("unicron.detection.default", {"value": 3, "origin": "guess"}, r"without source"),
        (
            "unicron.detection.default",
            {"value": 3, "origin": "guess", "source": "x", "most": 2},
            r"expected least <= value <= most",
        ),
        (
            "unicron.change.join",
            {"value": 3, "origin": "given", "plus": ["luck"]},
            r"plus=\['luck'\]: expected some of",
        ),
        ("unicron", 3, r"costs.unicron=3: expected a mapping"),
    ],
)
def test_what_is_wrong_is_quoted(data: dict[str, Any], path: str, value: object, message: str) -> None:
    *parents, last = path.split(".")
    node = data
    for parent in parents:
        node = node[parent]
    node[last] = value
    with pytest.raises(ConfigError, match=message):
        read_calibration(data)


def test_what_is_not_there_is_named(shipped: Calibration) -> None:
    with pytest.raises(ConfigError, match=r"no costs of 'slurm': expected costs.slurm, or one of unicron, "):
        shipped.of("slurm")
    with pytest.raises(ConfigError, match=r"costs.unicron.nothing: no such figure"):
        moved(shipped, "unicron.nothing", 3)
