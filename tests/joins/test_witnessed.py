"""Wrong gradients of a node in a Lightning training: found before the commit, and no trace of the repetitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from joins.running import Site, results, site
from joins.witnessed import FIRST, STEPS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("witnessed"), "joins.witnessed") as made:
        yield made


@pytest.fixture(scope="module", params=["index", "stream", "manual"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def alone(kind: str, place: Site) -> dict[str, Any]:
    [found] = results(place.run(f"{kind}-none1", "joins.witnessed", workers=1, least=1))
    assert found["step"] == STEPS
    assert "one worker has no witness, so nothing is compared" in place.log(f"{kind}-none1")
    return found


@pytest.mark.parametrize("node", ["none", "1"])
def test_a_training_with_witnesses_ends_as_one_worker_does(
    kind: str, node: str, place: Site, alone: dict[str, Any]
) -> None:
    """Of three workers, none or one of which is wrong."""
    name = f"{kind}-{node}"
    found = results(place.run(name, "joins.witnessed", workers=3, least=3 if node == "none" else 2))
    assert len(found) == (3 if node == "none" else 2), place.log(name)
    for each in found:
        for key, value in alone["state"].items():
            torch.testing.assert_close(each["state"][key], value, rtol=1e-12, atol=1e-12)
        assert torch.equal(each["random"], alone["random"]) and each["step"] == STEPS
        for key, number in each["logged"].items():
            assert number == pytest.approx(alone["logged"][key], rel=1e-6), key
    events = [each["fields"] for each in place.cluster.events("error_reported") if each["task"] == f"joins-{name}"]
    suspects = [each["details"]["suspect"] for each in events if each["kind"] == "silent_data_corruption"]
    expected = [] if node == "none" else [(f"joins-{name}-1", FIRST)]
    assert [(each["node"], each["step"]) for each in suspects] == expected
