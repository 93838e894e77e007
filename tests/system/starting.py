"""A small training that notes its processes: ``starting.py FOLDER``.

It notes whether torch was there at its first line, and sets a variable between the imports of torch and Lightning if
FOLDER/sets exists.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
HAD_TORCH = "torch" in sys.modules

import torch  # noqa: E402, F401

if (FOLDER / "sets").exists():
    os.environ["HF_HOME"] = "elsewhere"

from paced import train  # noqa: E402 - imports Lightning


def note(step: int) -> None:
    if step % 10 == 0:
        found = {"had_torch": HAD_TORCH, "home": os.environ.get("HF_HOME")}
        (FOLDER / f"note-{os.getpid()}").write_text(json.dumps(found))


if __name__ == "__main__":
    train(FOLDER, note, num_nodes=2)
