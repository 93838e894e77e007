"""Lists of nodes that a cluster has already: Kubernetes', Slurm's, or this coordinator's."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from unicron_lightning.cli.plan.situation import NodeConfig
from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.placement import NodeState

KINDS: Final = "kubectl get nodes -o json, sinfo -N -h -o '%N %G %T', or unicron status --json"
_SLURM: Final[dict[str, NodeState]] = {
    **dict.fromkeys(("allocated", "completing", "idle", "mixed", "planned"), "ready"),
    **dict.fromkeys(("drained", "maint", "reboot", "reserved"), "cordoned"),
    "draining": "draining",
}
"""By sinfo's words without the signs behind them; others are failed."""
_GPUS: Final = re.compile(r"\bgpu(?::([^:,()]+))?:(\d+)")
"""Of Slurm's generic resources, as ``gpu:h100:8(S:0-1)`` or ``gpu:8``."""
_PRODUCTS: Final = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
"""Labels of Kubernetes' nodes with the kind of their accelerators."""


def nodes_in(text: str, source: str, island_label: str | None = None) -> dict[str, NodeConfig]:
    """Return the nodes of a list by name, without those that have no accelerator.

    Args:
        text: the output of one of `KINDS`. A coordinator does not know numbers of accelerators, so its nodes have
            the file's ``workers_per_node``.
        source: named in errors.
        island_label: the label of Kubernetes' nodes that names their island.

    Raises:
        ConfigError: it is of another kind, or no node has an accelerator.
    """
    try:
        answer = json.loads(text)
    except ValueError:
        found = _slurm(text)
    else:
        known: dict[str, Any] = answer if isinstance(answer, dict) else {}
        found = _kubernetes(known["items"], island_label) if "items" in known else _coordinator(known)
    usable = {name: node for name, node in found.items() if node.num_accelerators != 0}
    if not usable:
        raise ConfigError(f"--nodes {source}: {len(found)} nodes, none with an accelerator: expected {KINDS}")
    if island_label is not None and not any(node.island for node in usable.values()):
        raise ConfigError(f"--island-label {island_label}: expected a label of Kubernetes' nodes, and none has it")
    return usable


def _kubernetes(items: list[dict[str, Any]], island_label: str | None) -> dict[str, NodeConfig]:
    found = {}
    for item in items:
        status = item.get("status", {})
        number = sum(int(value) for name, value in status.get("allocatable", {}).items() if name.endswith("/gpu"))
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        state: NodeState = "cordoned" if item.get("spec", {}).get("unschedulable") else "ready"
        if conditions.get("Ready") != "True":
            state = "failed"
        labels = item["metadata"].get("labels", {})
        kind = next((labels[label] for label in _PRODUCTS if label in labels), None)
        island = labels.get(island_label, "")
        found[item["metadata"]["name"]] = NodeConfig(num_accelerators=number, state=state, kind=kind, island=island)
    return found


def _slurm(text: str) -> dict[str, NodeConfig]:
    """Read lines of name, generic resources and state; a node in several partitions has several."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        resources, _, word = rest.strip().rpartition(" ")
        state = "failed" if "*" in word else _SLURM.get(word.rstrip("*~#!%$@^-+"), "failed")
        gpus = _GPUS.findall(resources)
        kind = "+".join(sorted({kind for kind, _ in gpus if kind})) or None
        found[name] = NodeConfig(num_accelerators=sum(int(number) for _, number in gpus), state=state, kind=kind)
    return found


def _coordinator(answer: dict[str, Any]) -> dict[str, NodeConfig]:
    found = {name: NodeConfig(state="failed") for name in answer.get("lost", ())}
    for name, node in answer.get("nodes", {}).items():
        state: NodeState = "cordoned" if node["drained"] else "ready" if node["connected"] else "failed"
        found[name] = NodeConfig(state=state, kind=node.get("kind"))
    return found
