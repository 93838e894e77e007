"""The store that torchelastic's agent gets from the rendezvous.

torchelastic makes all agents meet over this store to agree on ranks, and again at the end. Here both are the
coordinator's decision, and no agent ever waits for another one. The store is an object of this process that answers
the few keys that torchelastic uses. It relies on these calls (torch 2.11 to 2.13, ``elastic/agent/server/api.py``):

* ``set("torchelastic/role_info/<group rank>")`` with the local world size, then
  ``get("torchelastic/assigned_ranks/<group rank>")``, answered ``[base global rank, world size, base role rank,
  role world size]``; in group rank 0, between the two, a ``multi_get`` of all role infos and a ``multi_set`` of all
  assigned ranks;
* ``add("torchelastic/agent/terminal_state/num_members", 1)`` and ``wait`` as the barrier at the end, only entered
  when all local workers have succeeded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from unicron_lightning.errors import UnicronError

ROLE_INFO: Final = "torchelastic/role_info/"
ASSIGNED_RANKS: Final = "torchelastic/assigned_ranks/"
EXIT_BARRIER: Final = "torchelastic/agent/terminal_state"


class RankStore:
    """Answers torchelastic's requests of one round.

    Args:
        group_rank: rank of this agent.
        ranks_of: given the local world size, returns (first global rank, world size); may block.
        finish: called when all local workers have succeeded; returns when the agent may exit.
    """

    def __init__(
        self, group_rank: int, ranks_of: Callable[[int], tuple[int, int]], finish: Callable[[float], None]
    ) -> None:
        self.timeout = timedelta(seconds=300)
        self._group_rank = group_rank
        self._ranks_of = ranks_of
        self._finish = finish
        self._role_info: bytes | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of `wait`."""
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        """Record the role info of this agent."""
        if key == f"{ROLE_INFO}{self._group_rank}":
            self._role_info = value if isinstance(value, bytes) else str(value).encode()
        elif not key.startswith(EXIT_BARRIER):
            raise _unknown("set", key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return this agent's role info for each key: the ranks that group rank 0 computes from them are not used."""
        for key in keys:
            if not key.startswith(ROLE_INFO) or self._role_info is None:
                raise _unknown("multi_get", key)
        assert self._role_info is not None or not keys
        return [self._role_info or b""] * len(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Ignore the ranks that group rank 0 assigned."""
        for key in keys:
            if not key.startswith(ASSIGNED_RANKS):
                raise _unknown("multi_set", key)

    def get(self, key: str) -> bytes:
        """Return the coordinator's ranks."""
        if key != f"{ASSIGNED_RANKS}{self._group_rank}" or self._role_info is None:
            raise _unknown("get", key)
        base, world = self._ranks_of(int(json.loads(self._role_info)["local_world_size"]))
        return json.dumps([base, world, base, world]).encode()

    def add(self, key: str, amount: int) -> int:
        """Enter the barrier at the end; never as its last member, so that `wait` is called."""
        if not key.startswith(EXIT_BARRIER):
            raise _unknown("add", key)
        return 0

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait in the barrier at the end."""
        for key in keys:
            if not key.startswith(EXIT_BARRIER):
                raise _unknown("wait", key)
        self._finish((timeout or self.timeout).total_seconds())


def _unknown(method: str, key: str) -> UnicronError:
    return UnicronError(
        f"torchelastic called store.{method} with the unknown key {key!r}: this version of torch is not supported"
    )
