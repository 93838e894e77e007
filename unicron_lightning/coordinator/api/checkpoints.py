"""The versions of a task's state that the coordinator knows, in memory and on disk, for ``unicron checkpoints``."""

from __future__ import annotations

from typing import Any

from unicron_lightning.coordinator.membership.memory import known, least_copies
from unicron_lightning.coordinator.state import Task


def versions_of(task: Task) -> list[dict[str, Any]]:
    """Describe the versions as plain JSON, newest first.

    Each has ``tier`` (memory or disk), ``step``, ``life``, ``state``, ``bytes`` and ``holders``. In memory, ``state``
    is ``complete``, ``usable`` (each part has a copy), ``incomplete`` or ``doubted``, and holders are the nodes with
    their parts. On disk it is ``reported``, ``bytes`` is None if the workers do not know it, the holder is the path.
    """
    found = []
    for version, parts in known(task).items():
        least = least_copies(version, parts)
        state = "complete" if least >= version.copies else "usable" if least else "incomplete"
        holders: dict[str, list[int]] = {}
        for part, copies in sorted(parts.items()):
            for agent, _ in copies:
                holders.setdefault(agent.node, []).append(part)
        found.append(
            {
                "tier": "memory",
                "step": version.step,
                "life": version.life,
                "state": state if version.epoch > task.memory.doubted else "doubted",
                "bytes": sum(copy.size for copies in parts.values() for _, copy in copies),
                "parts": version.parts,
                "holders": holders,
            }
        )
    for saved in task.checkpoints:
        found.append(
            {
                "tier": "disk",
                "step": saved.step,
                "life": saved.life,
                "state": "reported",
                "bytes": saved.bytes,
                "digest": saved.digest,
                "holders": {saved.path: []},
            }
        )
    return sorted(found, key=lambda each: (-each["step"], each["tier"] == "disk"))
