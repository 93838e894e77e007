"""The console of a task's user, through the death of rank 0: one line on each node, and always exactly one bar."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from unicron_lightning import LocalCluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
SCRIPT = Path(__file__).parent / "console_worker.py"
LOST = r"rank 0 on (node\d) exited \(signal 9\); 2 workers left; step \d+ continues"


def bars(folder: Path) -> list[dict[str, Any]]:
    """Return what the workers' bars have shown, oldest first."""
    lines = [line for path in folder.glob("bar-*.jsonl") for line in path.read_text().rpartition("\n")[0].splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda each: each["at"])


@pytest.mark.chaos
@pytest.mark.parametrize("bar", ["tqdm", "rich"])
def test_the_bar_and_one_line_survive_rank_0(bar: str, tmp_path: Path) -> None:
    with LocalCluster([SCRIPT, tmp_path, bar], nodes=3, nnodes="1:3", folder=tmp_path) as cluster:

        def full() -> dict[str, Any] | None:
            newest = {each["pid"]: each for each in bars(tmp_path)[-12:]}
            worlds = [each["world"] for each in newest.values()]
            return None if worlds.count(3) < 3 else next(each for each in newest.values() if each["rank"] == 0)

        first = cluster.until("three members", full)
        place = next(node for node in cluster.agents if first["pid"] in cluster.workers(node).values())
        cluster.kill_worker(place, number=signal.SIGKILL)
        others = [node for node in cluster.agents if node != place]
        for node in others:
            cluster.until(f"the line of {node}", lambda node=node: re.search(LOST, cluster.log(node)))
            cluster.until("its return", lambda node=node: f"{place} is back: 3 workers" in cluster.log(node))
        cluster.until("steps of the new world", lambda: (now := full()) is not None and now["pid"] != first["pid"])
        (tmp_path / "end").touch()
        assert set(cluster.wait_exit().values()) == {0}
        for node in others:
            text = cluster.log(node)
            assert len(re.findall(LOST, text)) == 1 and text.count(f"{place} is back") == 1
        assert sum(cluster.log(node).count("Seed set to") for node in cluster.agents) == 1
    shown = bars(tmp_path)
    assert all(each["shown"] == (each["rank"] == 0) for each in shown)
    after = [each for each in shown if each["shown"] and each["pid"] != first["pid"]]
    assert after and all(each["count"] == each["batch"] for each in after)
