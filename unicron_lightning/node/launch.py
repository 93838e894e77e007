"""torchrun as a daemon starts it: it ends with the daemon, and its workers write into the daemon's log pipes.

    python -m unicron_lightning.node.launch TORCHRUN-OPTIONS SCRIPT ARGUMENTS

The kernel sends it SIGTERM when the daemon dies, by whatever cause, and it stops its workers as on any SIGTERM. So no
process remains that nothing would ever stop, and the next daemon starts with free accelerators.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from unicron_lightning.parent_death import tie_to

DAEMON_PID: Final = "UNICRON_DAEMON_PID"
"""Process id of the daemon."""
PIPES: Final = "UNICRON_LOG_PIPES"
"""Folder with a named pipe for each local rank."""


def pipe_name(local_rank: int) -> str:
    """Return the name of a local rank's pipe in its folder."""
    return f"rank{local_rank}"


def main(arguments: list[str]) -> None:
    """Run torchrun, then end the process."""
    daemon, pipes = int(os.environ.pop(DAEMON_PID)), Path(os.environ.pop(PIPES))
    if not tie_to(daemon):
        sys.exit(1)
    _torchrun(arguments, pipes)


def _torchrun(arguments: list[str], pipes: Path) -> None:
    # After the tie: importing torch takes seconds.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    class PipedLogs(DefaultLogsSpecs):
        """Both streams of a worker go into its pipe; error files stay at their usual place."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            destination = super().reify(envs)
            for local_rank in envs:
                path = str(pipes / pipe_name(local_rank))
                destination.stdouts[local_rank] = destination.stderrs[local_rank] = path
            return destination

    @record
    def run() -> None:
        config, command, rest = config_from_args(parse_args(arguments))
        config.logs_specs = PipedLogs(log_dir=str(pipes / "torchelastic"))
        elastic_launch(config=config, entrypoint=command)(*rest)

    run()


if __name__ == "__main__":
    main(sys.argv[1:])
