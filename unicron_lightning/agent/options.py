"""The user's torchrun options, validated.

``--rdzv-endpoint HOST[:PORT][,HOST[:PORT]...]`` names the coordinators (default 127.0.0.1:29461);
``--rdzv-id`` is the task;
``--rdzv-conf`` takes the keys of `CONF_KEYS`. A wrong value is a `ConfigError` that quotes it.

Requests to leave a node may be no SIGTERM: another signal, or a file. Each becomes one SIGTERM of this process.
Schedulers send the signal of their configuration, e.g. SIGUSR1. A hook that announces the end of a spot instance can
create a file.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from unicron_lightning import environ
from unicron_lightning.credentials import is_loopback
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import default_state_dir
from unicron_lightning.tls import Access, AccessOptions

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

logger = logging.getLogger(__name__)


SIGNALS: Final = {"SIGUSR1": signal.SIGUSR1, "SIGUSR2": signal.SIGUSR2}
_POLL_SECONDS: Final = 0.5


def leave_signal(text: str | None, option: str) -> signal.Signals | None:
    """Return the signal that a user has named, with or without "SIG"; None if there is none.

    Args:
        text: as given.
        option: its name, for the error.

    Raises:
        ConfigError: it is another signal.
    """
    if text in (None, ""):
        return None
    name = str(text).upper()
    found = SIGNALS.get(name if name.startswith("SIG") else f"SIG{name}")
    if found is None:
        raise ConfigError(f"{option}{text}: expected USR1 or USR2")
    return found


class LeaveNotices:
    """Sends this process SIGTERM when a signal arrives, or when a file appears. Created and closed in the main thread;
    does nothing in another one.

    Args:
        number: the signal, None: none.
        path: the file, looked for twice a second; None: none.
    """

    def __init__(self, number: signal.Signals | None, path: Path | None) -> None:
        self._number, self._path = number, path
        self._before: Any = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        if threading.current_thread() is not threading.main_thread():
            return
        if number is not None:
            self._before = signal.signal(number, self._handle)
        if path is not None:
            self._thread = threading.Thread(target=self._watch, args=(path,), name="unicron-notice", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; the signal gets its previous handler."""
        if self._before is not None and self._number is not None:
            signal.signal(self._number, self._before)
            self._before = None
        if self._thread is not None:
            self._closed.set()
            self._thread.join(_POLL_SECONDS)  # longer if its file system hangs
            self._thread = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        logger.warning("leave_notice signal=%s", signal.Signals(number).name)
        signal.raise_signal(signal.SIGTERM)

    def _watch(self, path: Path) -> None:
        while not path.exists():
            if self._closed.wait(_POLL_SECONDS):
                return
        logger.warning("leave_notice file=%s", path)
        main = threading.main_thread().ident
        if main is not None and not self._closed.is_set():
            signal.pthread_kill(main, signal.SIGTERM)


DEFAULT_HOST: Final = "127.0.0.1"
_DEFAULT_PORT: Final = 29461

CONF_KEYS: Final = {
    "node": "label of the node (default: host name); agents of one machine may share it",
    "token_file": "file with the shared secret (default: UNICRON_TOKEN, else the file made for the user)",
    "rack": "label of what this node shares with others and can be lost with, e.g. a rack or switch (default: none)",
    "forwarded": "whether a process such as a tunnel forwards from the endpoint to the coordinator (default false)",
    "tls": "certificate that is accepted: a CA's file, sha256:FINGERPRINT, or auto (default: auto beyond loopback)",
    "tls_client": "file with this agent's certificate and its key, for a coordinator that asks for one",
    "plaintext": "whether the link may be plain beyond loopback (default false)",
    "slot": "label of the accelerators on the node that this agent's workers use, if other tasks' agents use them too",
    "weight": "weight of the task's work relative to other tasks (default 1)",
    "prepare": "whether replacements are forked by a prepared process (default: UNICRON_PREPARE, else true)",
    "worker_timeout": "seconds without a heartbeat after which a worker is killed (default: the coordinator's, 10)",
    "stop_timeout": "seconds that workers get to stop when a plain script must restart, before SIGKILL (default 10)",
    "leave_timeout": "seconds that workers get to leave at a step boundary after SIGTERM to torchrun (default 20)",
    "leave_signal": "further signal, USR1 or USR2, that has the same effect as SIGTERM (default: none)",
    "notice_file": "file whose appearance has the same effect, e.g. the notice of a spot instance (default: none)",
    "connect_timeout": "seconds to reach the coordinator at the start (default 30)",
    "timeout": "seconds to wait in the rendezvous while the coordinator is away (torchrun's default 900)",
    "embedded": "whether to start a coordinator if the endpoint names this machine and none listens (default true)",
    "allow_injection": "whether the embedded coordinator allows `unicron inject` (default false)",
    "state_dir": "state folder of the embedded coordinator (default: UNICRON_STATE_DIR, else a temporary one)",
}
_C10D_KEYS: Final = frozenset(
    {"join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval",
     "keep_alive_max_attempt", "is_host", "read_timeout", "store_type"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """The options of an agent; times in seconds."""

    task: str
    agent: str
    node: str
    slot: str | None
    rack: str | None
    weight: float
    min_nodes: int
    max_nodes: int
    coordinator_host: str
    coordinator_port: int
    """Of the first coordinator."""
    others: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of further coordinators; one of all leads."""
    embedded: bool
    """Whether this agent may start the coordinator: the only endpoint names this machine, and the user did not forbid
    it.
    """
    state_dir: Path
    access: Access
    host: str
    """This agent's address for sockets of other nodes' workers."""
    allow_injection: bool = False
    """Whether a coordinator that this agent starts allows fault injection."""
    prepare: bool = True
    """Whether replacements of workers are forked by a prepared process."""
    worker_timeout: float | None = None
    """Seconds without a heartbeat after which a worker is killed; None: the coordinator's value."""
    stop_timeout: float = 10.0
    leave_timeout: float = 20.0
    leave_signal: signal.Signals | None = None
    """Signal that has the same effect as SIGTERM."""
    notice_file: Path | None = None
    """File whose appearance has that effect."""
    connect_timeout: float = 30.0
    timeout: float = 900.0

    @property
    def endpoint(self) -> str:
        """``HOST:PORT`` of the coordinator, or of each, separated by commas."""
        return ",".join(endpoint_of(*each) for each in ((self.coordinator_host, self.coordinator_port), *self.others))

    @property
    def url(self) -> str:
        """URL of the agent's session."""
        return f"{self.access.trust.scheme}://{self.endpoint}/v1/agent"


def from_parameters(parameters: RendezvousParameters) -> AgentOptions:
    """Check torchrun's options.

    Raises:
        ConfigError: one of them is wrong.
    """
    conf: Mapping[str, Any] = parameters.config
    _check_keys(conf)
    (host, port), *others = parse_endpoints(parameters.endpoint, "--rdzv-endpoint ")
    loopback = is_loopback(host)
    access = AccessOptions(
        token_file=conf.get("token_file"),
        forwarded=_flag(conf, "forwarded", default=False),
        tls=conf.get("tls"),
        tls_client=conf.get("tls_client"),
        plaintext=_flag(conf, "plaintext", default=False),
    ).access(host, "--rdzv-conf token_file=", "--rdzv-conf tls=")
    node, given = str(conf.get("node") or socket.gethostname()), conf.get("state_dir")
    return AgentOptions(
        task=parameters.run_id,
        agent=f"{node}-{uuid.uuid4().hex[:8]}",
        node=node,
        slot=str(conf["slot"]) if conf.get("slot") not in (None, "") else None,
        rack=str(conf["rack"]) if conf.get("rack") not in (None, "") else None,
        weight=_positive(conf, "weight", 1.0, "a positive number"),
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        coordinator_host=host,
        coordinator_port=port,
        others=tuple(others),
        embedded=_flag(conf, "embedded", default=True) and not others and _names_this_machine(host),
        state_dir=Path(given).expanduser().absolute() if given else default_state_dir(host, port),
        access=access,
        host=DEFAULT_HOST if loopback else _own_address(parameters.local_addr, host, port),
        allow_injection=_flag(conf, "allow_injection", default=False),
        prepare=_flag(conf, "prepare", default=_variable(environ.PREPARE, default=True)),
        worker_timeout=_seconds(conf, "worker_timeout", 10.0) if "worker_timeout" in conf else None,
        stop_timeout=_seconds(conf, "stop_timeout", 10.0),
        leave_timeout=_seconds(conf, "leave_timeout", 20.0),
        leave_signal=leave_signal(conf.get("leave_signal"), "--rdzv-conf leave_signal="),
        notice_file=Path(conf["notice_file"]).expanduser().absolute() if conf.get("notice_file") else None,
        connect_timeout=_seconds(conf, "connect_timeout", 30.0),
        timeout=_seconds(conf, "timeout", 900.0),
    )


def endpoint_of(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(text: str, option: str = "--endpoint ") -> tuple[str, int]:
    """Split ``HOST[:PORT]`` (IPv6 in brackets), with defaults for missing parts.

    Args:
        text: as given.
        option: its name, for the error.

    Raises:
        ConfigError: the text has another form.
    """
    wrong = ConfigError(f"{option}{text!r}: expected HOST, HOST:PORT or [IPv6]:PORT with a port of 1..65535")
    rest = text.strip()
    if "," in rest:
        raise wrong
    if not rest:
        return DEFAULT_HOST, _DEFAULT_PORT
    if rest.startswith("["):
        host, bracket, port_text = rest[1:].partition("]")
        if not bracket or (port_text and not port_text.startswith(":")):
            raise wrong
        port_text = port_text[1:]
    elif rest.count(":") > 1:
        raise wrong
    else:
        host, _, port_text = rest.partition(":")
    if not port_text:
        return host or DEFAULT_HOST, _DEFAULT_PORT
    if not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text) <= 65535):
        raise wrong
    return host or DEFAULT_HOST, int(port_text)


def parse_endpoints(text: str, option: str = "--endpoint ") -> list[tuple[str, int]]:
    """Split endpoints that are separated by commas, each as `parse_endpoint` does; the coordinators have one state.

    Raises:
        ConfigError: one has another form, or only some are on the loopback interface, which needs another access.
    """
    parts = text.split(",")
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise ConfigError(f"{option}{text!r}: expected HOST:PORT before and after each comma")
    places = list(dict.fromkeys(parse_endpoint(part, option) for part in parts))
    if len({is_loopback(host) for host, _ in places}) > 1:
        raise ConfigError(f"{option}{text!r}: expected all of them on the loopback interface, or none")
    return places


def _names_this_machine(host: str) -> bool:
    """Whether ``host`` is this machine: one of its addresses can be bound here."""
    for family, kind, protocol, _, address in _resolve(host):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


def bind_address(host: str) -> str:
    """Return the address where a coordinator for endpoint ``host`` listens: all addresses if a name is a
    loopback one.
    """
    if is_loopback(host):
        return host
    addresses = {str(address[0]) for _, _, _, _, address in _resolve(host)}
    return "0.0.0.0" if all(is_loopback(address) for address in addresses) else host


def _own_address(local_addr: str | None, host: str, port: int) -> str:
    """Return the address of this machine for other nodes: ``--local-addr``, else that of the route to the
    coordinator.
    """
    if local_addr:
        return local_addr
    # On the coordinator's own machine the route to it is the loopback; a remote target shows the real address.
    for target in (host, "192.0.2.1"):
        for family, _, _, _, address in _resolve(target):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((address[0], port))
                    found = str(probe.getsockname()[0])
            except OSError:
                continue
            if not ipaddress.ip_address(found).is_loopback:
                return found
    return socket.gethostname()


def _resolve(host: str) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return []


def _check_keys(conf: Mapping[str, Any]) -> None:
    for key in conf:
        if key in _C10D_KEYS:
            logger.warning("option_ignored key=%s reason='it belongs to the c10d back-end'", key)
        elif key not in CONF_KEYS:
            raise ConfigError(f"--rdzv-conf {key}={conf[key]}: unknown key; known are {', '.join(sorted(CONF_KEYS))}")


def _seconds(conf: Mapping[str, Any], key: str, default: float) -> float:
    return _positive(conf, key, default, "a positive number of seconds")


def _positive(conf: Mapping[str, Any], key: str, default: float, expected: str) -> float:
    text = conf.get(key, default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--rdzv-conf {key}={text}: expected {expected}")
    return value


def _flag(conf: Mapping[str, Any], key: str, *, default: bool) -> bool:
    return _truth(f"--rdzv-conf {key}", str(conf.get(key, default)))


def _variable(name: str, *, default: bool) -> bool:
    return _truth(name, os.environ.get(name) or str(default))


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ConfigError(f"{name}={text}: expected true or false")
    return text.lower() in ("1", "true", "yes", "on")
