"""A wait for a peer of a group is recorded, so that a rank that waits is told from the one that it waits for."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unicron_lightning.replica.channels import Collective, PeerGroup, ProcessGroup
from unicron_lightning.worker.communication.gloo import wait_buried
from unicron_lightning.worker.control.activity import Activity


class Work:
    """A collective that ends, or breaks, at its third look; it notes whether the wait is recorded."""

    def __init__(self, activity: Activity, error: str = "") -> None:
        self._activity, self._error = activity, error
        self.seen: list[bool] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.seen.append(self._activity.now.waiting)
        if self._error or len(self.seen) < 3:
            raise RuntimeError(self._error or "not yet")
        return True

    def is_completed(self) -> bool:
        return bool(self._error)


class Group(PeerGroup):
    """A group whose peer stays connected."""

    def look_up(self, gone: bool) -> bool:
        return False


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_a_wait_is_recorded_until_it_ends(error: str) -> None:
    group, activity = Group(dist.HashStore(), 0, 1, "127.0.0.1"), Activity()
    group.activity = activity
    activity.enter("compute", 0)
    work: Any = Work(activity, error)
    if error:
        with pytest.raises(RuntimeError, match=error):
            Collective(work, group).wait()
    else:
        assert Collective(work, group).wait()
    assert work.seen and all(work.seen)
    assert not activity.now.waiting and activity.now.phase == "compute"
    group.close()


def test_another_threads_wait_is_not_recorded() -> None:
    group, activity = Group(dist.HashStore(), 0, 1, "127.0.0.1"), Activity()
    group.activity = activity
    work: Any = Work(activity)
    thread = threading.Thread(target=Collective(work, group).wait)
    thread.start()
    thread.join(20)
    assert work.seen == [False] * 3
    group.close()


def test_a_closed_group_leaves_no_back_end_to_the_training_thread() -> None:
    """The last reference would run torch's destructor, which waits for operations that are stuck."""
    first, second = (PeerGroup(dist.HashStore(), 0, 1, "127.0.0.1") for _ in range(2))
    user, other = ProcessGroup(first, 0, 1), ProcessGroup(first, 0, 1)
    backend = weakref.ref(first.backend)
    user.bind(second)
    first.close()
    assert wait_buried(20.0) and backend() is None
    ones = torch.ones(1)
    user.allreduce([ones], dist.AllreduceOptions()).wait()
    with pytest.raises(dist.DistNetworkError, match="connections are closed"):
        other.allreduce([ones], dist.AllreduceOptions())
    second.close()
