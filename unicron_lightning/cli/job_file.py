"""A file for ``unicron submit``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import Job, JobFields
from unicron_lightning.sections import read_section, read_yaml


@dataclass(kw_only=True)
class JobFile(JobFields):
    """The whole file."""

    name: str | None = None
    """The task's id; default: the file's name without its suffix."""


def read_job(path: Path, overrides: list[str]) -> Job:
    """Read a file.

    Args:
        path: the YAML file.
        overrides: ``key=value`` with dots in the key, e.g. ``environment.SEED=7``.

    Raises:
        ConfigError: it can't be read, does not match the schema, or has contradictory values.
    """
    data = read_yaml(path, overrides, "keys such as command")
    if isinstance(command := data.get("command"), list):
        data["command"] = [_text(word) for word in command]
    if isinstance(environment := data.get("environment"), dict):
        data["environment"] = {key: _text(value) for key, value in environment.items()}
    try:
        given = read_section(JobFile, data, "")
        if given.folder is not None:
            given.folder = str((path.parent / given.folder).absolute())
        return given.job(given.name or path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value
