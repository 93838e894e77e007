"""The leak fixtures detect leaks; each case runs a small test file of its own in a second pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")

LEAKS = {
    "environment": "import os\ndef test_it():\n    os.environ['LEFT'] = '1'\n",
    "threads": (
        "import threading\ndef test_it():\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True, name='left').start()\n"
    ),
    "child": "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '60'])\n",
    "orphan": (
        "import subprocess\ndef test_it():\n"
        "    subprocess.run('setsid sleep 60 > /dev/null 2>&1 &', shell=True, check=True)\n"
    ),
    "socket": ("import socket\nkept = []\ndef test_it():\n    kept.append(socket.create_server(('127.0.0.1', 0)))\n"),
    "unix": (
        "import os, socket, tempfile\ndef test_it():\n"
        "    with socket.socket(socket.AF_UNIX) as s:\n        s.bind(tempfile.gettempdir() + '/left')\n"
    ),
}


def run_pytest(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run ``source`` as a test file under this suite's conftest, with a short grace."""
    conftest = CONFTEST.read_text().replace("GRACE_SECONDS = 10.0", "GRACE_SECONDS = 0.3")
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    allow_leak\n")
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_the_test(tmp_path: Path, kind: str) -> None:
    result = run_pytest(tmp_path, LEAKS[kind])
    assert result.returncode == 1, result.stdout
    assert "left behind" in result.stdout


def test_what_is_cleaned_up_passes(tmp_path: Path) -> None:
    source = (
        "import subprocess\ndef test_it(monkeypatch):\n"
        "    monkeypatch.setenv('X', '1')\n"
        "    import os; os.environ['PL_GLOBAL_SEED'] = '1'  # as seed_everything does\n"
        "    with subprocess.Popen(['sleep', '60']) as process:\n        process.kill()\n"
    )
    result = run_pytest(tmp_path, source)
    assert result.returncode == 0, result.stdout


def test_a_leak_can_be_allowed_by_kind(tmp_path: Path) -> None:
    source = "import pytest\npytestmark = pytest.mark.allow_leak('unix_sockets')\n" + LEAKS["unix"]
    result = run_pytest(tmp_path, source)
    assert result.returncode == 0, result.stdout
