"""Rules, dashboard and document name metrics that exist; promtool accepts the rules and the text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from coordinator.metrics.test_meters import PROCESS, die, recover, training

from unicron_lightning.coordinator.metrics import METRICS, encoded, families

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "unicron-rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "unicron.json"
PROMTOOL = shutil.which("promtool")
SAMPLES = {"histogram": ("_bucket", "_count", "_sum")}
QUERIED = {f"{metric.name}{end}" for metric in METRICS for end in SAMPLES.get(metric.type, ("",))}
"""Names under which Prometheus stores the samples."""
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")


def rules() -> list[dict[str, object]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def named(expression: str) -> set[str]:
    return set(re.findall(r"\bunicron_\w+|\bunicron:\w+:\w+", expression))


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in panels["panels"] for target in panel.get("targets", ())]
    variables = [each["query"]["query"] for each in panels["templating"]["list"] if each["type"] == "query"]
    return [*(str(rule["expr"]) for rule in rules()), *targets, *variables]


def test_every_metric_that_rules_and_dashboard_name_exists():
    recorded = {str(rule["record"]) for rule in rules() if "record" in rule}
    found = set().union(*map(named, expressions()))
    assert len(found) > 30
    assert found - QUERIED - recorded == set()
    assert recorded


def test_labels_that_are_selected_exist():
    labels = {label for metric in METRICS for label in metric.labels} | {"le", "job", "instance"}
    for expression in expressions():
        selected = {
            name for inner in re.findall(r"\{([^}]*)\}", expression) for name in re.findall(r"(\w+)=?[!=~]", inner)
        }
        grouped = {
            name for inner in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for name in re.findall(r"\w+", inner)
        }
        assert (selected | grouped) - labels == set(), expression


def test_the_dashboard_is_one():
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])
    shown = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["targets"] for panel in shown)
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "task"}


def test_names_follow_the_conventions():
    for metric in METRICS:
        assert re.fullmatch(r"unicron_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert not re.search(r"milli|micro_?second|percent|minutes|hours", metric.name)
        assert set(metric.labels) <= {"task", "node", "phase", "kind", "state", "severity", "version"}
        assert metric.meaning.endswith(".")


def test_the_document_lists_every_metric():
    text = (ROOT / "docs" / "monitoring.md").read_text()
    rows = dict(re.findall(r"^\| `(unicron_\w+)` \| [^|]* \| ([^|]*) \|", text, re.MULTILINE))
    assert {name: labels.strip() for name, labels in rows.items()} == {
        metric.name: ", ".join(metric.labels) for metric in METRICS
    }


@needs_promtool
def test_promtool_accepts_rules_and_their_tests():
    for arguments in (["check", "rules", RULES.name], ["test", "rules", "unicron-rules.test.yaml"]):
        done = subprocess.run(
            [str(PROMTOOL), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_text_and_the_configuration(tmp_path):
    world, agents = training(3)
    die(world, agents[1], 0.25)
    recover(world, agents[0], 0.5)
    world.meters.review(world.machine.cluster, world.now)
    text, _ = encoded(families(world.meters, world.machine.cluster, **PROCESS), "")
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    command = [str(PROMTOOL), "check", "config", "--syntax-only", str(PROMETHEUS / "prometheus.yaml")]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
