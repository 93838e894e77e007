"""A worker dies while the others wait for it in a collective of `torch.distributed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]
SCRIPT = Path(__file__).with_name("collective.py")


def test_the_others_complete_it_and_ranks_are_right_in_every_epoch(tmp_path: Path) -> None:
    def exchanges() -> list[dict[str, Any]]:
        path = tmp_path / "exchanges"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    with Cluster(tmp_path, agents=3, nodes="1:3", script=SCRIPT) as cluster:
        cluster.watch((tmp_path / "killed").exists, "the kill", 240)
        cluster.watch(lambda: any(e["world"] == 3 for e in exchanges()[-3:]) and _whole(exchanges()), "a join", 240)
        (tmp_path / "finish").touch()
        cluster.wait_end()
        deaths = [death for death in cluster.events("worker_died") if death["cause"] == "signal"]
        assert len(deaths) == 1, "nobody else has failed"
    lines = exchanges()
    interrupted = [line for line in lines if line["world"] == 3 and line["now"] == 2]
    assert len(interrupted) == 2, "both survivors have completed the exchange"
    for line in lines:
        assert line["votes"][0] == line["now"]
    for line in interrupted:
        assert line["votes"][1] == 2.0, "the ranks in the epoch in which each called it were 0 and 2"
    # The dead worker has exchanged only if a smaller world came first.
    assert len({line["pid"] for line in lines if line["world"] == 3}) == 3, "two survivors and a successor"


def _whole(lines: list[dict[str, Any]]) -> bool:
    """Whether a world of three, with the dead worker's successor, has exchanged."""
    return len({line["pid"] for line in lines if line["world"] == line["now"] == 3}) == 3 and len(lines) > 6
