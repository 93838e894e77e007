"""Return values of jobs' scripts, passed back to the sweep as a JSON file in the job's output folder.

The format is JSON, because a user who can write to a shared folder must not be able to run code where the sweep was
started. So only plain data is returned: None, numbers (NumPy's and torch's too), strings, and lists and dicts of these;
tuples become lists.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf

from unicron_lightning.regular_files import read_regular

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
        write(Path(config.hydra.runtime.output_dir), int(os.environ.get("RANK", "0")), result)


def plain(value: Any) -> Any:
    """Convert a value to JSON's types.

    Raises:
        TypeError: it has no such form.
    """
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True)
    return json.loads(json.dumps(value, default=_scalar))


def write(folder: Path, rank: int, result: ScriptResult) -> None:
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


def read(folder: Path) -> ScriptResult | None:
    """Read the result of the lowest rank that has one; None if none has, or the file is invalid."""
    paths = sorted((folder / _FOLDER).glob("rank*.json"), key=lambda path: (len(path.name), path.name))
    if not paths:
        return None
    try:
        return ScriptResult(**json.loads(read_regular(paths[0])))
    except (OSError, ValueError, TypeError):
        return None


def forget(folder: Path) -> None:
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
