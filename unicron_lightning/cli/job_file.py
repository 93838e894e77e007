"""A file for ``unicron submit``: the schema, its defaults and units. Fields are those of `jobs.Job`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import Job, problem
from unicron_lightning.sections import read_section


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """The whole file."""

    command: list[str | int | float]
    """The script and its arguments, as they would follow torchrun's own."""
    name: str | None = None
    """The task's id; default: the file's name without its suffix."""
    environment: dict[str, str | int | float] = field(default_factory=dict)
    """Variables added to the environment of its processes."""
    folder: str | None = None
    """Working folder of its processes on every node; relative to the file. Default: the daemons' folder."""
    weight: float = 1.0
    """Weight of its FLOPs relative to other tasks."""
    min_nodes: int = 1
    """Fewest slots with which it may run."""
    max_nodes: int = 1
    """Most slots that it may have."""
    workers_per_node: int = 1
    """Workers in a slot."""
    max_restarts: int = 1000
    """Restarts of its workers that each of its agents allows."""
    flops_per_step: float | None = None
    """FLOPs of the model in one optimizer step."""
    profile: dict[int, float] = field(default_factory=dict)
    """Achieved FLOP/s by number of slots, if known beforehand."""


def read_job(path: Path, overrides: list[str]) -> Job:
    """Read a file.

    Args:
        path: the YAML file.
        overrides: ``key=value`` with dots in the key, e.g. ``environment.SEED=7``.

    Raises:
        ConfigError: it can't be read, does not match the schema, or has contradictory values.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"--set {override}: expected key=value")
    try:
        data = msgspec.yaml.decode(path.read_bytes())
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a mapping with keys such as command")
        merged = OmegaConf.merge(OmegaConf.create(data), OmegaConf.from_dotlist(overrides))
        data = OmegaConf.to_container(merged, resolve=True)
    except (OSError, msgspec.DecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        given = read_section(JobFile, data, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    folder = None if given.folder is None else str((path.parent / given.folder).absolute())
    texts = {
        "name": given.name or path.stem,
        "folder": folder,
        "command": [str(word) for word in given.command],
        "environment": {name: str(value) for name, value in given.environment.items()},
    }
    job = Job(**{**asdict(given), **texts})
    wrong = problem(job)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong}")
    return job
