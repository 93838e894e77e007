"""The configuration: composed values, refusals, and agreement with the document."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unicron_lightning.coordinator import config as schema
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.__main__ import explain, from_composed, register_schema
from unicron_lightning.coordinator.allocation.answers import keep
from unicron_lightning.coordinator.events import Competitor, Question
from unicron_lightning.coordinator.machine import Machine, inputs_at_start
from unicron_lightning.coordinator.state import Cluster
from unicron_lightning.coordinator.storage import prepare_state_dir
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.terms import Terms

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "configuration.md"
GROUPS = {
    "coordinator": schema.ProcessConfig,
    "cluster": schema.ClusterConfig,
    "tasks.NAME": schema.TaskConfig,
    "planner": schema.PlannerConfig,
    "detection": schema.DetectionConfig,
    "severity": schema.SeverityConfig,
    "health": schema.HealthConfig,
    "store": schema.StoreConfig,
}


def composed(*overrides: str) -> Any:
    register_schema()
    with initialize_config_module(version_base="1.3", config_module="unicron_lightning.conf"):
        return compose(config_name="coordinator", overrides=list(overrides))


def configured(*overrides: str) -> schema.CoordinatorConfig:
    return from_composed(composed(*overrides))


def test_the_defaults_of_configuration_and_machine_agree() -> None:
    # The machine alone, as in tests and simulations, keeps no warm stand-bys.
    assert configured().limits() == replace(ev.Limits(), warm_standby=True)


def test_the_yaml_files_say_what_the_schema_does() -> None:
    config = configured()
    assert config.coordinator == schema.ProcessConfig()
    assert config.cluster == schema.ClusterConfig()
    assert config.planner == schema.PlannerConfig()
    assert config.severity == schema.SeverityConfig()
    assert config.health == schema.HealthConfig()
    assert config.store == schema.StoreConfig()
    assert config.tasks == {}


def test_the_groups_are_those_of_the_configuration() -> None:
    assert {name.partition(".")[0] for name in GROUPS} == {field.name for field in fields(schema.CoordinatorConfig)}


def test_every_time_of_detection_follows_the_base_time_out() -> None:
    normal, scaled = configured().detection, configured("detection.timeout=40").detection
    for field in fields(schema.DetectionConfig):
        if field.name.endswith("_factor") or field.name == "witness":
            continue
        assert getattr(scaled, field.name) == pytest.approx(4 * getattr(normal, field.name)), field.name


def test_a_time_that_is_given_does_not_follow() -> None:
    detection = configured("detection=fast", "detection.join_grace=1").detection
    assert (detection.timeout, detection.join_grace, detection.comm_error_grace) == (3.0, 1.0, 0.15)


def test_agents_leave_a_silent_leader_when_its_lease_has_ended() -> None:
    etcd = ("store=etcd", "store.endpoints=[http://127.0.0.1:2379]")
    assert configured().limits().silence.most == configured().detection.most_silence == 4.5
    assert configured(*etcd).limits().silence.most == 3
    assert configured(*etcd, "store.lease_seconds=10").limits().silence.most == 4.5
    assert configured(*etcd, "detection.least_silence=3.5").limits().silence.most == 3.5


def test_agents_can_come_back_however_short_the_base_is() -> None:
    detection = configured("detection.timeout=0.1").detection
    assert (detection.restart_grace, detection.worker_timeout) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("detection=fast", "detection.timeout", 3.0),
        ("detection=patient", "detection.timeout", 30.0),
        ("cluster=network", "coordinator.host", "0.0.0.0"),
        ("coordinator=embedded", "coordinator.exit_when_idle", True),
        ("planner=fixed", "planner.enabled", False),
        ("severity=paper", "severity.strict", True),
        ("severity=paper", "severity.reattempt_limit", 1),
        ("severity=paper", "severity.cordon_failures", 2),
        ("severity=paper", "severity.hold_timeout", 31536000.0),
        ("detection=paper", "detection.witness", False),
        ("detection=paper", "detection.degraded_time", 0.0),
    ],
)
def test_a_choice_changes_what_it_is_for(override: str, key: str, value: object) -> None:
    assert OmegaConf.select(composed(override), key) == value
    assert OmegaConf.select(composed(), key) != value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["coordinator.prot=1"], "coordinator.prot: unknown key; known are allow_injection, exit_when_idle, "),
        (["+coordinator.prot=1"], "coordinator.prot: unknown key; known are allow_injection, exit_when_idle, "),
        (["server.port=1"], "server: unknown key; known are cluster, coordinator, "),
        (["+server.port=1"], "server: unknown key; known are cluster, coordinator, "),
        (["detection=quick"], "detection/quick"),
        (["detection.timeout=soon"], "detection.timeout='soon': expected a number"),
        (["detection.timeout=0"], "detection.timeout=0.0: expected a number > 0"),
        (["detection.join_grace=inf"], "detection.join_grace=inf: expected a number >= 0"),
        (["planner.grow_seconds=0"], "planner.grow_seconds=0.0: expected a number > 0"),
        (["severity.crash_attempts=0"], "severity.crash_attempts=0: expected a number > 0"),
        (["health.nan_loss=weep"], "health.nan_loss=weep: expected tell or stop"),
        (["health.patterns=[{pattern: x, kind: bad}]"], "health.patterns: 'x' of kind 'bad': expected"),
        (["health.patterns=[{pattern: '(', kind: cuda_error}]"], "pattern '(' of kind cuda_error: missing )"),
        (["store.events_kept=0"], "store.events_kept=0: expected a number > 0"),
        (["+tasks.a.command=[x]"], "tasks.a: no such task; make it by +tasks@tasks.a=task first"),
        (["+tasks@tasks.a=task", "tasks.a.comand=[x]"], "tasks.a.comand: unknown key; known are activate, "),
        (["+tasks@tasks.a=task", "tasks.a.command=[x]", "tasks.a.weight=-1"], "tasks.a: weight=-1.0: expected"),
        (["+tasks@tasks.a=task"], "tasks.a: command=[]: expected"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(overrides: list[str], words: str) -> None:
    with pytest.raises((UnicronError, HydraException, OmegaConfBaseException)) as caught:
        configured(*overrides)
    assert words in explain(caught.value)


def test_tasks_are_chosen_from_files(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "small.yaml").write_text("# @package tasks.small\ncommand: [a.py]\n")
    (folder / "plain.yaml").write_text("command: [b.py]\nmax_nodes: 3\nprofile: {1: 2.5}\n")
    search = f"hydra.searchpath=[file://{tmp_path}]"  # the effect of --config-dir
    config = configured(search, "tasks=[small]", "+tasks@tasks.big=plain", "tasks.big.weight=2")
    small, big = config.jobs()
    assert (small.name, small.command, small.max_nodes) == ("small", ["a.py"], 1)
    assert (big.name, big.command, big.max_nodes, big.weight) == ("big", ["b.py"], 3, 2.0)
    assert big.profile == {1: 2.5}


def test_the_example_of_a_task_is_one() -> None:
    (job,) = configured("tasks=[example]").jobs()
    assert job.name == "example"


def test_a_state_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: -1)
    with pytest.raises(ConfigError, match="belongs to user"):
        prepare_state_dir(tmp_path)


@pytest.mark.parametrize("argument", ["--help", "--info"])
def test_hydras_own_options_work(argument: str) -> None:
    command = [sys.executable, "-m", "unicron_lightning.coordinator", argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "detection" in done.stdout


def test_the_document_has_every_key_with_its_default() -> None:
    text, config = DOCUMENT.read_text(encoding="utf-8"), OmegaConf.to_container(composed())
    assert isinstance(config, dict)
    rows = dict(re.findall(r"^\| `(\w+\.[\w.]+)` \| ([^|]*?) \|", text, re.MULTILINE))
    wanted = {}
    for group, kind in GROUPS.items():
        assert is_dataclass(kind)
        for field in fields(kind):
            default = config[group][field.name] if group in config else getattr(schema.TaskConfig(), field.name)
            wanted[f"{group}.{field.name}"] = f"`{_spelt(default)}`"
    assert rows == wanted


def _spelt(value: Any) -> str:
    derived = re.fullmatch(r"\$\{of_timeout:([\d.]+)(?:,([\d.]+))?\}", str(value))
    if derived:
        factor, least = derived.groups()
        return f"{factor} x timeout" + (f", at least {least}" if least else "")
    if named := re.fullmatch(r"\$\{endpoint_port:(\d+)\}", str(value)):
        return named[1]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(("column", "choice"), [(3, "fast"), (4, "normal"), (5, "patient")])
def test_the_table_of_derived_time_outs_is_right(column: int, choice: str) -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Derived time-outs")[2].partition("## Keys")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    detection = configured(f"detection={choice}").detection
    times = {name: value for name, value in vars(detection).items() if name != "witness"}
    assert {row[0].strip("`"): float(row[column]) for row in rows} == times


def test_the_document_names_every_choice() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    choices = [(path.parent.name, path.stem) for path in (ROOT / "conf").glob("*/*.yaml")]
    assert choices
    others = ("tasks", "examples", "simulate")  # groups of other commands
    assert [pair for pair in choices if pair[0] not in others and f"`{'='.join(pair)}`" not in text] == []


def test_what_was_configured_happens_once() -> None:
    config = configured("cluster.drained=[n1]", "+tasks@tasks.a=task", "tasks.a.command=[x]")
    assert inputs_at_start(config, Cluster()) == [
        ev.Drain(node="n1", drained=True),
        ev.Submit(jobs=tuple(config.jobs())),
    ]
    machine = Machine(config.limits())
    machine.handle(ev.Started(), 1.0)
    for event in inputs_at_start(config, machine.cluster):
        machine.handle(event, 1.0)
    assert machine.drained == ["n1"]
    assert inputs_at_start(config, machine.cluster) == [ev.Drain(node="n1", drained=True)]
    machine.handle(ev.Cancel(task="a"), 2.0)
    restarted = Machine(config.limits(), Cluster(lasting=machine.lasting))
    restarted.handle(ev.Started(), 3.0)
    assert inputs_at_start(config, restarted.cluster) == [ev.Drain(node="n1", drained=True)], "it has ended: not again"


def competitor(name: str, *, least: int = 1, most: int = 8, left: int = 0, step: int = 1) -> Competitor:
    terms = Terms(min_workers=least, max_workers=most, granularity=step, may_pause=False)
    return Competitor(name=name, terms=terms, runs=left > 0, before=left, left=left)


@pytest.mark.parametrize(
    ("tasks", "places", "allocation"),
    [
        ([competitor("a", left=4), competitor("b")], 4, {"a": 4, "b": 0}),
        ([competitor("a", left=4), competitor("b")], 6, {"a": 4, "b": 2}),
        ([competitor("a", most=2, left=2), competitor("b", most=1)], 6, {"a": 2, "b": 1}),
        ([competitor("a", least=3), competitor("b", least=2)], 4, {"a": 4, "b": 0}),
        ([competitor("a", least=3, left=1), competitor("b", least=2)], 3, {"a": 3, "b": 0}),
        ([competitor("a", least=4, left=1), competitor("b", least=2)], 3, {"a": 1, "b": 2}),
        ([competitor("a", step=2, left=3), competitor("b", most=2)], 6, {"a": 4, "b": 2}),
        ([competitor("a", step=4), competitor("b", most=1)], 3, {"a": 0, "b": 1}),
        ([competitor("a", least=3, step=2), competitor("b", least=2)], 7, {"a": 4, "b": 3}),
    ],
)
def test_without_the_planner_nobody_loses_a_place(
    tasks: list[Competitor], places: int, allocation: dict[str, int]
) -> None:
    question = Question(key="k", num_places=places, node_places=1, tasks=tuple(tasks))
    assert keep(question).allocation == allocation
