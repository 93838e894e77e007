"""The entry point of Hydra's launcher: runs jobs, and returns their results in order."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from unicron_lightning import environ
from unicron_lightning.agent.options import DEFAULT_HOST, parse_endpoint
from unicron_lightning.cli.client import DEFAULT_ENDPOINT, Access, fetch
from unicron_lightning.credentials import is_loopback, token_for
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.jobs import Job, problem
from unicron_lightning.launcher import result
from unicron_lightning.launcher.config import LauncherConfig
from unicron_lightning.launcher.job import Script, job_name, job_of, this_script
from unicron_lightning.launcher.sweep import Ended, Sweep, asking
from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.tls import trust_for

logger = logging.getLogger(__name__)

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
        result.forget(folder)
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
    found = result.read(folder)
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
    host = endpoint.rpartition(":")[0] or endpoint
    token = token_for(host, options.token_file, option="hydra.launcher.token_file=")
    trust = trust_for(
        host,
        tls=options.tls,
        client=options.tls_client,
        plaintext=options.plaintext,
        option="hydra.launcher.tls=",
    )
    return Access(token=token, forwarded=options.forwarded, trust=trust)


def _runs_no_jobs(endpoint: str, access: Access) -> bool:
    """Whether the coordinator of this machine was started by an agent of a training, and no daemon is connected."""
    if not is_loopback(parse_endpoint(endpoint)[0]):
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
    host, port = parse_endpoint(endpoint)
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
