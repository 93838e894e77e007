"""A file for ``unicron submit``, which defines a job, or an array of jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning import environ
from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import FROM_FILE, MOST_TOGETHER, Job, JobFields, problem, read_transformer
from unicron_lightning.sections import read_section, read_yaml

INDEX: Final = "{index}"
"""Stands for a job's index in the command and the variables of an array."""
_PART: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


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

    Returns:
        The job. Its paths are absolute: relative ones are relative to the file. Its folder is by default the present
        one of this process.

    Raises:
        ConfigError: it can't be read, does not match the schema, or has contradictory values.
    """
    data = read_yaml(path, overrides, "keys such as command")
    if isinstance(command := data.get("command"), list):
        data["command"] = [_text(word) for word in command]
    if isinstance(environment := data.get("environment"), dict):
        data["environment"] = {key: _text(value) for key, value in environment.items()}
    try:
        if isinstance(table := data.get("profile"), str):
            data["profile"] = {}
        given = read_section(JobFile, data, "")
        if isinstance(table, str):
            given.profile = _profile(path.parent / table, given)
        if "folder" not in data:
            given.folder = str(Path.cwd())
        elif given.folder is not None:
            given.folder = str((path.parent / given.folder).absolute())
        if given.python is not None and "/" in given.python:
            given.python = str((path.parent / given.python).absolute())
        for name, source in given.secrets.items():
            if source.startswith(FROM_FILE):
                file = (path.parent / source.removeprefix(FROM_FILE)).absolute()
                given.secrets[name] = f"{FROM_FILE}{file}"
        return given.job(given.name or path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _profile(path: Path, given: JobFields) -> dict[int, float]:
    """Read achieved FLOP/s by number of slots from a table, as ``unicron calibrate`` writes it."""
    from unicron_lightning.planner.performance.model import points_from_csv

    flops, transformer = given.flops_per_step, read_transformer(given.transformer)
    if flops is None and transformer is not None:
        flops = float(transformer.flops_per_step)
    try:
        points = points_from_csv(path.read_text(encoding="utf-8"), flops_per_step=flops)
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile={path}: {error}") from error
    for point in points:
        if point.num_workers % given.workers_per_node:
            whole = f"expected multiples of workers_per_node={given.workers_per_node}"
            raise ConfigError(f"profile={path}: workers={point.num_workers}: {whole}")
    return {point.num_workers // given.workers_per_node: point.flops_per_second for point in points}


def array_of(job: Job, indices: str) -> list[Job]:
    """Return the jobs of an array: copies of ``job`` that differ by their index.

    Args:
        job: the definition. ``{index}`` in its command and in values of its variables is replaced by the index.
        indices: numbers and ranges, e.g. ``0-3,8``.

    Raises:
        ConfigError: ``indices`` is malformed, or a resulting job is wrong.
    """
    numbers: list[int] = []
    for part in indices.split(","):
        found = _PART.fullmatch(part.strip())
        first, last = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (1, 0)
        if not first <= last < first + MOST_TOGETHER:
            raise ConfigError(f"--array {indices}: expected up to {MOST_TOGETHER} numbers and ranges, such as 0-9,12")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers) or len(numbers) > MOST_TOGETHER:
        raise ConfigError(f"--array {indices}: expected up to {MOST_TOGETHER} different numbers, got {len(numbers)}")
    jobs = [_with_index(job, number) for number in numbers]
    for each in jobs:
        if (wrong := problem(each)) is not None:
            raise ConfigError(f"--array {indices}: {wrong}")
    return jobs


def _with_index(job: Job, index: int) -> Job:
    environment = {name: value.replace(INDEX, str(index)) for name, value in job.environment.items()}
    return msgspec.structs.replace(
        job,
        name=f"{job.name}-{index}",
        command=[word.replace(INDEX, str(index)) for word in job.command],
        environment={environ.ARRAY_INDEX: str(index), **environment},
    )


def _text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value
