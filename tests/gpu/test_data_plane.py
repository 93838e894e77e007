"""NCCL's communicator on a GPU: sums, aborts, deaths, resources. Several ranks share one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from gpu import kit

pytestmark = [pytest.mark.timeout(kit.limit()), pytest.mark.usefixtures("forking")]

HEARTBEAT_SECONDS = 10
RecordProperty = Callable[[str, Any], None]


def rounded(measured: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in measured.items()}


@pytest.mark.gpu("K1", worth=1, seconds=8)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_sums_of_all_elements(world: int) -> None:
    assert [rank["totals"] for rank in kit.run("sums", world)] == [[world * (world + 1) / 2]] * world


@pytest.mark.gpu("K2", worth=3, seconds=11)
def test_abort_beside_a_stopped_peer(record_property: RecordProperty) -> None:
    for rank, measured in enumerate(kit.run("stopped", 3, lost=1)):
        record_property(f"rank{rank}", rounded(measured))
        assert measured["error"] is not None
        assert measured["waited"] < 2
        assert measured["closed"] < 2
        assert measured["released"] < 2, "the abort ends the kernels"
        assert measured["kernels"] < 5


@pytest.mark.gpu("K3", worth=3, seconds=8)
def test_survivors_of_a_killed_peer(record_property: RecordProperty) -> None:
    for rank, measured in enumerate(kit.run("killed", 3, lost=1)):
        record_property(f"rank{rank}", rounded(measured))
        assert measured["error"] is not None
        assert measured["refused"] is not None, "nothing is enqueued in an aborted group"
        assert measured["closed"] < 2
        assert measured["released"] < 5
        assert measured["total"] == 3.0, "the survivors' group sums right"


@pytest.mark.gpu("K4", worth=2, seconds=8)
@pytest.mark.parametrize("missing", [0, 1])
def test_abandoned_connection_to_an_absent_rank(missing: int, record_property: RecordProperty) -> None:
    ranks = kit.run("absent", 2, extra={"KIT_ABSENT": str(missing)})
    measured = ranks[1 - missing]
    record_property("rank", rounded(measured))
    assert measured["finished"]
    assert measured["ended"] < 2
    assert [rank["total"] for rank in ranks] == [3.0, 3.0], "the next attempt"


@pytest.mark.gpu("K5", worth=6, seconds=60)
def test_thirty_epochs_leave_nothing_behind(record_property: RecordProperty) -> None:
    """Of plain data parallelism, and of groups like those of FSDP2 and Megatron; all groups are destroyed."""
    for rank, growth in enumerate(kit.run("cycles", 2, seconds=140)):
        record_property(f"rank{rank}", growth)
        assert growth["free"] > -(64 << 20)
        assert growth["threads"] <= 2
        assert growth["descriptors"] <= 4


@pytest.mark.gpu("K6", worth=2, seconds=70)
@pytest.mark.hardware
def test_joiners_live_beside_a_note_in_the_store(record_property: RecordProperty) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    short = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(HEARTBEAT_SECONDS), "KIT_SECONDS": str(4 * HEARTBEAT_SECONDS)}
    kit.run("noting", 2, lost=1, store=store, extra=short, settled=False)
    assert store.check(["exception_dump"]), "no watchdog has noted the error, so that nothing would be shown"
    for rank, measured in enumerate(kit.run("joining", 2, store=store, extra=short)):
        record_property(f"rank{rank}", measured)
        assert measured["sums"] > HEARTBEAT_SECONDS


@pytest.mark.gpu("K10", worth=6, seconds=12)
@pytest.mark.hardware
def test_abort_of_two_groups_whose_kernels_wait_for_each_other(record_property: RecordProperty) -> None:
    for rank, measured in enumerate(kit.run("chained", 3, lost=1)):
        record_property(f"rank{rank}", rounded(measured))
        assert measured["called"] < 1
        assert measured["aborted"] < 5
        assert measured["kernels"] < 5


@pytest.mark.gpu("K14", worth=3, seconds=15)
def test_a_bucket_beside_a_peers_abort(record_property: RecordProperty) -> None:
    """The result shows whether the peer's aborted kernel ends this rank's, as NCCL's sources say."""
    measured = kit.run("deceived", 3, lost=1)[0]
    record_property("rank0", measured)
    assert not (measured["complete"] and measured["trusted"]), "a sum without the stopped peer would count"


@pytest.mark.gpu("K15", worth=4, seconds=15)
def test_a_state_is_delivered_from_device_to_device(record_property: RecordProperty) -> None:
    """Windows of 64 MiB are staged on the receiver's device, whatever the size of the state is."""
    *givers, receiver = kit.run("delivered", 3)
    record_property("receiver", rounded(receiver))
    assert receiver["tensors"] == 3 and receiver["equal"]
    assert receiver["further"] < 2.5 * (64 << 20)  # a window of each of two sources
    for giver in givers:
        assert giver["tensors"] == 0 and giver["further"] < 1.5 * (64 << 20)


@pytest.mark.gpu("K16", worth=8, seconds=12)
def test_the_interpreter_runs_while_the_driver_waits(record_property: RecordProperty) -> None:
    for rank, measured in enumerate(kit.run("ticking", 3, lost=1)):
        record_property(f"rank{rank}", rounded(measured))
        assert measured["longest"] < 0.1
        assert measured["released"] < 2 and measured["freed"]


@pytest.mark.gpu("K20", worth=3, seconds=40)
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_thirty_recoveries_keep_no_memory(settings: str, record_property: RecordProperty) -> None:
    for rank, growth in enumerate(kit.run("recovered", 2, seconds=140, extra={"PYTORCH_CUDA_ALLOC_CONF": settings})):
        record_property(f"rank{rank}", growth)
        assert growth["reserved"] <= 0
        assert growth["free"] > -(64 << 20)


@pytest.mark.gpu("figure", worth=0.5, seconds=11)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_times_of_aborts_and_connections(world: int, record_property: RecordProperty) -> None:
    measured = kit.run("renewals", world)
    record_property("abort_seconds", round(max(rank["abort"] for rank in measured), 4))
    record_property("connect_seconds", round(max(rank["connect"] for rank in measured), 4))
    assert all(rank["connect"] < 10 for rank in measured)
