"""The examples under deploy/ are well-formed, and the commands that they call exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MAIN = "from unicron_lightning.cli import main; main()"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_kubernetes_schemas(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_manifest_with_a_misspelt_key_would_be_noticed() -> None:
    (secret,) = documents(DEPLOY / "kubernetes" / "secret.yaml")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**secret, "stringdata": {}}, kubernetes_validate.latest_version(), strict=True)


def test_there_is_no_default_token() -> None:
    (secret,) = documents(DEPLOY / "kubernetes" / "secret.yaml")
    assert not {"data", "stringData"} & secret.keys()


def test_manifests_refer_to_each_other() -> None:
    texts = {path.name: path.read_text() for path in MANIFESTS}
    everything = [document for path in MANIFESTS for document in documents(path)]
    names = {(document["kind"], document["metadata"]["name"]) for document in everything}
    assert {("Secret", "unicron"), ("Service", "unicron-coordinator")} <= names
    assert texts["agent.yaml"].count("--endpoint=unicron-coordinator:29461") == 1
    assert all("secretName: unicron\n" in texts[name] for name in ("agent.yaml", "coordinator.yaml"))


def test_network_policies_select_pods_that_exist() -> None:
    everything = [document for path in MANIFESTS for document in documents(path)]
    pods = {
        each["spec"]["template"]["metadata"]["labels"]["app"]
        for each in everything
        if "template" in each.get("spec", {})
    }
    policies = [document for document in everything if document["kind"] == "NetworkPolicy"]
    selected = {each["spec"]["podSelector"]["matchLabels"]["app"] for each in policies}
    assert selected == pods == {"unicron-agent", "unicron-coordinator"}
    named = {
        peer["podSelector"]["matchLabels"].get("app")
        for each in policies
        for rule in each["spec"]["ingress"]
        for peer in rule["from"]
    }
    assert named - {None} <= pods


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts_are_well_formed(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    assert path.read_text().startswith("#!/bin/bash\n")


def test_options_that_are_used_exist() -> None:
    texts = [path.read_text().replace("\\\n", " ") for path in DEPLOY.rglob("*") if path.is_file()]
    lines = [line.strip() for text in texts for line in text.splitlines() if not line.strip().startswith("#")]
    agent = (line for path in MANIFESTS if path.name == "agent.yaml" for line in path.read_text().splitlines())
    lines.append("unicron agent " + " ".join(re.findall(r"- (--[\w-]+)=", "\n".join(agent))))
    used = {
        (command, option)
        for line in lines
        for command, rest in re.findall(r"\bunicron (agent|submit|jobs) ([^|&;>]*)", line)
        for option in re.findall(r"--[a-z-]+", rest)
    }
    assert {command for command, _ in used} == {"agent", "submit", "jobs"}
    helps = {
        command: subprocess.run(
            [sys.executable, "-c", MAIN, command, "--help"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for command in {command for command, _ in used}
    }
    assert {(command, option) for command, option in used if option not in helps[command]} == set()
    settings = set(re.findall(r"\b((?:coordinator|store)\.\w+)=", "\n".join(lines)))
    shown = subprocess.run(
        [sys.executable, "-c", MAIN, "coordinator", "--cfg", "job", *(f"{name}=1" for name in sorted(settings))],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
