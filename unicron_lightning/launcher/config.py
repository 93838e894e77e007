"""The launcher's options: ``hydra.launcher.*``. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_lightning.errors import ConfigError


@dataclass(kw_only=True)
class LauncherConfig:
    """Schema of ``hydra.launcher``. Not frozen: to Hydra that would be a schema whose values cannot be overridden."""

    _target_: str = "hydra_plugins.hydra_unicron_launcher.unicron_launcher.UnicronLauncher"
    endpoint: str = "127.0.0.1:29461"
    """``HOST:PORT`` of the coordinator."""
    token_file: str | None = None
    """File with the coordinator's token; None: the variable UNICRON_TOKEN, else the file made for the user."""
    forwarded: bool = False
    """Whether something forwards from the endpoint to the coordinator, e.g. a tunnel."""
    weight: float = 1.0
    """What the work of each job is worth beside that of other tasks."""
    min_nodes: int = 1
    """Fewest slots with which a job may run."""
    max_nodes: int = 1
    """Most slots that a job may have."""
    workers_per_node: int = 1
    """Workers of a job in each slot."""
    max_restarts: int = 3
    """Restarts of a job's workers on a node until the job counts as failed. Few, as what a sweep tries may be wrong."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the environment of the jobs' processes, beside PYTHONPATH and ``hydra.job.env_copy``."""
    poll_seconds: float = 1.0
    """How often the coordinator is asked."""
    unavailable_seconds: float = 600.0
    """How long the coordinator may be away before the sweep is given up."""
    embedded: bool = True
    """Whether to run a cluster on this machine, for the sweep only, if nothing listens at a loopback endpoint."""
    slots: int = 1
    """Slots of that cluster: how many jobs run at a time, with one node each."""

    def __post_init__(self) -> None:
        for name in ("poll_seconds", "unavailable_seconds", "slots"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hydra.launcher.{name}={getattr(self, name)}: expected a number > 0")
