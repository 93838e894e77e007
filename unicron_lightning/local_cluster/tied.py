"""Runs a module in a process that ends with its parent, by whatever cause.

python -m unicron_lightning.local_cluster.tied PARENT-PID MODULE ARGUMENTS
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def tie_to(parent: int) -> None:
    """Have the kernel end this process with its parent; end it now if the parent is already gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call took effect
        sys.exit(1)


def main() -> None:
    """Tie this process to its parent, then run the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    tie_to(parent)
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
