"""The coordinators of deploy/kubernetes/etcd and deploy/slurm, started by their own command lines on this machine."""

from __future__ import annotations

import datetime
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from coordinator.fake_etcd import MISSING, EtcdMembers, certificate_of_a_member, installed, three_members
from node.test_deploy import DEPLOY, executables

from unicron_lightning.cli.certs import write_certificates
from unicron_lightning.local_cluster.processes import free_port, until

pytestmark = [pytest.mark.chaos, pytest.mark.faults, pytest.mark.skipif(not installed(), reason=MISSING)]
MANIFEST = DEPLOY / "kubernetes" / "etcd" / "coordinators.yaml"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[tuple[EtcdMembers, Path]]:
    """Members that ask for certificates, and the folder of a secret for their clients."""
    folder = tmp_path / "certificates"
    write_certificates(folder, ["127.0.0.1"], ["me"], datetime.timedelta(days=1))
    (folder / "member.pem").write_bytes(certificate_of_a_member(folder).pem)
    for name, source in (("ca.crt", "ca.pem"), ("tls.crt", "member.pem"), ("tls.key", "member.pem")):
        (folder / name).write_bytes((folder / source).read_bytes())
        (folder / name).chmod(0o600)
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    with three_members(tmp_path / "etcd", certificates=folder) as members:
        yield members, folder


def is_ready(port: int, probe: dict[str, str], host: str = "127.0.0.1") -> bool:
    """Whether a kubelet's probe succeeds, which checks no certificate."""
    url = f"{probe['scheme'].lower()}://{host}:{port}{probe['path']}"
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def running(command: list[str], output: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which is killed with all that it has started."""
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_two_coordinators_of_the_deployment(etcd: tuple[EtcdMembers, Path], tmp_path: Path) -> None:
    """On loopback, with `coordinator.tls=auto`, which other addresses have by themselves."""
    members, folder = etcd
    deployment, service = yaml.safe_load_all(MANIFEST.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]["httpGet"]
    assert deployment["spec"]["replicas"] == 2
    assert probe["port"] == service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    ports = free_port(), free_port()
    commands = []
    for port in ports:
        here = {
            "coordinator.host=0.0.0.0": "coordinator.host=127.0.0.1",
            "coordinator.port=29461": f"coordinator.port={port}",
            "/etc/unicron/token": str(tmp_path / "token"),
            "/etc/unicron-etcd/": f"{folder}/",
            "/var/lib/unicron/state": str(tmp_path / f"state-{port}"),
        }
        words = list(container["command"])
        for given, replaced in here.items():
            assert any(given in word for word in words), given
            words = [word.replace(given, replaced) for word in words]
        at = next(number for number, word in enumerate(words) if word.startswith("store.endpoints="))
        assert words[at].count("https://etcd-") == 3
        words[at] = f"store.endpoints=[{','.join(members.urls)}]"
        commands.append([str(Path(sys.executable).with_name(words[0])), *words[1:], "coordinator.tls=auto"])
    with ExitStack() as stack:
        pods = {
            port: stack.enter_context(running(command, tmp_path / f"log-{port}", dict(os.environ)))
            for port, command in zip(ports, commands, strict=True)
        }
        until("one is ready", lambda: any(is_ready(port, probe) for port in ports), seconds=60)
        leader = next(port for port in ports if is_ready(port, probe))
        (other,) = set(ports) - {leader}
        until("the other stands by", lambda: "stands_by leader=" in (tmp_path / f"log-{other}").read_text(), seconds=60)
        assert not is_ready(other, probe) and pods[other].poll() is None
        os.killpg(pods[leader].pid, signal.SIGKILL)
        until("the other is ready", lambda: is_ready(other, probe), seconds=30)


def test_two_coordinators_of_a_slurm_job(etcd: tuple[EtcdMembers, Path], tmp_path: Path) -> None:
    """With srun and scontrol of one machine: two tasks at two loopback addresses. A task begins again when it ends."""
    members, folder = etcd
    port = free_port()
    script = tmp_path / "coordinators.sbatch"
    text = (DEPLOY / "slurm" / "coordinators.sbatch").read_text()
    assert "coordinator.host=0.0.0.0" in text and text.count("29461") >= 2
    text = text.replace("host=0.0.0.0", "host=127.0.0.$((SLURM_PROCID + 1)) coordinator.tls=auto")
    text = text.replace('UNICRON_ETCD_CA"}', 'UNICRON_ETCD_CA"} "store.cert=$CERT"')
    script.write_text(text.replace("29461", str(port)))
    environment = executables(
        tmp_path,
        scontrol='[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"',
        srun='while [[ $1 = -* ]]; do shift; done\nSLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait',
    )
    environment |= {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "UNICRON_ETCD": ",".join(members.urls),
        "UNICRON_ETCD_CA": str(folder / "ca.crt"),
        "CERT": str(folder / "tls.crt"),
        "UNICRON_TOKEN_FILE": str(tmp_path / "token"),
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    hosts, probe = ("127.0.0.1", "127.0.0.2"), {"scheme": "HTTPS", "path": "/healthz"}

    def ready() -> list[str]:
        return [host for host in hosts if is_ready(port, probe, host)]

    with running(["bash", str(script)], tmp_path / "log", environment) as job:
        until("one is ready", ready, seconds=60)
        (leader,) = ready()
        (other,) = set(hosts) - {leader}
        log = tmp_path / "log"
        until("the other stands by", lambda: log.read_text().count("stands_by leader=") == 1, seconds=60)
        assert log.read_text().splitlines()[0] == f"UNICRON_ENDPOINT=n1:{port},n2:{port}"
        [process] = [
            each
            for each in psutil.Process(job.pid).children(recursive=True)
            if f"coordinator.host={leader}" in each.cmdline()
        ]
        process.kill()
        until("the other is ready", lambda: other in ready(), seconds=30)
        until("the killed one stands by", lambda: log.read_text().count("stands_by leader=") == 2, seconds=30)
        assert ready() == [other]
