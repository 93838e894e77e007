"""An agent that is told to end as soon as it has begun: it cleans up like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from unicron_lightning.agent import handler

tell = handler.logger.info

def told(message, *arguments):
    if message.startswith("agent_started"):
        os.kill(os.getpid(), signal.SIGTERM)
    tell(message, *arguments)

handler.logger.info = told
settings = {"node": "n", "embedded": "false", "connect_timeout": "30"}
parameters = RendezvousParameters("unicron", "127.0.0.1:9", "task", 1, 2, **settings)
handler.UnicronRendezvousHandler(parameters).next_rendezvous()
"""


def test_sigterm_right_after_the_start(tmp_path: Path) -> None:
    """Between the making of the socket and the wait for a grant."""
    settings = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], env=settings, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("unicron-*/agent-*")), "its socket and folder are gone"
