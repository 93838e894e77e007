"""``unicron agent``, the daemon of a node, and ``unicron logs``, the output of its tasks."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

from unicron_lightning.cli.client import access_of, access_options, connecting, fetch
from unicron_lightning.cli.output import log_visible, visible
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, UnicronError
from unicron_lightning.private_files import open_regular

_POLL_SECONDS: Final = 0.2
_TAIL_BYTES: Final = 64 << 10


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of ``unicron``."""
    agent = commands.add_parser("agent", parents=[connecting()], help="run submitted tasks on this node (a daemon)")
    agent.add_argument("--node", metavar="LABEL", help="label of the node; default: the host's name")
    agent.add_argument(
        "--slots",
        metavar="N|LABEL,...",
        help="number of equal slots, each for one task's workers at a time, or the slots' labels, in which "
        "0 or 0-3 select accelerators; default: one for each accelerator, one if there is none",
    )
    agent.add_argument("--logs", metavar="DIR", help="where the tasks' logs go; default: below the temporary folder")
    agent.add_argument("--log-size", type=float, default=16, metavar="MB", help="of one file; default: %(default)s")
    agent.add_argument("--log-files", type=int, default=3, metavar="N", help="full files kept; default: %(default)s")
    agent.add_argument("--local-addr", metavar="ADDR", help="this node's address for others; default: detected")
    agent.add_argument(
        "--stop-seconds", type=float, default=15, metavar="S", help="time to stop before a kill; default: %(default)s"
    )
    agent.add_argument("--rack", metavar="LABEL", help="of what the node shares with others and can be lost with")
    agent.add_argument("--kind", metavar="LABEL", help="of its accelerators: only jobs of that kind run on the node")
    agent.add_argument("--leave-signal", metavar="SIGNAL", help="USR1 or USR2: leave as on SIGTERM; default: none")
    agent.add_argument("--notice-file", metavar="FILE", help="leave as on SIGTERM when it appears; default: none")
    agent.set_defaults(run=_agent)
    logs = commands.add_parser("logs", parents=[connecting()], help="show a task's output on this node")
    logs.add_argument("task", metavar="TASK", help="its name (torchrun's --rdzv-id)")
    logs.add_argument("--rank", type=int, metavar="R", help="only this global rank, as the coordinator knows it now")
    logs.add_argument("--node", metavar="LABEL", help="only this node")
    logs.add_argument("--slot", metavar="LABEL", help="only this slot")
    logs.add_argument("--follow", action="store_true", help="continue until interrupted")
    logs.add_argument("--logs", metavar="DIR", help="as given to unicron agent")
    logs.set_defaults(run=_logs)


def _agent(options: argparse.Namespace) -> int:
    from unicron_lightning.node.daemon import serve
    from unicron_lightning.node.options import make_options

    made = make_options(
        endpoint=options.endpoint,
        node=options.node,
        slots=options.slots,
        logs=options.logs,
        log_megabytes=options.log_size,
        log_files=options.log_files,
        access=access_options(options),
        local_addr=options.local_addr,
        stop_seconds=options.stop_seconds,
        leave_on=options.leave_signal,
        notice_file=options.notice_file,
        rack=options.rack,
        kind=options.kind,
    )
    return serve(made)


def _logs(options: argparse.Namespace) -> int:
    from unicron_lightning.node.options import known_logs

    folders = [Path(options.logs).absolute()] if options.logs else known_logs()
    pattern = f"{options.node or '*'}/{options.slot or '*'}/*.log"
    if options.rank is not None:
        place, local_rank = _where(options)
        pattern = f"{place}/rank{local_rank}.log"
    folder = next((logs / options.task for logs in folders if any((logs / options.task).glob(pattern))), None)
    if folder is None:
        looked = ", ".join(f"{logs / options.task}/{pattern}" for logs in folders)
        raise ConfigError(f"no logs {looked} on this machine: expected --logs as given to its unicron agent")
    tails: dict[Path, Tail] = {}
    try:
        last = None
        while True:
            for path in sorted(folder.glob(pattern)):
                if path not in tails and not path.is_file():  # a pipe would block
                    continue
                if path not in tails:
                    tails[path] = Tail(path)
                text = tails[path].read()
                if text and len(tails) > 1 and last != path:
                    print(f"==> {visible(str(path.relative_to(folder)))} <==")
                if text:
                    last = path
                    print(log_visible(text), end="", flush=True)
            if not options.follow:
                return 0
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return 0
    finally:
        for tail in tails.values():
            tail.close()


def _where(options: argparse.Namespace) -> tuple[str, int]:
    """Return place and local rank of a global rank."""
    tasks: dict[str, Any] = fetch(options.endpoint, "/v1/status", access_of(options))["tasks"]
    task = tasks.get(options.task)
    if task is None:
        raise CoordinatorUnavailable(f"no task {options.task!r} runs: expected --node and --slot instead of --rank")
    member = next((each for each in task["members"] if each["rank"] == options.rank), None)
    if member is None:
        raise UnicronError(f"--rank {options.rank}: task {options.task!r} has ranks below {len(task['members'])}")
    agent_id, _, rest = member["worker"].rpartition("/")
    agent = next((each for each in task["agents"] if each["agent"] == agent_id), None)
    if agent is None or agent["place"] is None:
        raise UnicronError(f"--rank {options.rank} is not run by a unicron agent: its torchrun has its output")
    return agent["place"], int(rest.partition("#")[0])


class Tail:
    """The end of a file, and everything appended to it, even when another file takes its place.

    Args:
        path: the file.
        size: bytes of the end; the line in which they begin is left out.
    """

    def __init__(self, path: Path, size: int = _TAIL_BYTES) -> None:
        self._path = path
        self._file: BinaryIO = open(path, "rb", opener=open_regular)  # noqa: SIM115 - closed by `close`
        if path.stat().st_size > size:
            self._file.seek(-size - 1, os.SEEK_END)
            self._file.readline()

    def read(self) -> str:
        """Return the data since the last call."""
        data = self._file.read()
        try:
            if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                following = open(self._path, "rb", opener=open_regular)  # noqa: SIM115
                self._file.close()
                self._file = following
                data += self._file.read()
        except OSError:  # it is gone, or no regular file has taken its place
            pass
        return data.decode(errors="replace")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
