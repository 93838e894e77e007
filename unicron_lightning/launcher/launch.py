"""The entry point of Hydra's launcher: runs jobs, and returns their results in order.

The jobs of a sweep are submitted to a coordinator, and their ends are awaited.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from unicron_lightning import environ
from unicron_lightning.agent.options import DEFAULT_HOST, parse_endpoints
from unicron_lightning.cli.client import DEFAULT_ENDPOINT, fetch, quoted
from unicron_lightning.credentials import is_loopback, token_for
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, UnicronError
from unicron_lightning.jobs import Job, problem
from unicron_lightning.launcher.job import (
    LauncherConfig,
    Script,
    forget_result,
    job_name,
    job_of,
    read_result,
    this_script,
)
from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import sigterm_raises
from unicron_lightning.tls import Access

logger = logging.getLogger(__name__)


_OPEN: Final = ("queued", "running")
_PATIENCE_SECONDS: Final = 5.0
"""Time without a running job after which the reason is logged."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a job.

    Attributes:
        state: succeeded, failed, cancelled, or lost: the coordinator no longer knows it.
        reason: as text; None if there is none.
    """

    state: str
    reason: str | None


class Sweep:
    """The jobs of one sweep.

    Args:
        ask: `fetch` with endpoint and access.
        poll_seconds: interval of the queries to the coordinator.
        unavailable_seconds: time that it may be away.
    """

    def __init__(self, ask: Callable[..., Any], *, poll_seconds: float, unavailable_seconds: float) -> None:
        self._ask = ask
        self._poll_seconds = poll_seconds
        self._unavailable_seconds = unavailable_seconds
        self._ended: dict[str, Ended] = {}
        self._states: dict[str, str] = {}
        self._ran_at = time.monotonic()
        """Time at which a job ran last, or the sweep began."""
        self._reasons: set[str] = set()
        """Logged reasons of the jobs that wait now."""

    def run(self, jobs: Sequence[Job]) -> list[Ended]:
        """Submit the jobs, and return their ends, in order. Any interruption cancels them.

        Raises:
            CoordinatorUnavailable: it was away for too long.
            UnicronError: it refuses a job.
        """
        try:
            with sigterm_raises():
                self._submit_and_wait(jobs)
        except BaseException:
            self._cancel()
            raise
        return [self._ended[job.name] for job in jobs]

    def _submit_and_wait(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._ask("/v1/jobs", method="POST", body=msgspec.to_builtins(job, str_keys=True))
            self._states[job.name] = "queued"
        self._wait()

    def _wait(self) -> None:
        away_since: float | None = None
        while self._states:
            try:
                known = {each["name"]: each for each in self._ask("/v1/jobs")}
                away_since = None
                self._review(known)
            except CoordinatorUnavailable as error:
                # The jobs continue without it, and so does the sweep, until it returns.
                if away_since is None:
                    away_since = time.monotonic()
                    logger.warning("coordinator_away %s", error)
                if time.monotonic() - away_since >= self._unavailable_seconds:
                    raise
            if self._states:
                time.sleep(self._poll_seconds)

    def _review(self, known: dict[str, dict[str, Any]]) -> None:
        for name, before in list(self._states.items()):
            status = known.get(name, {"state": "lost", "reason": "the coordinator no longer knows it"})
            state, reason = status["state"], status["reason"]
            if state != before:
                logger.info("job_%s name=%s reason=%s", state, name, reason)
            if state in _OPEN:
                self._states[name] = state
            else:
                del self._states[name]
                self._ended[name] = Ended(state=state, reason=reason)
        if "running" in self._states.values():
            self._ran_at, self._reasons = time.monotonic(), set()
        elif time.monotonic() - self._ran_at >= _PATIENCE_SECONDS:
            self._tell_reasons(known)

    def _tell_reasons(self, known: dict[str, dict[str, Any]]) -> None:
        """Log why no job runs: each reason once."""
        waiting = Counter(str(known[name]["reason"]) for name in self._states if name in known)
        for reason, number in waiting.items():
            if reason not in self._reasons:
                logger.warning("jobs_wait number=%d reason=%s", number, reason)
        self._reasons = set(waiting)

    def _cancel(self) -> None:
        for name in self._states:
            try:
                self._ask(f"/v1/tasks/{quoted(name)}/cancel", method="POST")
            except UnicronError as error:
                logger.warning("job_not_cancelled name=%s error=%s", name, error)


def asking(endpoint: str, access: Access) -> Callable[..., Any]:
    """Bind `fetch` to one coordinator."""

    def ask(path: str, **options: Any) -> Any:
        return fetch(endpoint, path, access, **options)

    return ask


_STOP_SECONDS: Final = 30.0


class SweepJobFailed(UnicronError):
    """A job of a sweep failed; the message names the job and the reason."""


def launch(
    options: LauncherConfig,
    context: HydraContext,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
) -> list[JobReturn]:
    """Run the jobs of a sweep.

    Args:
        options: the launcher's options.
        context: Hydra's context.
        config: the sweep's configuration.
        job_overrides: overrides of each job.
        first_number: ``hydra.job.num`` of the first.

    Raises:
        ConfigError: an option is wrong.
        CoordinatorUnavailable: no coordinator answers, or it was away for too long.
        UnicronError: the coordinator refuses a job.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
    sweep_dir.mkdir(parents=True, exist_ok=True)
    script, identity = this_script(), secrets.token_hex(3)
    jobs: list[Job] = []
    returns: list[JobReturn] = []
    for number, overrides in enumerate(job_overrides, first_number):
        logger.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        composed = _composed(context, config, overrides, number)
        folder = _folder(composed, sweep_dir)
        jobs.append(_job(options, script, composed, overrides, sweep_dir, folder, identity))
        returns.append(_unfinished(composed, folder))
        forget_result(folder)
    with _cluster(options, sweep_dir) as (endpoint, access):
        sweep = Sweep(
            asking(endpoint, access),
            poll_seconds=options.poll_seconds,
            unavailable_seconds=options.unavailable_seconds,
        )
        logger.info("sweep_submitted jobs=%d endpoint=%s dir=%s", len(jobs), endpoint, sweep_dir)
        ends = sweep.run(jobs)
    for job, returned, end in zip(jobs, returns, ends, strict=True):
        finish(returned, job.name, end)
    return returns


def finish(returned: JobReturn, name: str, end: Ended) -> None:
    """Complete a job's return value for Hydra.

    Args:
        returned: to be completed; its ``working_dir`` is the job's output folder.
        name: the job's name.
        end: its end as reported by the coordinator.
    """
    folder = Path(str(returned.working_dir))
    found = read_result(folder)
    if end.state != "succeeded":
        said = found.error if found is not None else None
        reasons = "; ".join(each for each in (end.reason, said) if each) or "no reason is known"
        returned.status = JobStatus.FAILED
        returned.return_value = SweepJobFailed(f"job {name} {end.state}: {reasons}")
        return
    returned.status = JobStatus.COMPLETED
    if found is None:
        logger.warning("result_missing job=%s folder=%s: expected a folder that all nodes share", name, folder)
    elif found.odd is not None:
        logger.warning("result_not_plain job=%s type=%s: expected numbers, strings, lists, dicts", name, found.odd)
    returned.return_value = None if found is None else found.value


@contextmanager
def _cluster(options: LauncherConfig, sweep_dir: Path) -> Iterator[tuple[str, Access]]:
    endpoint = options.endpoint or os.environ.get(environ.ENDPOINT) or DEFAULT_ENDPOINT
    access = None if options.embedded and _nothing_listens(endpoint) else _access(options, endpoint)
    if access is not None and options.embedded and _runs_no_jobs(endpoint, access):
        logger.info("the coordinator at %s belongs to a training and has no daemons: it runs no jobs", endpoint)
        access = None
    if access is None:
        with (
            TemporaryDirectory(
                prefix="unicron-sweep-"
            ) as state,  # not in the sweep's folder, which may be a shared one
            _own_cluster(options, sweep_dir, Path(state)) as cluster,
        ):
            words = "the sweep's own cluster: unicron jobs --endpoint %s; outputs: unicron logs JOB --logs %s"
            logger.info(words, cluster.endpoint, cluster.folder / "logs")
            yield cluster.endpoint, cluster.access
    else:
        yield endpoint, access


def _access(options: LauncherConfig, endpoint: str) -> Access:
    host = parse_endpoints(endpoint, "hydra.launcher.endpoint=")[0][0]
    return options.access(host, "hydra.launcher.token_file=", "hydra.launcher.tls=")


def _runs_no_jobs(endpoint: str, access: Access) -> bool:
    """Whether the coordinator of this machine was started by an agent of a training, and no daemon is connected."""
    if not is_loopback(parse_endpoints(endpoint, "hydra.launcher.endpoint=")[0][0]):
        return False
    status = fetch(endpoint, "/v1/status", access)
    return bool(status["coordinator"]["embedded"]) and not status["nodes"]


def _own_cluster(options: LauncherConfig, sweep_dir: Path, state: Path) -> LocalCluster:
    """Return the cluster of a sweep without one, not started; it has the user's token, so that commands reach it."""
    # One node with a fixed name, because the name is in the paths of logs.
    cluster = LocalCluster(
        nodes=["local"],
        workers_per_node=options.slots,
        environment={},
        folder=sweep_dir / ".unicron",
        state_dir=state,
        stop_seconds=_STOP_SECONDS,
    )
    token = token_for(DEFAULT_HOST, options.token_file, option="hydra.launcher.token_file=")
    cluster.access = Access(token=token)
    cluster.processes.environment[environ.TOKEN] = token.secret
    return cluster


def _nothing_listens(endpoint: str) -> bool:
    """Whether the endpoint is a loopback address that does not answer."""
    (host, port), *others = parse_endpoints(endpoint, "hydra.launcher.endpoint=")
    if others:
        return False
    if not is_loopback(host):
        return False
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return False
    except OSError:
        return True


def _composed(context: HydraContext, config: DictConfig, overrides: Sequence[str], number: int) -> DictConfig:
    """Compose the configuration of one job, as Hydra's own launchers do."""
    composed: DictConfig = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = str(number)
        composed.hydra.job.num = number
    return composed


def _job(
    options: LauncherConfig,
    script: Script,
    composed: DictConfig,
    overrides: Sequence[str],
    sweep_dir: Path,
    folder: Path,
    identity: str,
) -> Job:
    number = int(composed.hydra.job.num)
    job = job_of(
        name=job_name(str(composed.hydra.job.name), identity, number),
        number=number,
        script=script,
        hydra_overrides=list(composed.hydra.overrides.hydra),
        overrides=overrides,
        sweep_dir=sweep_dir,
        folder=folder,
        working_dir=Path.cwd(),
        environment=_environment(options, composed, os.environ),
        options=options,
    )
    wrong = problem(job)
    if wrong is not None:
        raise ConfigError(f"hydra.launcher: {wrong}")
    return job


def _environment(options: LauncherConfig, composed: DictConfig, here: Mapping[str, str]) -> dict[str, str]:
    copied = {name: here[name] for name in ("PYTHONPATH", *composed.hydra.job.env_copy) if name in here}
    return {**copied, **{str(name): str(value) for name, value in options.environment.items()}}


def _folder(composed: DictConfig, sweep_dir: Path) -> Path:
    """Return the job's output folder; its name may use ``${hydra:...}``, which refers to Hydra's present
    configuration.
    """
    hydra_config = HydraConfig.instance()
    before = hydra_config.cfg
    hydra_config.set_config(composed)
    try:
        return sweep_dir / str(composed.hydra.sweep.subdir)
    finally:
        hydra_config.cfg = before


def _unfinished(composed: DictConfig, folder: Path) -> JobReturn:
    """Return the known part of a job's return value before it runs."""
    keys = [str(key) for key in composed if key != "hydra"]
    return JobReturn(
        overrides=list(composed.hydra.overrides.task),
        cfg=OmegaConf.masked_copy(composed, keys),
        hydra_cfg=OmegaConf.masked_copy(composed, "hydra"),
        working_dir=str(folder),
        task_name=str(JobRuntime.instance().get("name")),
    )
