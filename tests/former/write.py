"""Writes the files of this version that later ones have to read: ``python tests/former/write.py`` makes files/VERSION.

Run it once for each release, see CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from unicron_lightning import LocalCluster, __version__, wire
from unicron_lightning.wire import daemon

HERE: Final = Path(__file__).parent
STEPS: Final = 10
"""Up to which the training is continued from the checkpoint."""
MESSAGES: Final[dict[str, Any]] = {
    "FromWorker": wire.FromWorker,
    "ToWorker": wire.ToWorker,
    "FromAgent": wire.FromAgent,
    "ToAgent": wire.ToAgent,
    "FromNode": daemon.FromNode,
    "ToNode": daemon.ToNode,
}
"""The messages of each direction of a link."""


def schema() -> dict[str, Any]:
    """Return the fields of all messages."""
    _, parts = msgspec.json.schema_components(MESSAGES.values(), ref_template="{name}")
    plain: dict[str, Any] = json.loads(json.dumps(parts))
    for each in plain.values():
        each.pop("description", None)
    return {"protocol": wire.PROTOCOL_VERSION, "messages": plain}


def main() -> None:
    """Write the files of this version."""
    files = HERE / "files" / __version__
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    (files / "wire.json").write_text(json.dumps(schema(), indent=1, sort_keys=True) + "\n")
    with tempfile.TemporaryDirectory(prefix="unicron-") as name:
        _train(Path(name), files)


def _train(folder: Path, files: Path) -> None:
    script = Path(shutil.copy(HERE / "train.py", folder))
    (folder / "hold").touch()
    with LocalCluster([script, folder, str(STEPS)], nodes=2, task="trained", nnodes="2:2", coordinator=[]) as cluster:
        cluster.until(
            "checkpoints", lambda: ((folder / "whole.ckpt").exists() and [*folder.glob("parts/*.ckpt")]) or None
        )
        cluster.submit("later", ["train.py"], min_nodes=3, max_nodes=3)
        state = cluster.state_dir
        cluster.kill_coordinator(signal.SIGTERM)
        _run("unicron", "state", "export", str(files / "state.json"), f"store.state_dir={state}")
        shutil.copy(state / "coordinator.sqlite", files)
    shutil.copy(folder / "whole.ckpt", files)
    shutil.copytree(folder / "parts", files / "parts")
    (folder / "hold").unlink()
    (folder / "continued").mkdir()
    _run(sys.executable, str(script), str(folder / "continued"), str(STEPS), str(folder / "whole.ckpt"))
    shutil.copy(folder / "continued" / "result.json", files)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
