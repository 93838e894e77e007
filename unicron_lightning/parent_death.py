"""Ends processes with their parent, by whatever cause, with the kernel's parent death signal.

    python -m unicron_lightning.parent_death PARENT-PID MODULE ARGUMENTS

runs a module in a process that ends with its parent.

torchelastic starts workers in sessions of their own, so that they survive a SIGKILL of the agent as orphans that keep
their accelerators. The signal ends them. It takes effect when the worker calls `tie_to_agent`; torch's entry points do
so at ``import torch``. A worker behind a shell script is not the agent's child and is not tied.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

from unicron_lightning import environ

_PR_SET_PDEATHSIG: Final = 1


def tie_to(parent: int, number: int = signal.SIGTERM) -> bool:
    """Have the kernel send this process a signal when its parent ends.

    Returns:
        Whether the parent still lives; otherwise it died before the call took effect, and there is no signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent


def tie_to_agent() -> bool:
    """Have the kernel kill this process when the agent dies; exit at once if the agent is already gone.

    Returns:
        Whether this process is tied: it is a direct child of an agent.
    """
    text = os.environ.get(environ.AGENT_PID, "")
    if not text.isdigit():
        return False
    agent_pid = int(text)
    if os.getppid() != agent_pid:
        _exit_if_gone(agent_pid)
        return False
    if not tie_to(agent_pid, signal.SIGKILL):
        os._exit(1)
    return True


def _exit_if_gone(agent_pid: int) -> None:
    """Exit if the agent does not exist: this process is an orphan or a descendant of one."""
    try:
        os.kill(agent_pid, 0)
    except ProcessLookupError:
        os._exit(1)
    except PermissionError:
        pass


def main() -> None:
    """Tie this process to its parent, then run the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    if not tie_to(parent):
        sys.exit(1)
    sys.argv[:] = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
