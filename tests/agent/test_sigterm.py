"""An agent that receives SIGTERM at a bad moment cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

BEGINNING = """
import os, signal
from torch.distributed.elastic.multiprocessing.api import SignalException, _terminate_process_handler
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from unicron_lightning.agent import handler

def told_to_end():
    os.kill(os.getpid(), signal.SIGTERM)

def when_started(act):
    tell = handler.logger.info

    def told(message, *arguments):
        if message.startswith("agent_started"):
            act()
        tell(message, *arguments)

    handler.logger.info = told

settings = {"node": "n", "embedded": "false", "connect_timeout": "30"}
made = handler.UnicronRendezvousHandler(RendezvousParameters("unicron", "127.0.0.1:9", "task", 1, 2, **settings))
"""
RIGHT_AFTER_THE_START = """
when_started(told_to_end)
made.next_rendezvous()
"""
WHILE_IT_CLEANS_UP = """
def stop():
    raise StopIteration

when_started(stop)
try:
    made.next_rendezvous()
except StopIteration:
    pass
signal.signal(signal.SIGTERM, _terminate_process_handler)
handler.AgentThread.leaving = lambda agent: told_to_end()
try:
    made.shutdown()
except SignalException as error:
    raise SystemExit(77)
"""


WHILE_IT_CLEANS_UP_AFTER_A_ROUND = """
signal.signal(signal.SIGTERM, _terminate_process_handler)
departure = made._departure = handler.Departure(lambda: True, lambda: None, lambda: None, 20.0)
made._agent = type("Agent", (), dict(view=type("View", (), dict(stop=None, fatal=None)), failed=False,
    leaving=lambda agent: told_to_end(), say_bye=lambda agent, succeeded: None, close=lambda agent: None))()
made.num_nodes_waiting()
assert signal.getsignal(signal.SIGTERM) == departure._handle
try:
    made.shutdown()
except SignalException as error:
    raise SystemExit(77)
"""


def run(script: str, folder: Path) -> int:
    settings = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", BEGINNING + script]
    done = subprocess.run(command, env=settings, timeout=60, check=False)
    assert not list(folder.glob("unicron-*/agent-*")), "its socket and folder are gone"
    return done.returncode


def test_sigterm_right_after_the_start(tmp_path: Path) -> None:
    """Between the creation of the socket and the wait for a grant."""
    assert run(RIGHT_AFTER_THE_START, tmp_path) == 128 + signal.SIGTERM


def test_sigterm_while_it_cleans_up(tmp_path: Path) -> None:
    """By torchelastic's handler, which raises; it does so after the clean-up."""
    assert run(WHILE_IT_CLEANS_UP, tmp_path) == 77


def test_sigterm_while_it_cleans_up_after_a_round(tmp_path: Path) -> None:
    """Then SIGTERM is torchelastic's again, and not answered by a departure."""
    assert run(WHILE_IT_CLEANS_UP_AFTER_A_ROUND, tmp_path) == 77
