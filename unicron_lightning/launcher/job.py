"""One of Hydra's jobs as a task's definition: the same script again, with overrides that select the job.

The processes of a job compose their configuration themselves, from the same files and overrides: nothing is pickled,
and a worker that is restarted after a failure, on any node, composes it again. Values that Hydra would set for a job of
a sweep (number, id, folder) are passed as overrides.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from unicron_lightning.jobs import Job, JobShare
from unicron_lightning.launcher.config import LauncherConfig

CALLBACK: Final = "unicron_lightning.launcher.result.ResultCallback"
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
        f"++hydra.callbacks.unicron_result._target_={CALLBACK}",
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
