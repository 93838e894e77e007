"""An ordinary worker notes the variables that its script sets before the imports which may read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from unicron_lightning import environ

SCRIPT = """
import os
import sys
{}
from unicron_lightning.prepared import set_by_script
import json
noted = set_by_script.noted()
print(json.dumps(None if noted is None else sorted(noted)))
"""
START = {"GIVEN": "1", "ÄÖ": "ü", "EMPTY": ""}


def noted(folder: Path, lines: str, *options: str, module: bool = False, **variables: str) -> list[str] | None:
    """Run a script as a worker; return what it has noted at its end."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(lines))
    words = ["-m", "script"] if module else [str(script)]
    given = {**os.environ, **START, environ.AGENT_PID: str(os.getpid()), **variables}
    command = [sys.executable, *options, *words]
    done = subprocess.run(command, env=given, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    found: list[str] | None = json.loads(done.stdout.splitlines()[-1])
    return found


UNCHANGED = """
os.environ["GIVEN"] = "2"
os.environ["GIVEN"] = "1"
os.environ.setdefault("GIVEN", "2")
os.environ.pop("ABSENT", None)
import torch
os.environ["LATER"] = "1"
"""
CHANGED = """
import unicron_lightning
os.environ["GIVEN"] = "2"
os.environ["NEW"] = ""
del os.environ["EMPTY"]
os.putenv("PUT", "5")
os.unsetenv("ÄÖ")
import beside
import numpy
os.environ["OMP_NUM_THREADS"] = "5"
import torch
"""


def test_variables_set_before_the_import_of_torch(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import os\nos.environ['BESIDE'] = '1'")
    assert noted(tmp_path, UNCHANGED, "-u") == []
    names = noted(tmp_path, CHANGED, "-u", module=True)
    assert names == ["BESIDE", "EMPTY", "GIVEN", "NEW", "OMP_NUM_THREADS", "PUT", "\ufffd" * 4]


def test_variables_set_before_the_import_of_lightning(tmp_path: Path) -> None:
    """Such as those of packages that torchmetrics imports. What imports set themselves does not count."""
    lines = "import torch\nos.environ['HF_HOME'] = 'x'\nimport lightning.pytorch\nos.environ['LATER'] = '1'"
    assert noted(tmp_path, lines, "-u") == ["HF_HOME"]
    lines = "import lightning.pytorch as pl\nos.environ['LATER'] = '1'\npl.Trainer(logger=False)"
    assert noted(tmp_path, lines, "-u") == []


def test_only_workers_that_could_be_forked_note(tmp_path: Path) -> None:
    assert noted(tmp_path, "", "-u") is None, "without torch"
    assert noted(tmp_path, "import torch") is None, "another command"
    assert noted(tmp_path, "import torch", "-u", TORCH_DEVICE_BACKEND_AUTOLOAD="0") is None, "without the import hook"
