"""Lists of nodes of Kubernetes, Slurm and the coordinator, as the planner's cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unicron_lightning.cli.plan.inventory import nodes_in
from unicron_lightning.errors import ConfigError

# sinfo 22.05 prints such lines; signs behind a state: * no answer, ~ without power, $ in a maintenance window.
SINFO = """\
cpu1 (null) idle
gpu1 gpu:h100:8 mixed
gpu1 gpu:h100:8 mixed
gpu2 gpu:h100:8(S:0-1) drained
gpu3 gpu:4,shard:16 draining
gpu4 gpu:a100:4,gpu:h100:2 idle*
gpu5 gpu:h100:8 idle~
gpu6 gpu:h100:8 unknown
gpu7 gpu:h100:8 maint$
"""


def kinds(text: str) -> dict[str, str | None]:
    return {name: node.kind for name, node in nodes_in(text, "x").items()}


def kubernetes(*nodes: tuple[str, dict[str, str], str, bool]) -> str:
    def item(name: str, resources: dict[str, str], ready: str, cordoned: bool) -> dict[str, Any]:
        conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]
        spec = {"unschedulable": True} if cordoned else {}
        status = {"allocatable": resources, "conditions": conditions}
        return {"kind": "Node", "metadata": {"name": name}, "spec": spec, "status": status}

    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [item(*node) for node in nodes]})


def states(text: str) -> dict[str, tuple[int | None, str]]:
    return {name: (node.num_accelerators, node.state) for name, node in nodes_in(text, "x").items()}


def test_slurm() -> None:
    assert states(SINFO) == {
        "gpu1": (8, "ready"),
        "gpu2": (8, "cordoned"),
        "gpu3": (4, "draining"),
        "gpu4": (6, "failed"),
        "gpu5": (8, "ready"),
        "gpu6": (8, "failed"),
        "gpu7": (8, "cordoned"),
    }


def test_kinds() -> None:
    assert kinds(SINFO) == {
        **dict.fromkeys(("gpu1", "gpu2", "gpu5", "gpu6", "gpu7"), "h100"),
        "gpu3": None,
        "gpu4": "a100+h100",
    }
    listed = json.loads(kubernetes(*((name, {"nvidia.com/gpu": "8"}, "True", False) for name in "abc")))
    for item, label in zip(
        listed["items"], ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator"), strict=False
    ):
        item["metadata"]["labels"] = {"zone": "z", label: f"NVIDIA-{item['metadata']['name']}"}
    assert kinds(json.dumps(listed)) == {"a": "NVIDIA-a", "b": "NVIDIA-b", "c": None}


def test_islands() -> None:
    listed = json.loads(kubernetes(*((name, {"nvidia.com/gpu": "8"}, "True", False) for name in "ab")))
    listed["items"][0]["metadata"]["labels"] = {"topology.kubernetes.io/rack": "r7"}
    nodes = nodes_in(json.dumps(listed), "x", "topology.kubernetes.io/rack")
    assert {name: node.island for name, node in nodes.items()} == {"a": "r7", "b": ""}
    for text, label in ((json.dumps(listed), "rack"), (SINFO, "topology.kubernetes.io/rack")):
        with pytest.raises(
            ConfigError, match=rf"--island-label {label}: expected a label of Kubernetes' nodes, and none"
        ):
            nodes_in(text, "x", label)


def test_kubernetes() -> None:
    text = kubernetes(
        ("a", {"nvidia.com/gpu": "8", "cpu": "96"}, "True", False),
        ("b", {"amd.com/gpu": "4"}, "True", True),
        ("c", {"nvidia.com/gpu": "8"}, "Unknown", True),
        ("control-plane", {"cpu": "4"}, "True", False),
    )
    assert states(text) == {"a": (8, "ready"), "b": (4, "cordoned"), "c": (8, "failed")}


def test_a_coordinator() -> None:
    nodes = {
        "n1": {"connected": True, "drained": False},
        "n2": {"connected": True, "drained": True},
        "n3": {"connected": False, "drained": False},
    }
    found = states(json.dumps({"nodes": nodes, "lost": {"n4": 1.0}}))
    assert found == {"n1": (None, "ready"), "n2": (None, "cordoned"), "n3": (None, "failed"), "n4": (None, "failed")}


@pytest.mark.parametrize("text", ["", "[]", "{}", "some words of another command", "cpu1 (null) idle\n"])
def test_other_texts(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--nodes list\.json: \d+ nodes, none with an accelerator: expected kubectl"):
        nodes_in(text, "list.json")
