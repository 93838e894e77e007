"""The environment variables between an agent and its workers.

The agent sets them in its own environment before torchelastic starts the workers, which inherit it. Every worker reads
this module early, so it imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from unicron_lightning.errors import AgentUnavailable

AGENT_SOCKET: Final = "UNICRON_AGENT_SOCKET"
"""Path of the agent's UNIX socket."""
MEMORY_SOCKET: Final = "memory"
"""Name of the socket beside it, over which workers hand shared memory to the agent."""
AGENT: Final = "UNICRON_AGENT"
"""Identity of the agent."""
AGENT_PID: Final = "UNICRON_AGENT_PID"
"""Process of the agent; a worker dies with it."""
ROUND: Final = "UNICRON_ROUND"
"""The agent's rendezvous count, from 1."""
TASK: Final = "UNICRON_TASK"
"""The task, i.e. ``--rdzv-id``."""
NODE: Final = "UNICRON_NODE"
"""Label of the node."""
MAX_NODES: Final = "UNICRON_MAX_NODES"
"""Maximum of ``--nnodes``."""
HOST: Final = "UNICRON_HOST"
"""Address of this agent's machine for sockets between workers."""
BASE_RANK: Final = "UNICRON_BASE_RANK"
"""Global rank of the agent's first worker at its start; ``RANK`` minus this is the local rank in every launch mode."""

TOKEN: Final = "UNICRON_TOKEN"
"""Shared secret of the control plane, set by the user."""
ENDPOINT: Final = "UNICRON_ENDPOINT"
"""The coordinator's ``HOST:PORT`` for the command ``unicron``, set by the user."""
ETCD_PASSWORD: Final = "UNICRON_ETCD_PASSWORD"
"""Password of the coordinator's user of etcd, set by the user."""
ARRAY_INDEX: Final = "UNICRON_ARRAY_INDEX"
"""Index of a job of an array, for its script; set by ``unicron submit --array``."""
LOGS: Final = "UNICRON_LOGS"
"""Folder of the files ``rank<local rank>.log`` into which a daemon writes the output of torchrun's workers."""
PREPARE: Final = "UNICRON_PREPARE"
"""Whether agents have replacements of workers forked by a prepared process, set by the user."""
STATE_DIR: Final = "UNICRON_STATE_DIR"
"""State folder of an embedded coordinator, set by the user."""

KEEP_FREED: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
"""glibc's variables that let a process that trains on the CPU keep the memory of freed gradients.

By default glibc returns it to the kernel or not, depending on the layout of the heap, and thousands of page faults per
step fetch it again.
"""
MALLOC_THRESHOLD: Final = "2000000000"
"""[bytes] Value of both; the user's own values have priority."""

FROM_AGENT: Final = (AGENT_SOCKET, AGENT, AGENT_PID, ROUND, TASK, NODE, MAX_NODES, HOST, BASE_RANK, LOGS)
"""Variables set by an agent or its daemon, which a process that is no worker can be started without."""


def worker_id(agent: str, local_rank: int, round_number: int) -> str:
    """Return the identity of a worker; a restarted worker has a new one, as the round differs."""
    return f"{agent}/{local_rank}#{round_number}"


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """A worker's data from its start."""

    worker: str
    local_rank: int
    agent: str
    agent_pid: int
    agent_socket: str
    round: int
    task: str
    node: str
    host: str


def under_agent() -> bool:
    """Whether this process was started below an agent."""
    return AGENT_SOCKET in os.environ


def most_workers() -> int:
    """Return the largest number of workers of the task: maximum of ``--nnodes`` x ``--nproc-per-node``.

    0 without an agent, or with one that does not report it.
    """
    return int(os.environ.get(MAX_NODES, "0")) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def read(environ: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """Read the variables set by the agent.

    Raises:
        AgentUnavailable: this process was not started by ``torchrun --rdzv-backend unicron``.
    """
    try:
        round_number = int(environ[ROUND])
        local_rank = int(environ["RANK"]) - int(environ[BASE_RANK])
        agent = environ[AGENT]
        return WorkerEnvironment(
            worker=worker_id(agent, local_rank, round_number),
            local_rank=local_rank,
            agent=agent,
            agent_pid=int(environ[AGENT_PID]),
            agent_socket=environ[AGENT_SOCKET],
            round=round_number,
            task=environ[TASK],
            node=environ[NODE],
            host=environ[HOST],
        )
    except KeyError as missing:
        raise AgentUnavailable(
            f"the environment variable {missing} is not set: start the script with `torchrun --rdzv-backend unicron`"
        ) from None
