"""Ties a worker's life to its agent's.

torchelastic starts workers in sessions of their own, so that they survive a SIGKILL of the agent as orphans that keep
their accelerators. The kernel's parent death signal ends that. It takes effect when the worker calls this function;
torch's entry points do so at ``import torch``. A worker behind a shell script is not the agent's child and is not
tied.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

from unicron_lightning import environ

_PR_SET_PDEATHSIG: Final = 1


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
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:  # it died before the call took effect
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
