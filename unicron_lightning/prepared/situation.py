"""What a process has from the one that starts it, besides its command, environment and files.

A forked worker has it from the prepared process, an ordinary one from the agent. Both are equal as long as the agent's
has not changed since it started the prepared process. The signals that an agent ignores do change: torchelastic handles
some that its shell, or `nohup`, has had it ignore. A forked worker is told which.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_FROM_STATUS: Final = ("Umask", "SigBlk", "Groups", "NoNewPrivs")


def inherited() -> dict[str, object]:
    """Return what a process that this one's main thread starts inherits, by name."""
    status = _status()
    folder = Path().stat()
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {
        "working directory": (os.getcwd(), folder.st_dev, folder.st_ino),  # noqa: PTH109 - Path.cwd() is the same call
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
        **{name: status.get(name) for name in _FROM_STATUS},
    }


def ignored() -> list[int]:
    """Return the signals that this process ignores."""
    mask = int(_status()["SigIgn"][0], 16)
    return [number for number in range(1, mask.bit_length() + 1) if mask >> (number - 1) & 1]


def _status() -> dict[str, list[str]]:
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: text.split() for name, _, text in lines}


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that only one of both has."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
