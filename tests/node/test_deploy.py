"""The examples under deploy/ are well-formed, and the commands that they call exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from unicron_lightning.local_cluster.processes import until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
CUSTOM = {"JobSet", "TrainingRuntime", "TrainJob"}
"""Kinds of custom resources; a package has models of them."""
QUEUES = {"ResourceFlavor", "ClusterQueue", "LocalQueue"}
"""Those of Kueue."""
MANIFESTS = [path for path in sorted(KUBERNETES.rglob("*.yaml")) if path.name != "kustomization.yaml"]
MAIN = "from unicron_lightning.cli import main; main()"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_kubernetes_schemas(path: Path) -> None:
    for document in documents(path):
        if document["kind"] in CUSTOM:
            fits_custom_schema(document)
        elif document["kind"] in QUEUES:
            assert document["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        else:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def fits_custom_schema(document: dict[str, Any]) -> None:
    """Check a custom resource with Kubeflow's models, which ignore unknown keys, and its Jobs as Kubernetes' own."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    name = {"JobSet": "JobsetV1alpha2JobSet"}.get(document["kind"], f"TrainerV1alpha1{document['kind']}")
    assert document["apiVersion"] == (
        "jobset.x-k8s.io/v1alpha2" if "Jobset" in name else "trainer.kubeflow.org/v1alpha1"
    )
    assert getattr(models, name).from_dict(document).to_dict() == document, "it has keys that the models do not know"
    spec = document["spec"]
    for each in spec.get("replicatedJobs", spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
        assert each["template"]["spec"]["template"]["metadata"]["labels"]["app"] == "unicron-agent", "for the policies"


def test_a_custom_resource_with_a_misspelt_key_would_be_noticed() -> None:
    (job_set,) = documents(KUBERNETES / "jobset" / "jobset.yaml")
    job_set["spec"]["failurePolicy"]["rules"][0]["onJobFailureReason"] = []
    with pytest.raises(AssertionError, match="do not know"):
        fits_custom_schema(job_set)


@pytest.mark.parametrize("path", sorted(KUBERNETES.rglob("kustomization.yaml")), ids=lambda path: path.parent.name)
def test_a_kustomization_has_all_files_of_its_folder(path: Path) -> None:
    (made,) = documents(path)
    assert made["kind"] == "Kustomization" and made["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
    assert set(made["resources"]) == {other.name for other in path.parent.glob("*.yaml")} - {path.name}
    images = {
        text for each in made["resources"] for text in re.findall(r"image: (\S+):", (path.parent / each).read_text())
    }
    assert images - {image["name"] for image in made.get("images", [])} <= (
        {"registry.example/training"} if path.parent.name == "trainjob" else set()
    )


def test_a_manifest_with_a_misspelt_key_would_be_noticed() -> None:
    (secret,) = documents(DEPLOY / "kubernetes" / "secret.yaml")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**secret, "stringdata": {}}, kubernetes_validate.latest_version(), strict=True)


def test_there_is_no_default_token() -> None:
    (secret,) = documents(DEPLOY / "kubernetes" / "secret.yaml")
    assert not {"data", "stringData"} & secret.keys()


def test_manifests_refer_to_each_other() -> None:
    texts = {path.name: path.read_text() for path in MANIFESTS}
    attached = [texts[name] for name in ("jobset.yaml", "runtime.yaml")]
    assert all(
        "--rdzv-endpoint=unicron-coordinator:29461" in text and "secretName: unicron\n" in text for text in attached
    )
    everything = [document for path in MANIFESTS for document in documents(path)]
    names = {(document["kind"], document["metadata"]["name"]) for document in everything}
    assert {("Secret", "unicron"), ("Service", "unicron-coordinator")} <= names
    assert texts["agent.yaml"].count("--endpoint=unicron-coordinator:29461") == 1
    assert all("secretName: unicron\n" in texts[name] for name in ("agent.yaml", "coordinator.yaml"))


def test_kueue_admits_whole_nodes_up_to_its_quota() -> None:
    flavor, cluster_queue, local_queue = documents(KUBERNETES / "kueue" / "queues.yaml")
    (nodes,) = documents(KUBERNETES / "kueue" / "nodes.yaml")
    (agent,) = documents(KUBERNETES / "agent.yaml")
    assert nodes["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local_queue["metadata"]["name"]
    assert local_queue["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]
    (group,) = cluster_queue["spec"]["resourceGroups"]
    (quota,) = group["flavors"]
    assert quota["name"] == flavor["metadata"]["name"]
    (limits,) = quota["resources"]
    assert [limits["name"]] == group["coveredResources"]
    pod = nodes["spec"]["template"]["spec"]
    asked = int(pod["containers"][0]["resources"]["limits"][limits["name"]])
    assert asked * nodes["spec"]["replicas"] == limits["nominalQuota"] + limits["borrowingLimit"]
    daemon = agent["spec"]["template"]["spec"]
    assert pod == {name: value for name, value in daemon.items() if name != "nodeSelector"}, "the same daemon"


def test_network_policies_select_pods_that_exist() -> None:
    everything = [document for path in MANIFESTS for document in documents(path)]
    pods = {
        each["spec"]["template"]["metadata"]["labels"]["app"]
        for each in everything
        if each["kind"] in ("Deployment", "DaemonSet")
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


@pytest.mark.parametrize("path", sorted([*DEPLOY.rglob("*.sbatch"), *DEPLOY.rglob("*.sh")]), ids=lambda path: path.name)
def test_batch_scripts_are_well_formed(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    assert path.read_text().startswith("#!/bin/bash\n")


def executables(folder: Path, **texts: str) -> dict[str, str]:
    """Write shell scripts, and return an environment that finds them first."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_nodes_that_slurm_drains_are_drained_and_resumed(tmp_path: Path) -> None:
    calls, sinfo, state = tmp_path / "calls", tmp_path / "nodes", tmp_path / "state" / "drained"
    environment = executables(
        tmp_path,
        sinfo=f'[ "$*" = "--noheader --Node --format=%N %t" ] && cat "{sinfo}"',
        unicron=f'echo "$@" >> "{calls}"; [ "$2" != n9 ]',
    )

    def poll(*nodes: str) -> list[str]:
        calls.write_text("")
        sinfo.write_text("".join(f"{node}\n" for node in nodes))
        command = ["bash", str(DEPLOY / "slurm" / "drain-poller.sh"), "0", str(state)]
        subprocess.run(command, env=environment, check=True, timeout=20)
        return calls.read_text().splitlines()

    assert poll("n1 idle", "n2 alloc", "n3 mix") == []
    asked = poll("n1 drng", "n1 drng", "n2 drain*", "n3 mix", "n4 down*", "n9 drain")
    assert asked == ["drain n1", "drain n2", "drain n9"], "once, although n1 is in two partitions"
    assert poll("n1 drain", "n2 drain*", "n9 drain") == ["drain n9"], "which Unicron did not know"
    assert poll("n1 idle", "n2 drain", "n5 alloc") == ["undrain n1"]
    sinfo.unlink()
    assert state.read_text().split() == ["n2"]


@pytest.mark.parametrize(("torchrun", "asked", "status"), [("exit 0", False, 0), ("exit 3", False, 3), ("", True, 143)])
def test_a_container_that_left_in_order_is_no_success(torchrun: str, asked: bool, status: int, tmp_path: Path) -> None:
    waits = f"trap 'exit 0' TERM; touch '{tmp_path}/ready'; while true; do sleep 0.02; done"
    environment = executables(tmp_path, torchrun=torchrun or waits)
    with subprocess.Popen(["bash", str(DEPLOY / "container" / "attached.sh"), "--x"], env=environment) as process:
        if asked:
            until("torchrun", (tmp_path / "ready").exists)
            process.terminate()
        assert process.wait(20) == status


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
    values = {"store.endpoints": "[]"}
    shown = subprocess.run(
        [sys.executable, "-c", MAIN, "coordinator", "--cfg", "job",
         *(f"{name}={values.get(name, 1)}" for name in sorted(settings))],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
