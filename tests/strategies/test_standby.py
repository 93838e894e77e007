"""More workers than the trainer declares: they are used, stand by at the script's request, or are refused."""

from __future__ import annotations

import os
from pathlib import Path

from programs.launching import PROGRAMS, launch

from unicron_lightning.local_cluster.processes import free_port

SCRIPT = """
import os
import os
from pathlib import Path
import scenarios
from unicron_lightning.strategies.unicron import UnicronStrategy
result = scenarios.fit(Path({folder!r}), number=16, {settings})
Path({folder!r}, "trained-" + os.environ["RANK"]).write_text(str(len(result["losses"])))
"""


def run(folder: Path, settings: str, agents: int = 1) -> list[str]:
    """The number of steps of each worker that trained."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder), settings=settings))
    command = [*("--nnodes", f"1:{agents}"), *("--nproc-per-node", "2"), *("--rdzv-backend", "unicron")]
    endpoint = [*("--rdzv-id", "standby"), *("--rdzv-endpoint", f"127.0.0.1:{free_port()}")]
    launch(
        [*command, *endpoint, str(script)],
        folder,
        60,
        UNICRON_STATE_DIR=str(folder / "state"),
        PYTHONPATH=os.pathsep.join([str(PROGRAMS), str(PROGRAMS.parent), os.environ["PYTHONPATH"]]),
    )
    return [path.read_text() for path in folder.glob("trained-*")]


def test_a_worker_without_a_micro_batch_stands_by(tmp_path: Path) -> None:
    steps = run(tmp_path, "devices=1, strategy=UnicronStrategy(num_micro_batches=1)")
    assert steps == ["8"], "one worker trained, all ended well"


def test_workers_that_the_trainer_does_not_mention_are_used(tmp_path: Path) -> None:
    """ddp's world is torchrun's, too."""
    assert run(tmp_path, "devices=1") == ["4", "4"], "8 batches of 4 samples, 2 a step"
