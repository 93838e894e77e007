"""An error on all workers of one torchrun: the one that writes a checkpoint is not ended by the others' exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unicron_lightning.local_cluster.processes import free_port

SCRIPT = """
import sys
import time

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel


class Failing(BoringModel):
    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 3:
            raise RuntimeError("wrong on all ranks")

    def on_save_checkpoint(self, checkpoint):
        if self.trainer.global_step and self.trainer.is_global_zero:
            time.sleep(4)


saver = OnExceptionCheckpoint(sys.argv[1], "failed")
trainer = Trainer(strategy="unicron", accelerator="cpu", devices=2, max_epochs=1, limit_val_batches=0,
                  callbacks=[saver], enable_progress_bar=False, logger=False, default_root_dir=sys.argv[1])
trainer.fit(Failing())
"""

pytestmark = pytest.mark.faults


def test_a_checkpoint_after_an_error_is_written_whole(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"),
        *("--rdzv-backend", "unicron", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "t"),
        *("--max-restarts", "0", str(tmp_path / "script.py"), str(tmp_path)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNICRON_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "failed.ckpt").exists(), done.stderr
    assert done.stderr.count("RuntimeError: wrong on all ranks") >= 2, "both workers end by their own error"
    assert "Signal 9" not in done.stderr
