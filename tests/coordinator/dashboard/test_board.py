"""The state that the page shows, of a fake cluster, and its changes; the page's files contain no way to markup."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from coordinator.driver import World, settle, started

from unicron_lightning.coordinator import dashboard
from unicron_lightning.coordinator.access import PAGES
from unicron_lightning.coordinator.api.dashboard import Board, entries


def found(world: World) -> dict[str, dict]:
    return entries(world.machine, lambda _: None, {"pid": 1})


def test_cells_show_the_states_of_agents():
    world, agents = started(3, nodes=(3, 3))
    spare = world.agent("z", nodes=(3, 3)).start()
    now = found(world)
    assert now["task/t"]["state"] == "running"
    assert [now[f"node/{agent.node}"]["cells"] for agent in agents] == [[["", "t", "running"]]] * 3
    assert now[f"node/{spare.node}"]["cells"] == [["", "t", "waiting"]]
    agents[1].die()
    now = found(world)
    assert now["task/t"]["state"] == "recovering"
    assert now["task/t"]["open"][0]["phase"] == "transition"
    assert now["task/t"]["workers"] == 2
    assert now[f"node/{agents[0].node}"]["cells"] == [["", "t", "recovering"]]
    assert now[f"node/{agents[1].node}"]["cells"] == [["", "t", "starting"]]
    settle(world)
    agents[0].drain()
    assert found(world)[f"node/{agents[0].node}"]["state"] == "drained"
    assert found(world)["cluster"]["drained"] == [agents[0].node]


def test_only_changes_are_sent():
    board = Board()
    assert board.update({"task/a": {"step": 1}, "node/n": {"x": 1}})
    assert json.loads(board.since(0)) == {"full": True, "set": {"task/a": {"step": 1}, "node/n": {"x": 1}}, "gone": []}
    assert not board.update({"task/a": {"step": 1}, "node/n": {"x": 1}})
    seen = board.version
    assert board.update({"task/a": {"step": 2}})
    assert json.loads(board.since(seen)) == {"full": False, "set": {"task/a": {"step": 2}}, "gone": ["node/n"]}
    assert json.loads(board.since(board.version)) == {"full": False, "set": {}, "gone": []}
    board.update({"task/a": {"step": 2}, "node/n": {}})
    assert json.loads(board.since(seen))["gone"] == []


def test_a_thousand_nodes_take_milliseconds():
    world, _ = started(4)
    task = world.task()
    template = next(iter(task.agents.values()))
    for number in range(1000):
        agent = msgspec.structs.replace(template, id=f"x{number}", node=f"n{number}", waiting=True)
        task.agents[agent.id] = agent
    board, began = Board(), time.process_time()
    board.update(found(world))
    assert time.process_time() - began < 0.5
    assert len(json.loads(board.since(0))["set"]) == 1006


@pytest.mark.parametrize("name", sorted(set(PAGES.values())))
def test_the_files_contain_no_way_to_markup_or_to_other_hosts(name):
    text = (Path(dashboard.__file__).parent / name).read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
    )
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    if name.endswith(".html"):
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! src=)", text)
