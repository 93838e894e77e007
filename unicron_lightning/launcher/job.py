"""One of Hydra's jobs as a task: the launcher's options, the task's definition, and the job's return value.

The processes of a job compose their configuration themselves, from the same files and overrides: nothing is pickled,
and a worker that is restarted after a failure, on any node, composes it again. Values that Hydra would set for a job of
a sweep (number, id, folder) are passed as overrides.

Return values of jobs' scripts, passed back to the sweep as a JSON file in the job's output folder.

The format is JSON, because a user who can write to a shared folder must not be able to run code where the sweep was
started. So only plain data is returned: None, numbers (NumPy's and torch's too), strings, and lists and dicts of these;
tuples become lists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf

from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import Job, JobShare
from unicron_lightning.private_files import read_regular
from unicron_lightning.tls import AccessOptions


@dataclass(kw_only=True)
class LauncherConfig(JobShare, AccessOptions):
    """Schema of ``hydra.launcher``; the share is that of each job, and the access that to the coordinator."""

    _target_: str = "hydra_plugins.hydra_unicron_launcher.unicron_launcher.UnicronLauncher"
    endpoint: str | None = None
    """``HOST:PORT`` of the coordinator; None: the variable UNICRON_ENDPOINT, else 127.0.0.1:29461."""
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


_CALLBACK: Final = "unicron_lightning.launcher.job.ResultCallback"
_NOT_FOR_JOBS: Final = re.compile(r"[+~]*hydra(/launcher|/sweeper|\.launcher|\.sweeper|\.mode|\.run|\.sweep)\b")
_NAME_LENGTH: Final = 100


@dataclass(frozen=True, kw_only=True)
class Script:
    """The way the user's program is run.

    Attributes:
        command: the words that follow torchrun's options: a file, or ``-m`` and a module.
        flags: Hydra's own options that locate the configuration.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]


def this_script() -> Script:
    """Describe the program that runs in this process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        command: tuple[str, ...] = (str(Path(sys.argv[0]).absolute()),)
    else:
        command = ("-m", spec.name.removesuffix(".__main__"))
    return Script(command=command, flags=config_flags(sys.argv[1:]))


def config_flags(arguments: Sequence[str]) -> tuple[str, ...]:
    """Select Hydra's options that the jobs need too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = (("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd"))
    for name, short in names:
        parser.add_argument(name, short)
    known = vars(parser.parse_known_args(arguments)[0])
    given = [(name, known[name.strip("-").replace("-", "_")]) for name, _ in names]
    return tuple(word for name, value in given if value is not None for word in (name, value))


def job_name(program: str, sweep: str, number: int) -> str:
    """Return the name of a job's task: the program, the sweep's identity, and the job's number."""
    end = f"-{sweep}-{number}"
    return (re.sub(r"[^A-Za-z0-9._-]", "_", program).lstrip("._-") or "sweep")[: _NAME_LENGTH - len(end)] + end


def job_of(
    *,
    name: str,
    number: int,
    script: Script,
    hydra_overrides: Sequence[str],
    overrides: Sequence[str],
    sweep_dir: Path,
    folder: Path,
    working_dir: Path,
    environment: Mapping[str, str],
    options: LauncherConfig,
) -> Job:
    """Return the definition of a job.

    Args:
        name: its name.
        number: ``hydra.job.num``.
        script: the way the program is run.
        hydra_overrides: overrides of the command line that are for Hydra.
        overrides: overrides for the job.
        sweep_dir: ``hydra.sweep.dir``.
        folder: the job's output folder, below it.
        working_dir: folder in which the program was started.
        environment: variables for its processes.
        options: the launcher's options.
    """
    for_hydra = [
        *(each for each in hydra_overrides if not _NOT_FOR_JOBS.match(each)),
        "hydra.mode=RUN",
        f"hydra.run.dir={quoted(str(folder))}",
        f"hydra.sweep.dir={quoted(str(sweep_dir))}",
        f"hydra.job.num={number}",
        f"hydra.job.id={quoted(str(number))}",
        f"++hydra.callbacks.unicron_result._target_={_CALLBACK}",
    ]
    return Job(
        name=name,
        command=[*script.command, *script.flags, *overrides, *for_hydra],
        environment=dict(environment),
        folder=str(working_dir),
        **{share.name: getattr(options, share.name) for share in fields(JobShare)},
    )


def quoted(text: str) -> str:
    """Quote a string for Hydra's grammar."""
    # In quotes only the quote, and backslashes before it, are special.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"


_FOLDER: Final = ".unicron"


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """The end of a job's process.

    Attributes:
        value: return value of the script; None also if it was not plain data.
        error: the exception that it raised, as text; None if it returned.
        odd: type of the return value if it was not plain data, else None.
    """

    value: Any = None
    error: str | None = None
    odd: str | None = None


class ResultCallback(Callback):
    """Writes the result when the script has returned or raised; Hydra creates one in each process of a job."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        given = job_return._return_value  # the property raises it if it is an exception
        if job_return.status is not JobStatus.COMPLETED:
            result = ScriptResult(error=f"{type(given).__name__}: {given}")
        else:
            try:
                result = ScriptResult(value=plain(given))
            except TypeError:
                result = ScriptResult(odd=f"{type(given).__module__}.{type(given).__qualname__}")
        write_result(Path(config.hydra.runtime.output_dir), int(os.environ.get("RANK", "0")), result)


def plain(value: Any) -> Any:
    """Convert a value to JSON's types.

    Raises:
        TypeError: it has no such form.
    """
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True)
    return json.loads(json.dumps(value, default=_scalar))


def write_result(folder: Path, rank: int, result: ScriptResult) -> None:
    """Write the result of the process with this rank.

    Args:
        folder: the job's output folder.
        rank: torchrun's RANK.
        result: result of the process.
    """
    path = _path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(vars(result)), encoding="utf-8")
    partial.replace(path)


def read_result(folder: Path) -> ScriptResult | None:
    """Read the result of the lowest rank that has one; None if none has, or the file is invalid."""
    paths = sorted((folder / _FOLDER).glob("rank*.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        return None
    try:
        return ScriptResult(**json.loads(read_regular(paths[0])))
    except (OSError, ValueError, TypeError):
        return None


def forget_result(folder: Path) -> None:
    """Remove the files of an earlier sweep into the same folder."""
    for path in (folder / _FOLDER).glob("rank*.json"):
        path.unlink(missing_ok=True)


def _path(folder: Path, rank: int) -> Path:
    return folder / _FOLDER / f"rank{rank}.json"


def _scalar(value: Any) -> Any:
    # Of NumPy and torch, which are not imported for this. It raises for more than one element.
    item = getattr(value, "item", None)
    if not callable(item):
        raise TypeError(f"{type(value).__name__} is no plain data")
    try:
        found = item()
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"{type(value).__name__} has more than one element") from error
    if not isinstance(found, bool | int | float | str):
        raise TypeError(f"{type(value).__name__} is no plain data")
    return found
