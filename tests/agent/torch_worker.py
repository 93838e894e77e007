"""A toy worker whose script imports torch: ``torch_worker.py FOLDER``.

It sets OMP_NUM_THREADS before or after that if FOLDER/before or FOLDER/after exists, and notes what it has found.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
HAD_TORCH = "torch" in sys.modules

if (FOLDER / "before").exists():
    os.environ["OMP_NUM_THREADS"] = "2"
import torch  # noqa: E402

if (FOLDER / "after").exists():
    os.environ["OMP_NUM_THREADS"] = "2"

if __name__ == "__main__":
    from toy_worker import ToyWorker

    worker = ToyWorker(FOLDER)
    worker.note("imported", had_torch=HAD_TORCH, threads=torch.get_num_threads())
    worker.run()
