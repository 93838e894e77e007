"""Configuration of the coordinator: the schema, its defaults, and their reasons. Durations are in seconds.

Not frozen: to Hydra a frozen schema is one whose values cannot be overridden.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from unicron_lightning.coordinator.events import Limits
from unicron_lightning.errors import ConfigError


@dataclass(kw_only=True)
class ServerConfig:
    """Where the coordinator listens and keeps its state."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but a loopback address needs a token."""
    port: int = 29461
    """TCP port; 0 lets the system choose (it is written to ``coordinator.json`` in the state directory)."""
    state_dir: str | None = None
    """Directory for the state; default $UNICRON_STATE_DIR or <tempdir>/unicron-<uid>/<host>-<port>."""
    token_file: str | None = None
    """File with the token that agents and `unicron status` must show; the variable UNICRON_TOKEN does the same."""
    exit_when_idle: bool = False
    """End when nothing is left to coordinate: for a coordinator that was started by an agent."""
    idle_linger: float = 3.0
    """How long nothing must be there before an `exit_when_idle` coordinator ends."""
    startup_linger: float = 30.0
    """The same before the first agent has come: starting torchrun takes seconds on a busy machine."""
    heartbeat: float = 10.0
    """Interval of pings to agents. A cut that closes no connection is noticed after at most 1.5 intervals; less than
    a few seconds takes stalls of a busy machine for cuts."""
    max_message_bytes: int = 16 * 1024 * 1024
    """Larger messages end the connection that they come over."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server.port={self.port}: expected 0..65535")
        if not self.host:
            raise ConfigError("server.host is empty: expected an address or a host name")
        _check_positive("server", heartbeat=self.heartbeat, max_message_bytes=self.max_message_bytes)
        _check_not_negative("server", idle_linger=self.idle_linger, startup_linger=self.startup_linger)


@dataclass(kw_only=True)
class MembershipConfig:
    """How long to wait before conclusions are drawn."""

    reconnect_grace: float = 0.25
    """An agent whose connection ended is lost after this. A closed connection nearly always is a dead process."""
    restart_grace: float = 10.0
    """After a restart of the coordinator agents have this long to come back; their back-off reaches 2 s."""
    comm_error_grace: float = 0.5
    """A death explains a failed collective if it is reported within this time; else the epoch is renewed in place."""
    join_grace: float = 0.5
    """Workers of one agent join together if they get ready within this time of each other."""

    def __post_init__(self) -> None:
        _check_not_negative(
            "membership",
            reconnect_grace=self.reconnect_grace,
            restart_grace=self.restart_grace,
            comm_error_grace=self.comm_error_grace,
            join_grace=self.join_grace,
        )


@dataclass(kw_only=True)
class CoordinatorConfig:
    """The whole configuration."""

    server: ServerConfig = field(default_factory=ServerConfig)
    membership: MembershipConfig = field(default_factory=MembershipConfig)

    def limits(self) -> Limits:
        """The part that the state machine goes by."""
        return Limits(
            reconnect_grace=self.membership.reconnect_grace,
            restart_grace=self.membership.restart_grace,
            comm_error_grace=self.membership.comm_error_grace,
            join_grace=self.membership.join_grace,
            exit_when_idle=self.server.exit_when_idle,
            idle_linger=self.server.idle_linger,
            startup_linger=self.server.startup_linger,
        )


def register_schema() -> None:
    """Make the schema known to Hydra, which then refuses unknown keys and wrong types."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="coordinator_schema", node=CoordinatorConfig)


def default_state_dir(host: str, port: int) -> Path:
    """Where a coordinator at this endpoint keeps its state unless told otherwise."""
    if os.environ.get("UNICRON_STATE_DIR"):
        return Path(os.environ["UNICRON_STATE_DIR"])
    return Path(tempfile.gettempdir()) / f"unicron-{os.getuid()}" / f"{host}-{port}"


def prepare_state_dir(path: Path) -> None:
    """Create the directory (mode 0700, parents too).

    Raises:
        ConfigError: it belongs to another user, as could be arranged in a shared temporary directory.
    """
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = path.stat().st_uid
    if owner != os.getuid():
        raise ConfigError(f"server.state_dir={path} belongs to user {owner}, not to you: choose another directory")


def read_token(token_file: str | None) -> str | None:
    """The token from the file, else from the environment, else None.

    Raises:
        ConfigError: the file can't be read or is empty.
    """
    if token_file is None:
        return os.environ.get("UNICRON_TOKEN") or None
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file={token_file}: {error}") from error
    if not token:
        raise ConfigError(f"token_file={token_file} is empty: expected a token in it")
    return token


def _check_positive(group: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{group}.{name}={value}: expected a number > 0")


def _check_not_negative(group: str, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ConfigError(f"{group}.{name}={value}: expected a number >= 0")
