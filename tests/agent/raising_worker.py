"""A script that fails before a trainer exists. With an argument: it has an excepthook of its own."""

import sys
from pathlib import Path

before = sys.excepthook


def mine(kind, error, trace):
    (Path(sys.argv[1]) / "mine").write_text(kind.__name__)
    before(kind, error, trace)


sys.excepthook = mine

import torch  # noqa: E402, F401

raise ConnectionResetError(104, "Connection reset by peer")
