"""An environment into which this project's wheel is installed, with no repository on any path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from unicron_lightning.local_cluster.processes import MARK

ROOT = Path(__file__).parents[2]
CHECKOUT = ("benchmarks", "conf", "deploy", "docs", "examples", "tests")
"""Folders of a checkout that commands name; the packages are not among them."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The environment of a user: the wheel's commands come first in PATH.

    Attributes:
        checkout: the files of the repository, without its packages.
        environment: variables of a user's shell, with a home folder of its own.
    """

    checkout: Path
    environment: dict[str, str]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and install it; return the folder."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [ROOT / ".ci/wheel-environment", folder], check=True, timeout=120, env={**os.environ, "PYTHON": sys.executable}
    )
    (folder / "checkout").mkdir()
    for name in CHECKOUT:
        shutil.move(folder / "source" / name, folder / "checkout" / name)
    shutil.rmtree(folder / "source")
    return folder


@pytest.fixture
def installed(built: Path, tmp_path: Path) -> Iterator[Installed]:
    """Give a test the environment, with a home folder, and a folder for sockets whose path is short."""
    tests = ("UNICRON_TEST", MARK)
    own = {
        name: value for name, value in os.environ.items() if name.startswith(tests) or not name.startswith("UNICRON")
    }
    temporary = tempfile.mkdtemp(prefix="day-", dir="/tmp")
    home = tmp_path / "home"
    home.mkdir()
    own |= {"PATH": f"{built / 'venv/bin'}{os.pathsep}{own['PATH']}", "HOME": str(home), "TMPDIR": temporary}
    own |= {"XDG_STATE_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    yield Installed(checkout=built / "checkout", environment=own)
    shutil.rmtree(temporary)
