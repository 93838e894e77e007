"""The slots of a node: the division of its accelerators among torchrun agents."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unicron_lightning.errors import ConfigError

_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RANGE: Final = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One slot.

    Attributes:
        label: its name on its node.
        devices: CUDA_VISIBLE_DEVICES of its processes; None: left unchanged.
    """

    label: str
    devices: str | None = None


def slots_of(text: str | None, devices: list[str]) -> list[Slot]:
    """Divide accelerators into slots.

    Args:
        text: None for one slot per accelerator (one in all if there is none); a number of slots, among which the
            accelerators are divided in order; or labels with commas between them. Labels that are a number or a range,
            as in ``0-3,4-7``, select the accelerators with these indices in ``devices``.
        devices: the accelerators, by their names for CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: not one of these, or more accelerators than the node has.
    """
    if text is None:
        text = str(len(devices) or 1)
    if text.isdecimal():
        return _equal(int(text), devices)
    labels = [label.strip() for label in text.split(",")]
    if not all(_LABEL.fullmatch(label) for label in labels) or len(set(labels)) < len(labels):
        raise ConfigError(
            f"--slots {text}: expected a number, or different labels of letters, digits, '.', '_' and '-'"
        )
    return [Slot(label=label, devices=_named(label, devices)) for label in labels]


def visible_devices(environment: Mapping[str, str] = os.environ, folder: Path = Path("/dev")) -> list[str]:
    """List the machine's accelerators that this process may use; none on a machine without NVIDIA's.

    They are found without CUDA, which would cost the daemon memory on each of them.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    numbers = (path.name.removeprefix("nvidia") for path in folder.glob("nvidia*"))
    return sorted((number for number in numbers if number.isdecimal()), key=int)


def _equal(number: int, devices: list[str]) -> list[Slot]:
    if number < 1 or len(devices) % number:
        count = f" that divides the number of accelerators, {len(devices)}" if devices else ""
        raise ConfigError(f"--slots {number}: expected a number >= 1{count}")
    each = len(devices) // number
    shares = [",".join(devices[place * each : (place + 1) * each]) for place in range(number)]
    return [Slot(label=str(place), devices=share or None) for place, share in enumerate(shares)]


def _named(label: str, devices: list[str]) -> str | None:
    found = _RANGE.fullmatch(label)
    first, last = (found.group(1), found.group(2)) if found else (label, label)
    if not devices or not (first.isdecimal() and last.isdecimal()):
        return None
    if not int(first) <= int(last) < len(devices):
        raise ConfigError(f"--slots {label}: expected accelerators of 0 to {len(devices) - 1}")
    return ",".join(devices[int(first) : int(last) + 1])
