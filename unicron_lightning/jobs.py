"""Task definitions, valid before a task runs and while it runs. Submitted by users and sent to the nodes' daemons."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from unicron_lightning import environ
from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.performance.description import PRESETS, TransformerProfile
from unicron_lightning.terms import Terms
from unicron_lightning.wire.fields import MOST_WEIGHT, shortened
from unicron_lightning.wire.subjects import Layout

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_TOGETHER: Final = 1000
"""Limit for jobs that are submitted together."""
MOST_NODES: Final = 1_000_000
MOST_WORKERS: Final = 1024
"""Limit for a slot: each worker is a process with its own log."""
_MOST_RESTARTS: Final = 2**31 - 1
_MOST_TEXT_BYTES: Final = 128 << 10
"""Limit for one argument or variable: Linux' MAX_ARG_STRLEN."""
_MOST_BYTES: Final = 1 << 20
"""Limit for all arguments and variables together: half of Linux' default limit."""
_MOST_PATH_BYTES: Final = 4096
_MOST_AFTER: Final = 1000
_MOST_SIZE: Final = 10**8
"""Limit of every size in a job's ``transformer``."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
AUTO: Final = "auto"
"""In a file: the plan chooses the layouts (`Job.auto_layouts`)."""
FROM_FILE: Final = "file:"
"""Beginning of a secret's source: a file of the node."""
FROM_VARIABLE: Final = "env:"
"""Beginning of a secret's source: a variable of the node's daemon."""


@dataclass(kw_only=True)
class JobShare:
    """A job's part of the cluster, as configured. Not frozen, nor are its subclasses: Hydra overrides their values."""

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
    may_pause: bool = False
    """Whether the plan may pause it while it trains."""
    kind: str | None = None
    """Kind of the nodes on which it runs (``unicron agent --kind``); None: those without one."""


@dataclass(kw_only=True)
class JobFields(JobShare):
    """All that a user configures of a job but its name. Fields as in `Job`."""

    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    folder: str | None = None
    python: str | None = None
    activate: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    time_limit_seconds: float | None = None
    flops_per_step: float | None = None
    profile: dict[int, float] = field(default_factory=dict)
    transformer: dict[str, Any] = field(default_factory=dict)
    layouts: Any = field(default_factory=dict)
    """`AUTO`, or as in `Job`."""

    def job(self, name: str) -> Job:
        """Return the definition under this name.

        Raises:
            ConfigError: it is wrong.
        """
        given = {each.name: getattr(self, each.name) for each in fields(JobFields)}
        given |= {"transformer": read_transformer(self.transformer), "auto_layouts": self.layouts == AUTO}
        job = Job(name=name, **{**given, "layouts": {} if self.layouts == AUTO else _read_layouts(self.layouts)})
        wrong = problem(job)
        if wrong is not None:
            raise ConfigError(wrong)
        return job


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A task as it was submitted; its name is the task's id (torchrun's ``--rdzv-id``)."""

    name: str
    command: list[str]
    """The script and its arguments, as they would follow torchrun's own."""
    environment: dict[str, str] = {}
    """Added to the environment of its processes."""
    secrets: dict[str, str] = {}
    """Variables whose values each daemon reads on its node: from ``file:PATH``, or from its own ``env:NAME``. Only the
    sources are sent and stored.
    """
    folder: str | None = None
    """Working directory of its processes, an absolute path; None: that of the node's daemon."""
    python: str | None = None
    """Interpreter, or folder of a virtual environment, as an absolute path; or a name that is looked up in PATH. None:
    the interpreter of the node's daemon.
    """
    activate: list[str] = []
    """Commands that bash runs before torchrun, in the same shell."""
    after: list[str] = []
    """Tasks that have to succeed before this one may start. If one does not, this one fails."""
    time_limit_seconds: float | None = None
    """Seconds from its first start after which it has failed; None: no limit."""
    weight: float = 1.0
    """w(t), the value of its FLOPs relative to those of other tasks."""
    min_nodes: int = 1
    """Fewest slots with which the task may run."""
    max_nodes: int = 1
    """Most slots that the task may have."""
    workers_per_node: int = 1
    """Workers in a slot: torchrun's ``--nproc-per-node``."""
    max_restarts: int = 1000
    """Restarts that torchrun allows each of its agents."""
    may_pause: bool = False
    """Whether the plan may pause the task while it trains, after its workers have written a checkpoint."""
    kind: str | None = None
    """Kind of the nodes on which it runs; None: those without one."""
    flops_per_step: float | None = None
    """FLOPs of the model in one optimizer step, used to compute FLOP/s from step times."""
    profile: dict[int, float] = {}
    """T(t,x) if known beforehand: achieved FLOP/s by number of slots. Beside `transformer`, it corrects that."""
    transformer: TransformerProfile | None = None
    """The model's shape, from which T(t,x) is computed where nothing is measured."""
    layouts: dict[int, list[int]] = {}
    """Layout from a number of slots on: TP and PP, or the number of shards alone. The coordinator orders it when the
    task has made a step with that many slots, and the plan counts the time of the change.
    """
    auto_layouts: bool = False
    """Whether the plan chooses TP and PP for each number of slots, as the fastest ones of the analytic model."""
    submitted_at: float = 0.0
    """time.time() of its submission, set by the coordinator: orders the queue, and distinguishes jobs of the
    same name.
    """

    def layout(self, slots: int) -> Layout | None:
        """The layout for a number of slots: that of the largest number in `layouts` that is not larger."""
        named = [number for number in self.layouts if number <= slots]
        if not named:
            return None
        tensor, *pipeline = self.layouts[max(named)]
        return Layout(tensor=tensor, pipeline=pipeline[0] if pipeline else 1, sharded=not pipeline)


def _read_layouts(given: object) -> dict[int, list[int]]:
    try:
        return msgspec.convert(given, dict[int, list[int]], strict=False)
    except msgspec.ValidationError:
        expected = f"{AUTO}, or [TP, PP] or [shards] by numbers of slots >= 1"
        raise ConfigError(f"layouts={shortened(given)}: expected {expected}") from None


def read_transformer(given: dict[str, Any] | None) -> TransformerProfile | None:
    """Return a profile from the values of a file or a request; None if it has none.

    Raises:
        ConfigError: a key is unknown or missing, or a value is wrong.
    """
    if not given:
        return None
    from unicron_lightning.sections import read_section  # loads OmegaConf, which daemons do not need

    return read_section(TransformerProfile, given, "transformer")


def stating(terms: Terms) -> dict[str, Any]:
    """Return the fields of a job that has these terms in slots; workers report their granularity themselves."""
    stated = dict(vars(terms))
    del stated["granularity"]
    return {"min_nodes": stated.pop("min_workers"), "max_nodes": stated.pop("max_workers"), **stated}


def problem(job: Job) -> str | None:
    """The error in a definition, in one sentence that quotes it; None if the definition is valid."""
    low, high = job.min_nodes, job.max_nodes
    if not _NAME.fullmatch(job.name):
        allowed = "up to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        return f"name={shortened(job.name)}: expected {allowed}"
    if not job.command or not job.command[0]:
        return f"command={shortened(job.command)}: expected the script and its arguments"
    if not 1 <= low <= high <= MOST_NODES:
        nodes = f"min_nodes={shortened(low)}, max_nodes={shortened(high)}"
        return f"{nodes}: expected 1 <= min_nodes <= max_nodes <= {MOST_NODES}"
    if not 1 <= job.workers_per_node <= MOST_WORKERS:
        return f"workers_per_node={shortened(job.workers_per_node)}: expected a number >= 1 and <= {MOST_WORKERS}"
    if not 0 <= job.max_restarts <= _MOST_RESTARTS:
        return f"max_restarts={shortened(job.max_restarts)}: expected a number >= 0 and <= {_MOST_RESTARTS}"
    if not _positive(job.weight) or job.weight > MOST_WEIGHT:
        return f"weight={job.weight}: expected a number > 0 and <= {MOST_WEIGHT:g}"
    if job.kind is not None and not _NAME.fullmatch(job.kind):
        return f"kind={shortened(job.kind)}: expected the kind of some nodes, as in unicron agent --kind"
    return _problem_of_numbers(job) or _problem_of_texts(job) or _problem_of_start(job) or _problem_of_after(job)


def _problem_of_numbers(job: Job) -> str | None:
    if job.flops_per_step is not None and not _positive(job.flops_per_step):
        return f"flops_per_step={job.flops_per_step}: expected a number > 0"
    if job.time_limit_seconds is not None and not _positive(job.time_limit_seconds):
        return f"time_limit_seconds={job.time_limit_seconds}: expected a number > 0"
    for slots, flops in job.profile.items():
        if not 1 <= slots <= MOST_NODES or not _positive(flops):
            return f"profile={shortened(job.profile)}: expected FLOP/s > 0 by numbers of slots >= 1"
    if job.transformer is not None and (wrong := problem_of_shape(job.transformer)) is not None:
        return wrong
    if job.auto_layouts and job.layouts:
        return f"layouts={shortened(job.layouts)} with auto_layouts=true: expected only one of them"
    shape = job.transformer if job.auto_layouts else None
    if shape is not None and shape.num_experts and shape.expert_parallel is None:
        return "transformer.expert_parallel is missing: expected the script's EP, since the plan chooses only TP and PP"
    for slots, sizes in job.layouts.items():
        if not 1 <= slots <= MOST_NODES or len(sizes) not in (1, 2) or not all(1 <= n <= MOST_NODES for n in sizes):
            return f"layouts={shortened(job.layouts)}: expected [TP, PP] or [shards] by numbers of slots >= 1"
    if len({len(sizes) for sizes in job.layouts.values()}) > 1:
        return f"layouts={shortened(job.layouts)}: expected [TP, PP] for all numbers of slots, or [shards] for all"
    return None


def problem_of_shape(shape: TransformerProfile) -> str | None:
    """The reason why the coordinator cannot compute T(t,x) of this shape; None if it can."""
    if shape.accelerator is None:
        return f"transformer.accelerator is missing: expected one of {', '.join(sorted(PRESETS))}"
    for name, size in vars(shape).items():
        if isinstance(size, int) and size > _MOST_SIZE:
            return f"transformer.{name}={shortened(size)}: expected a number <= {_MOST_SIZE}"
    return None


def _problem_of_texts(job: Job) -> str | None:
    """The reason why no process could be started with these arguments, variables and folder."""
    if job.folder is not None:
        wrong = _unusable(job.folder, _MOST_PATH_BYTES)
        if wrong is not None or not PurePosixPath(job.folder).is_absolute():
            return f"folder={shortened(job.folder)}: {wrong or 'expected an absolute path'}"
    for key, words in (("command", job.command), ("activate", job.activate)):
        for word in words:
            if (wrong := _unusable(word, _MOST_TEXT_BYTES)) is not None:
                return f"{key}: {shortened(word)}: {wrong}"
    for key, value in job.environment.items():
        wrong = _unusable(f"{key}={value}", _MOST_TEXT_BYTES)
        if not key or "=" in key or wrong is not None:
            why = "" if wrong is None else f": {wrong}"
            return f"environment: {shortened(key)}={shortened(value)} can't be a variable{why}"
        if key == environ.TOKEN:
            return f"environment: {key}: expected other variables: scripts do not get the coordinator's token"
    variables = (*job.environment, *job.environment.values(), *job.secrets, *job.secrets.values())
    texts = (*job.command, *job.activate, *job.after, *variables)
    size = sum(len(text) + 9 for text in texts)
    if size > _MOST_BYTES:
        return f"command and environment have {size} characters: expected <= {_MOST_BYTES}"
    return None


def _problem_of_start(job: Job) -> str | None:
    """The error in the interpreter or in the secrets."""
    if job.python is not None:
        wrong = _unusable(job.python, _MOST_PATH_BYTES)
        if wrong is None and (not job.python or ("/" in job.python and not PurePosixPath(job.python).is_absolute())):
            wrong = "expected the absolute path of an interpreter or a virtual environment, or a name such as python3"
        if wrong is not None:
            return f"python={shortened(job.python)}: {wrong}"
    for key, source in job.secrets.items():
        # What is no source may be the secret itself, which no message shows.
        is_source = source.startswith((FROM_FILE, FROM_VARIABLE))
        given = f"secrets: {shortened(key)}" + (f"={shortened(source)}" if is_source else "")
        if not _VARIABLE.fullmatch(key) or key == environ.TOKEN or key in job.environment:
            return f"{given}: expected the name of a variable that is not in environment, and not {environ.TOKEN}"
        path, name = source.removeprefix(FROM_FILE), source.removeprefix(FROM_VARIABLE)
        good = PurePosixPath(path).is_absolute() if path != source else _VARIABLE.fullmatch(name) and name != source
        if not good or name == environ.TOKEN or _unusable(source, _MOST_PATH_BYTES) is not None:
            return f"{given}: expected {FROM_FILE}/PATH, or {FROM_VARIABLE}NAME for a variable of the node's daemon"
    return None


def _problem_of_after(job: Job) -> str | None:
    if len(job.after) > _MOST_AFTER or len(set(job.after)) < len(job.after) or job.name in job.after:
        return f"after={shortened(job.after)}: expected up to {_MOST_AFTER} different names of other tasks"
    return None


def _unusable(text: str, most: int) -> str | None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "expected characters that UTF-8 has"
    if "\0" in text:
        return "expected no null character"
    return None if size <= most else f"{size} bytes: expected <= {most}"


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
