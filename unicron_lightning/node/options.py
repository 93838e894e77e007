"""The options of ``unicron agent``, validated."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unicron_lightning.agent.options import endpoint_of, leave_signal, parse_endpoints
from unicron_lightning.credentials import is_loopback
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import make_private, open_private, user_path
from unicron_lightning.tls import Access, AccessOptions

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


_MEGABYTE: Final = 1 << 20
_LOG_FOLDERS: Final = "log-folders"
"""File of the user's folder with a path a line."""


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of a daemon; times in seconds.

    Attributes:
        endpoint: ``HOST:PORT`` of the coordinator, or of each, separated by commas.
        node: label of the node.
        slots: division of its accelerators.
        logs: folder for the tasks' logs.
        log_bytes: size at which a log file is rotated.
        log_files: full log files kept of each stream.
        access: to the coordinator.
        for_torchrun: the user's options for it, as keys of ``--rdzv-conf`` for the torchrun agents; paths are absolute.
            Without a ``token_file`` they get the token in a file of the daemon's.
        local_addr: this machine's address for other nodes' workers; None: detected.
        stop_seconds: time for torchrun to stop before all its processes are killed.
        leave_signal: signal that ends the daemon as SIGTERM does.
        notice_file: file whose appearance ends it as SIGTERM does.
        rack: label of what the node shares with others and can be lost with.
        kind: of its accelerators, if the cluster has several; then only jobs of that kind run on it.
    """

    endpoint: str
    node: str
    slots: tuple[Slot, ...]
    logs: Path
    log_bytes: int
    log_files: int
    access: Access
    for_torchrun: Mapping[str, str]
    local_addr: str | None
    stop_seconds: float
    leave_signal: signal.Signals | None = None
    notice_file: Path | None = None
    rack: str | None = None
    kind: str | None = None

    @property
    def url(self) -> str:
        """URL of the daemon's session."""
        return f"{self.access.trust.scheme}://{self.endpoint}/v1/node"


def make_options(
    *,
    endpoint: str,
    node: str | None,
    slots: str | None,
    logs: str | None,
    log_megabytes: float,
    log_files: int,
    access: AccessOptions,
    local_addr: str | None,
    stop_seconds: float,
    leave_on: str | None,
    notice_file: str | None,
    rack: str | None,
    kind: str | None,
) -> NodeOptions:
    """Check the options.

    Raises:
        ConfigError: one of them is wrong, or there is no token.
    """
    places = parse_endpoints(endpoint)
    host = places[0][0]
    label = node or socket.gethostname()
    if not _LABEL.fullmatch(label):
        raise ConfigError(f"--node {label}: expected letters, digits, '.', '_' and '-'")
    for option, word in (("--rack", rack), ("--kind", kind)):
        if word is not None and not _LABEL.fullmatch(word):
            raise ConfigError(f"{option} {word}: expected letters, digits, '.', '_' and '-'")
    if not log_megabytes > 0 or log_files < 0 or not stop_seconds > 0:
        sizes = f"--log-size {log_megabytes} --log-files {log_files} --stop-seconds {stop_seconds}"
        raise ConfigError(f"{sizes}: expected sizes and times > 0, and a number of files >= 0")
    own = access.access(host, "--token-file ", "--tls ")
    given = (("--token-file", access.token_file), ("--tls", access.tls), ("--tls-client", access.tls_client))
    for option, path in given:
        if path is not None and ("," in path or "=" in path):
            raise ConfigError(f"{option} {path}: expected a path without ',' and '='")
    return NodeOptions(
        endpoint=",".join(endpoint_of(*place) for place in places),
        node=label,
        slots=tuple(slots_of(slots, visible_devices())),
        logs=Path(logs).absolute() if logs else default_logs(),
        log_bytes=int(log_megabytes * _MEGABYTE),
        log_files=log_files,
        access=own,
        for_torchrun=_for_torchrun(own, access),
        local_addr=None if is_loopback(host) else local_addr,
        stop_seconds=stop_seconds,
        leave_signal=leave_signal(leave_on, "--leave-signal "),
        notice_file=Path(notice_file).absolute() if notice_file else None,
        rack=rack,
        kind=kind,
    )


def _for_torchrun(access: Access, given: AccessOptions) -> dict[str, str]:
    trust, conf = access.trust, {}
    if given.token_file:
        conf["token_file"] = str(Path(given.token_file).absolute())
    if given.tls is not None:
        conf["tls"] = given.tls if trust.ca is None else str(trust.ca)
    if trust.client is not None:
        conf["tls_client"] = str(trust.client)
    return {**conf, **{name: "true" for name in ("forwarded", "plaintext") if getattr(given, name)}}


def default_logs() -> Path:
    """Return the default folder of logs."""
    return user_path() / "logs"


def remember_logs(logs: Path) -> None:
    """Record that a daemon of this user writes its logs into this folder, for `known_logs`."""
    if logs not in known_logs():
        with open(make_private(user_path()) / _LOG_FOLDERS, "a", encoding="utf-8", opener=open_private) as file:
            file.write(f"{logs}\n")


def known_logs() -> list[Path]:
    """Return the folders into which this user's daemons on this machine have written logs, the default one first."""
    try:
        with open(user_path() / _LOG_FOLDERS, encoding="utf-8", opener=open_private) as file:
            recorded = [Path(line) for line in file.read().splitlines()]
    except (OSError, UnicodeDecodeError):
        recorded = []
    return [default_logs(), *(path for path in dict.fromkeys(recorded) if path.is_absolute())]


def log_folder(logs: Path, task: str, node: str, slot: str) -> Path:
    """Return the folder of a task's agent in a slot: ``agent.log``, torchrun's own, and ``rank<local rank>.log``."""
    return logs / task / node / slot
