"""The launcher's options: ``hydra.launcher.*``. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import JobShare


@dataclass(kw_only=True)
class LauncherConfig(JobShare):
    """Schema of ``hydra.launcher``; the share is that of each job."""

    _target_: str = "hydra_plugins.hydra_unicron_launcher.unicron_launcher.UnicronLauncher"
    endpoint: str | None = None
    """``HOST:PORT`` of the coordinator; None: the variable UNICRON_ENDPOINT, else 127.0.0.1:29461."""
    token_file: str | None = None
    """File with the coordinator's token; None: the variable UNICRON_TOKEN, else the file made for the user."""
    forwarded: bool = False
    """Whether a process, e.g. a tunnel, forwards from the endpoint to the coordinator."""
    tls: str | None = None
    """Certificate that is accepted: a CA's file, ``sha256:FINGERPRINT``, or auto; None: auto beyond loopback."""
    tls_client: str | None = None
    """File with this client's certificate and its key, for a coordinator that asks for one."""
    plaintext: bool = False
    """Whether the link may be plain beyond loopback."""
    max_restarts: int = 3
    """Restarts of a job's workers on a node until the job has failed. Few, as a sweep may try values that
    cannot work.
    """
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the environment of the jobs' processes, beside PYTHONPATH and ``hydra.job.env_copy``."""
    poll_seconds: float = 1.0
    """Interval of the queries to the coordinator."""
    unavailable_seconds: float = 600.0
    """Seconds that the coordinator may be away before the sweep fails."""
    embedded: bool = True
    """Whether to run a cluster on this machine, for the sweep only, if none runs jobs at a loopback endpoint."""
    slots: int = 1
    """Slots of that cluster: the number of jobs that run at a time, with one node each."""

    def __post_init__(self) -> None:
        for name in ("poll_seconds", "unavailable_seconds", "slots"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hydra.launcher.{name}={getattr(self, name)}: expected a number > 0")
