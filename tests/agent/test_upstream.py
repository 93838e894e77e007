"""Undocumented behaviour of torchelastic that the agent relies on. A failure means that upstream has changed."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.utils import store as store_util

from unicron_lightning.agent.handler import EXIT_BARRIER, RankStore
from unicron_lightning.agent.workers.forked import ForkedWorker
from unicron_lightning.errors import UnicronError


def rank_store(group_rank: int, finished: list[float] | None = None) -> RankStore:
    return RankStore(group_rank, lambda size: (10, 10 + size), (finished if finished is not None else []).append)


@pytest.mark.parametrize("group_rank", [0, 1, 2])
def test_ranks_come_from_the_store(group_rank: int) -> None:
    spec = SimpleNamespace(role="default", local_world_size=2)
    assign: Any = inspect.unwrap(SimpleElasticAgent._assign_worker_ranks)
    workers = assign(None, rank_store(group_rank), group_rank, 3, spec)
    assert [(w.local_rank, w.global_rank, w.world_size) for w in workers] == [(0, 10, 12), (1, 11, 12)]


def test_processes_are_started_by_one_method() -> None:
    """The agent replaces it where workers are forked (`unicron_lightning.agent.workers.forked`)."""
    assert list(inspect.signature(SubprocessHandler._popen).parameters) == ["self", "args", "env"]
    source = inspect.getsource(SubprocessHandler)
    assert source.count("self._popen(") == 1 and "self.proc: Popen = self._popen(args_str, env_vars)" in source
    assert "start_new_session" in inspect.getsource(SubprocessHandler._popen)
    assert {"_stdout", "_stderr"} <= set(re.findall(r"self\.(\w+) = ", source))
    used = set(re.findall(r"\.proc\.(\w+)", inspect.getsource(SubprocessContext) + source))
    assert used <= {*dir(ForkedWorker), *vars(ForkedWorker([], 1))}


def test_exit_barrier_goes_through_the_store() -> None:
    finished: list[float] = []
    barrier_source = inspect.getsource(SimpleElasticAgent._exit_barrier)
    assert "store_util.barrier(" in barrier_source
    assert "_TERMINAL_STATE_SYNC_ID" in barrier_source
    store_util.barrier(rank_store(0, finished), 1, EXIT_BARRIER, barrier_timeout=7)
    store_util.barrier(rank_store(1, finished), 3, EXIT_BARRIER, barrier_timeout=7)
    assert finished == [7.0, 7.0]


def test_exit_barrier_is_entered_on_success_only() -> None:
    source = inspect.getsource(SimpleElasticAgent._invoke_run)
    assert source.count("_exit_barrier()") == 1
    assert source.index("WorkerState.SUCCEEDED") < source.index("_exit_barrier()") < source.index("WorkerState.FAILED")


def test_unknown_keys_fail_loudly() -> None:
    store = rank_store(0)
    store.set_timeout(timedelta(seconds=1))
    calls: list[Any] = [
        lambda: store.set("x", "1"),
        lambda: store.get("x"),
        lambda: store.add("x", 1),
        lambda: store.multi_get(["x"]),
        lambda: store.multi_set(["x"], ["1"]),
        lambda: store.wait(["x"]),
    ]
    for call in calls:
        with pytest.raises(UnicronError, match="not supported"):
            call()


def test_entry_point_is_registered_and_light() -> None:
    assert "unicron" in rendezvous_handler_registry._registry
    code = (
        "import sys, json, unicron_lightning.agent.entry as e; e.get_creator(); print(json.dumps(sorted(sys.modules)))"
    )
    loaded = set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))
    assert not loaded & {"torch", "lightning", "aiohttp", "msgspec", "asyncio", "psutil"}
