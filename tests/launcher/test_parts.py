"""The launcher without processes: definitions of jobs, results, and a sweep with a coordinator of the test's own."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, UnicronError
from unicron_lightning.jobs import Job, problem
from unicron_lightning.launcher.job import (
    LauncherConfig,
    ResultCallback,
    Script,
    ScriptResult,
    config_flags,
    forget_result,
    job_name,
    job_of,
    plain,
    quoted,
    read_result,
    write_result,
)
from unicron_lightning.launcher.launch import Ended, Sweep, SweepJobFailed, finish


@pytest.mark.parametrize("text", ["plain", "a b", "it's", "a\\b", "a\\'b", "ends\\", "a,b=[c]{d}", "", 'q"q'])
def test_hydra_reads_a_quoted_value_as_it_was(text: str) -> None:
    override = OverridesParser.create().parse_override(f"key={quoted(text)}")
    value = override.value()
    assert str(getattr(value, "text", value)) == text


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["-m", "x=1,2"], ()),
        (["--multirun", "x=1", "--config-name", "other"], ("--config-name", "other")),
        (["-cn=other", "-cd", "dir", "x=1"], ("--config-name", "other", "--config-dir", "dir")),
        (["--config-path=/conf", "--config-dir=more"], ("--config-path", "/conf", "--config-dir", "more")),
    ],
)
def test_the_jobs_find_the_configuration_where_the_sweep_does(arguments: list[str], flags: tuple[str, ...]) -> None:
    assert config_flags(arguments) == flags


@pytest.mark.parametrize("program", ["train", "my program", "", "--x", "ä", "x" * 300])
def test_every_program_gives_a_name(program: str) -> None:
    assert problem(Job(name=job_name(program, "c0ffee", 12), command=["x"])) is None
    assert job_name(program, "c0ffee", 12).endswith("-c0ffee-12")


def test_a_job_is_the_same_script_with_what_makes_it_that_job() -> None:
    job = job_of(
        name="n",
        number=3,
        script=Script(command=("-m", "pkg.train"), flags=("--config-name", "other")),
        hydra_overrides=[
            "hydra/launcher=unicron",
            "hydra.launcher.slots=2",
            "hydra.sweep.dir=elsewhere",
            "+hydra.sweeper.x=1",
            "hydra.mode=MULTIRUN",
            "hydra.verbose=true",
            "hydra.launcherlike=1",
        ],
        overrides=["x=1", "+y='a b'"],
        sweep_dir=Path("/s"),
        folder=Path("/s/3"),
        working_dir=Path("/w"),
        environment={"A": "b"},
        options=LauncherConfig(weight=2.0, min_nodes=2, max_nodes=3, workers_per_node=4, max_restarts=5),
    )
    callback = "++hydra.callbacks.unicron_result._target_=unicron_lightning.launcher.job.ResultCallback"
    assert job.command == [
        *("-m", "pkg.train", "--config-name", "other", "x=1", "+y='a b'", "hydra.verbose=true", "hydra.launcherlike=1"),
        *("hydra.mode=RUN", "hydra.run.dir='/s/3'", "hydra.sweep.dir='/s'", "hydra.job.num=3", "hydra.job.id='3'"),
        callback,
    ]
    assert (job.weight, job.min_nodes, job.max_nodes, job.workers_per_node, job.max_restarts) == (2.0, 2, 3, 4, 5)
    assert (job.folder, job.environment) == ("/w", {"A": "b"})


@pytest.mark.parametrize("option", ["poll_seconds", "unavailable_seconds", "slots"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"hydra\.launcher\.{option}=0: expected"):
        LauncherConfig(**{option: 0})


def test_the_document_has_every_option_with_its_default() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    options = {name: value for name, value in vars(LauncherConfig()).items() if name != "_target_"}
    assert rows == {name: json.dumps(value).strip('"') for name, value in options.items()}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (1.5, 1.5),
        (float("inf"), float("inf")),
        ((1, 2.0), [1, 2.0]),
        ({"a": [True, "b"]}, {"a": [True, "b"]}),
        (np.float32(0.5), 0.5),
        (torch.tensor(2), 2),
        ([torch.tensor(2.5)], [2.5]),
        (OmegaConf.create({"a": 1, "b": "${a}"}), {"a": 1, "b": 1}),
    ],
)
def test_plain_data_comes_back(value: Any, expected: Any) -> None:
    assert plain(value) == expected


@pytest.mark.parametrize("value", [object(), torch.zeros(2), np.zeros(3), {1, 2}, print])
def test_other_data_does_not(value: Any) -> None:
    with pytest.raises(TypeError):
        plain(value)


def returned(status: JobStatus, value: Any) -> JobReturn:
    return JobReturn(status=status, _return_value=value)


def told(folder: Path) -> Any:
    return OmegaConf.create({"hydra": {"runtime": {"output_dir": str(folder)}}})


def test_the_lowest_ranks_result_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_result(tmp_path) is None
    for rank in (10, 2, 0):
        monkeypatch.setenv("RANK", str(rank))
        ResultCallback().on_job_end(told(tmp_path), returned(JobStatus.COMPLETED, rank))
        assert read_result(tmp_path) == ScriptResult(value=rank)
    forget_result(tmp_path)
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[1]", '{"value": 1, "code": "x"}', "\x80"])
def test_a_result_that_is_none_of_ours_is_none(tmp_path: Path, text: str) -> None:
    write_result(tmp_path, 0, ScriptResult(value=1))
    (tmp_path / ".unicron" / "rank0.json").write_text(text)
    assert read_result(tmp_path) is None


def test_a_pipe_in_place_of_a_result_is_none(tmp_path: Path) -> None:
    (tmp_path / ".unicron").mkdir()
    os.mkfifo(tmp_path / ".unicron" / "rank0.json")
    assert read_result(tmp_path) is None


def test_what_hydra_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told_of(end: Ended) -> JobReturn:
        job = JobReturn(working_dir=str(tmp_path))
        finish(job, "j-0", end)
        return job

    good = Ended(state="succeeded", reason=None)
    missing = told_of(good)
    assert (missing.status, missing.return_value) == (JobStatus.COMPLETED, None)
    assert "result_missing job=j-0" in caplog.text
    ResultCallback().on_job_end(told(tmp_path), returned(JobStatus.COMPLETED, object()))
    assert told_of(good).return_value is None
    assert "result_not_plain job=j-0 type=builtins.object" in caplog.text
    ResultCallback().on_job_end(told(tmp_path), returned(JobStatus.COMPLETED, 0.5))
    assert told_of(good).return_value == 0.5
    ResultCallback().on_job_end(told(tmp_path), returned(JobStatus.FAILED, ValueError("no")))
    failed = told_of(Ended(state="failed", reason="torchrun ended"))
    assert failed.status is JobStatus.FAILED
    with pytest.raises(SweepJobFailed, match="job j-0 failed: torchrun ended; ValueError: no"):
        _ = failed.return_value


class FakeCoordinator:
    """Answers like a coordinator; each query of the jobs takes the next of ``looks``: states by number, or an error."""

    def __init__(self, *looks: dict[int, str] | BaseException, refuse: int = -1) -> None:
        self.looks = list(looks)
        self.refuse = refuse
        self.jobs: list[str] = []
        self.cancelled: list[str] = []

    def __call__(self, path: str, *, method: str = "GET", body: Any = None) -> Any:
        if path.endswith("/cancel"):
            self.cancelled.append(path.split("/")[3])
        elif method == "POST":
            if len(self.jobs) == self.refuse:
                raise UnicronError("refused")
            self.jobs.append(body["name"])
        else:
            look = self.looks.pop(0)
            if isinstance(look, BaseException):
                raise look
            return [{"name": self.jobs[number], "state": state, "reason": None} for number, state in look.items()]
        return {}


JOBS = [Job(name=f"j-{number}", command=["x"]) for number in range(3)]


def run(coordinator: FakeCoordinator, unavailable_seconds: float = 60.0) -> list[Ended]:
    return Sweep(coordinator, poll_seconds=0.001, unavailable_seconds=unavailable_seconds).run(JOBS)


def test_ends_are_in_the_order_of_the_jobs() -> None:
    coordinator = FakeCoordinator(
        {0: "running", 1: "running", 2: "queued"},
        {0: "running", 1: "failed", 2: "running"},
        CoordinatorUnavailable("away"),
        {0: "running", 1: "failed", 2: "succeeded"},
        {0: "succeeded", 1: "failed", 2: "succeeded"},
    )
    assert [end.state for end in run(coordinator)] == ["succeeded", "failed", "succeeded"]
    assert coordinator.jobs == ["j-0", "j-1", "j-2"]
    assert coordinator.cancelled == []


def test_the_reason_of_jobs_that_wait_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unicron_lightning.launcher.launch._PATIENCE_SECONDS", 0.0)
    waiting = dict.fromkeys(range(3), "queued")
    run(FakeCoordinator(waiting, waiting, {**waiting, 0: "running"}, dict.fromkeys(range(3), "succeeded")))
    assert [each.getMessage() for each in caplog.records if "jobs_wait" in each.getMessage()] == [
        "jobs_wait number=3 reason=None"
    ]


def test_a_sweep_that_is_terminated_cancels_its_jobs() -> None:
    class Terminated(FakeCoordinator):
        def __call__(self, path: str, **options: Any) -> Any:
            if path == "/v1/jobs" and not options:
                signal.raise_signal(signal.SIGTERM)  # to this thread: another one may see os.kill's only later
            return super().__call__(path, **options)

    states = {0: "succeeded", 1: "running", 2: "queued"}
    coordinator = Terminated(*[states] * 3)
    with pytest.raises(SystemExit) as ended:
        run(coordinator)
    assert ended.value.code == 143
    assert set(coordinator.cancelled) >= {"j-1", "j-2"}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_job_that_the_coordinator_has_forgotten_is_lost() -> None:
    ends = run(FakeCoordinator({0: "succeeded", 2: "succeeded"}))
    assert [end.state for end in ends] == ["succeeded", "lost", "succeeded"]


@pytest.mark.parametrize(
    ("coordinator", "error", "cancelled"),
    [
        (FakeCoordinator(refuse=2), UnicronError, ["j-0", "j-1"]),
        (FakeCoordinator({0: "succeeded", 1: "running", 2: "queued"}, KeyboardInterrupt()), KeyboardInterrupt,
         ["j-1", "j-2"]),
        (FakeCoordinator(CoordinatorUnavailable("away")), CoordinatorUnavailable, ["j-0", "j-1", "j-2"]),
    ],
)  # fmt: skip
def test_a_sweep_that_ends_early_cancels_what_is_left(
    coordinator: FakeCoordinator, error: type[BaseException], cancelled: list[str]
) -> None:
    with pytest.raises(error):
        run(coordinator, unavailable_seconds=0.0)
    assert coordinator.cancelled == cancelled
