"""Checkpoints in an object store: real requests of S3 to a server on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator.shell import answers

from unicron_lightning.local_cluster.processes import free_port

PROGRAM = Path(__file__).parents[1] / "programs" / "saving.py"
SERVER = os.environ.get("MOTO_SERVER") or shutil.which("moto_server")


def run(place: str, environment: dict[str, str]) -> dict[str, object]:
    command = [sys.executable, str(PROGRAM), place]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check(answer: dict[str, object], place: str) -> None:
    assert answer["saved"] == [f"{place}/first/{name}" for name in ("epoch=0-step=10.ckpt", "last.ckpt")]
    assert answer["resumed"] and answer["read"] and answer["exported"]
    assert answer["names"] == ["epoch=0-step=10.ckpt", "last.ckpt"], "the checkpoint before is removed"


def test_a_folder(tmp_path: Path) -> None:
    check(run(str(tmp_path), dict(os.environ)), str(tmp_path))


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """The environment of clients of a store with one bucket."""
    if SERVER is None or importlib.util.find_spec("s3fs") is None:
        pytest.skip("needs s3fs, and moto_server on the path or in MOTO_SERVER")
    port = free_port()
    with subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", f"{port}"], stderr=subprocess.DEVNULL) as server:
        try:
            while not answers(port):
                time.sleep(0.05)
            yield {
                **os.environ,
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            }
        finally:
            server.terminate()


def test_s3(s3: dict[str, str]) -> None:
    make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    subprocess.run([sys.executable, "-c", make], env=s3, check=True, timeout=60)
    check(run("s3://bucket/run", s3), "s3://bucket/run")
