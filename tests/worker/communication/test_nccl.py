"""The NCCL communicator on a stand-in: errors, aborts and deaths at any point cause no wrong sum and block nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker.nccl_simulation import simulate_nccl
from worker.nccl_stand_in import REMOTE_ERROR, Host, Network, StandInGroup, StandInLibrary, Watchdog
from worker.test_engine import check

from unicron_lightning.agent.handler import REQUIRED, settle
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.channels import AcceleratedGroup, AcceleratedGroups
from unicron_lightning.worker.communication import backends, background_connect
from unicron_lightning.worker.communication.communicator import CommunicatorAborted
from unicron_lightning.worker.communication.lazy_groups import LazyGroups, Retirement, abort_apart, connect_apart
from unicron_lightning.worker.communication.nccl import NcclCommunicator, refusal
from unicron_lightning.worker.communication.owned_group import is_sticky, wait_destroyed

CPU = torch.device("cpu")
SOON = 0.5
"""[s] Limit for an immediate reaction; the stand-in blocks for several seconds where NCCL may block for minutes."""


class Pair:
    """Two ranks or more, the first of which is tested."""

    def __init__(self, world: int = 2, **network: float) -> None:
        self.world = world
        self.network = Network(world, **network)  # type: ignore[arg-type]
        self.store = dist.HashStore()
        self.hosts = [Host() for _ in range(world)]
        self.built: list[NcclCommunicator | None] = [None] * world
        threads = [threading.Thread(target=self._build, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        self.first = self._of(0)

    def _build(self, rank: int) -> None:
        library = StandInLibrary.of(self.network)
        self.built[rank] = NcclCommunicator(self.store, rank, self.world, CPU, self.hosts[rank], library)

    def _of(self, rank: int) -> NcclCommunicator:
        built = self.built[rank]
        assert built is not None
        return built

    @property
    def group(self) -> StandInGroup:
        return self.network.groups[0]

    def close(self) -> None:
        self.group.ready.set()
        for rank in range(self.world):
            self._of(rank).close()
        self.network.groups.clear()
        for rank in range(self.world):
            assert self._of(rank)._owned.join(20)


@pytest.fixture
def pair() -> Iterator[Pair]:
    two = Pair()
    yield two
    two.close()


def four(communicator: NcclCommunicator) -> list[Any]:
    return [communicator.all_reduce(torch.ones(3)) for _ in range(4)]


def test_sums(pair: Pair) -> None:
    tensors = [torch.full((3,), float(rank + 1)) for rank in range(2)]
    handles = [pair._of(rank).all_reduce(tensors[rank]) for rank in range(2)]
    for rank in range(2):
        pair._of(rank).wait(handles[rank])
        assert handles[rank].succeeded() and tensors[rank].tolist() == [3.0] * 3


def test_an_error_seen_by_the_library_first_counts_no_bucket_as_reduced(pair: Pair) -> None:
    handles = four(pair.first)
    pair.group.error = REMOTE_ERROR
    with pytest.raises(CommunicatorAborted, match="ncclRemoteError"):
        pair.first.wait(handles[0])
    assert [handle.succeeded() for handle in handles] == [False] * 4
    assert pair.hosts[0].aborted is not None, "the peers would not be told"


def test_an_abort_by_the_control_thread_counts_no_bucket_as_reduced(pair: Pair) -> None:
    handles = four(pair.first)
    pair.first.abort("epoch 2")
    with pytest.raises(CommunicatorAborted, match="epoch 2"):
        pair.first.wait(handles[0])
    assert pair.first.released(20)
    assert [handle.succeeded() for handle in handles] == [False] * 4


def test_after_a_peers_abort_a_bucket_looks_complete_that_is_not() -> None:
    """No order of this rank's looks and its own abort tells the two apart, so only the commit counts."""
    three = Pair(3, seed=12)  # the last rank has died, which the library has not noticed
    tensors = [torch.ones(3) for _ in range(4)]
    handles = [three.first.all_reduce(tensor) for tensor in tensors]
    four(three._of(1))
    three._of(1).abort("epoch 2")
    deadline = time.monotonic() + 20
    while not any(handle.succeeded() for handle in handles):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert three.first._owned.gate.reason is None, "this rank has not aborted"
    assert all(tensor[0] != 3.0 for tensor in tensors)
    assert not three.first.tells_success
    three.close()


@pytest.mark.parametrize("settled", [False, True])
def test_a_bucket_is_enqueued_while_a_peer_is_late(settled: bool) -> None:
    """With the agent's variables all connections exist when the communicator is handed out."""
    environment = dict[str, str]()
    if settled:
        settle(environment)
    lazily = environment.get("NCCL_RUNTIME_CONNECT", "1") != "0"
    two = Pair(connect_seconds=0.3 if lazily else 0.0)
    if settled:
        two.first.all_reduce(torch.ones(3))
    else:
        with pytest.raises(CommunicatorAborted, match="timeout"):
            two.first.all_reduce(torch.ones(3))
    two.close()


def test_the_interpreter_runs_while_the_driver_waits_for_a_dead_peer(pair: Pair) -> None:
    """Otherwise the control thread could not abort."""
    pair.network.driver_seconds = 0.5
    pair.first.all_reduce(torch.ones(3))
    longest, looked = 0.0, time.monotonic()
    end = looked + 1.0
    while looked < end:
        time.sleep(0.005)
        longest, looked = max(longest, time.monotonic() - looked), time.monotonic()
    assert longest < 0.4
    pair.network.driver_seconds = 0.0


def test_an_abort_while_a_bucket_is_enqueued(pair: Pair) -> None:
    pair.group.on_enqueue = lambda: pair.first.abort("epoch 2")
    handle = pair.first.all_reduce(torch.ones(3))
    with pytest.raises(CommunicatorAborted, match="epoch 2"):
        pair.first.wait(handle)
    assert not handle.succeeded()


def test_a_bucket_enqueued_after_the_error_is_an_abort_and_no_crash(pair: Pair) -> None:
    pair.group.error = REMOTE_ERROR
    with pytest.raises(CommunicatorAborted, match="ncclRemoteError"):
        pair.first.all_reduce(torch.ones(3))
    with pytest.raises(CommunicatorAborted):
        pair.first.broadcast(torch.ones(3), 1)


def test_a_slow_abort_holds_up_neither_its_caller_nor_the_waiter() -> None:
    two = Pair(abort_seconds=3.0)
    handle = two.first.all_reduce(torch.ones(3))
    started = time.monotonic()
    two.first.abort("epoch 2")
    with pytest.raises(CommunicatorAborted, match="epoch 2"):
        two.first.wait(handle)
    two.first.close()
    assert time.monotonic() - started < SOON * 3
    assert not two.first.released(0), "the library may still write"
    assert two.first.released(20)
    two.close()


def test_a_bucket_that_is_ready_during_a_slow_abort_does_not_wait_for_it() -> None:
    two = Pair(abort_seconds=3.0)
    two.first.abort("epoch 2")
    time.sleep(0.1)
    began = time.monotonic()
    with pytest.raises(CommunicatorAborted, match="epoch 2"):
        two.first.all_reduce(torch.ones(3))
    assert time.monotonic() - began < 2.0
    two.close()


def test_no_rank_of_a_host_frees_buffers_before_all_abort() -> None:
    two = Pair(abort_seconds=0.1)
    for rank in range(2):
        two._of(rank).all_reduce(torch.ones(3))
        two.network.groups[rank].works[-1].delivered = False  # its kernel never ends
    two.first.abort("epoch 2")
    time.sleep(0.3)
    assert not two.group.aborted, "the other rank's kernel runs"
    two._of(1).abort("epoch 2")
    assert two.first.released(20) and two._of(1).released(20)
    assert two.network.freed_early == []
    two.close()


def test_a_slow_destructor_runs_on_the_owners_thread() -> None:
    two = Pair(destroy_seconds=2.0)
    names = two.group.threads
    two.network.groups.clear()
    started = time.monotonic()
    for rank in range(2):
        two._of(rank).close()
    assert time.monotonic() - started < SOON * 2
    for rank in range(2):
        assert two._of(rank)._owned.join(20)
    assert names == {"unicron-nccl-0"}


def _build_alone(host: Host, network: Network, errors: list[BaseException]) -> NcclCommunicator | None:
    try:
        return NcclCommunicator(dist.HashStore(), 0, 2, CPU, host, StandInLibrary.of(network))
    except BaseException as error:  # noqa: BLE001 - looked at by the test
        errors.append(error)
        return None


def test_a_peer_that_is_lost_while_connecting_ends_the_attempt() -> None:
    network, host, errors = Network(2), Host(), []  # type: ignore[var-annotated]
    thread = threading.Thread(target=_build_alone, args=(host, network, errors))
    thread.start()
    host.lost = True
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(errors[0], CommunicatorAborted) and "lost while connecting" in str(errors[0])
    assert host.closed, "the host's group stays open"


def test_an_abandoned_attempt_is_given_up() -> None:
    network, host, errors = Network(2), Host(), []  # type: ignore[var-annotated]
    condition = threading.Condition()
    attempt = background_connect.Connecting(lambda epoch, rank, world: _build_alone(host, network, errors), _Epoch(), 0)  # type: ignore[arg-type,return-value]
    attempt.start(condition)
    assert attempt.take() is None
    with condition:
        assert condition.wait_for(lambda: attempt.finished, 20)
    assert "superseded" in str(errors[0]) and host.closed


class _Epoch:
    number = 1
    members = (0, 1)


def test_an_error_of_the_constructor_reaches_the_engine() -> None:
    def build(epoch: Any, rank: int, world: int) -> Any:
        raise ConfigError("no NCCL")

    condition = threading.Condition()
    attempt = background_connect.Connecting(build, _Epoch(), 0)  # type: ignore[arg-type]
    attempt.start(condition)
    with condition:
        assert condition.wait_for(lambda: attempt.finished, 20)
    with pytest.raises(ConfigError, match="no NCCL"):
        attempt.take()


def test_an_error_of_the_accelerator_is_no_abort(pair: Pair) -> None:
    pair.group.error = "CUDA error: device-side assert triggered"
    with pytest.raises(RuntimeError, match="device-side assert"):
        pair.first.all_reduce(torch.ones(3))
    assert is_sticky("NCCL error: ncclUnhandledCudaError: Call to CUDA function failed.")
    assert not is_sticky(REMOTE_ERROR)


OUT_OF_MEMORY = (
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


@pytest.mark.parametrize(
    ("text", "raised", "reason"),
    [
        (OUT_OF_MEMORY, CommunicatorAborted, "the device is out of memory"),
        ("CUDA error: an illegal memory access was encountered", RuntimeError, "illegal memory access"),
    ],
)
def test_a_connection_that_lacks_memory_is_tried_again_and_a_broken_device_ends_the_process(
    text: str, raised: type[Exception], reason: str
) -> None:
    def make(*place: Any) -> Any:
        raise dist.DistBackendError(text)

    def build(epoch: Any, rank: int, world: int) -> Any:
        return NcclCommunicator(dist.HashStore(), 0, 2, CPU, Host(), StandInLibrary(make))

    condition = threading.Condition()
    attempt = background_connect.Connecting(build, _Epoch(), 0)  # type: ignore[arg-type]
    attempt.start(condition)
    with condition:
        assert condition.wait_for(lambda: attempt.finished, 20)
    with pytest.raises(raised, match=reason):
        attempt.take()
    lazy = SimpleNamespace(backend=SimpleNamespace(allreduce=make), messages=False)
    with pytest.raises(raised, match=reason):
        connect_apart([lazy], StandInLibrary(make), lambda: None)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    def make(store: Any, rank: int, world: int) -> Any:
        raise RuntimeError(
            "NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000"
        )

    with pytest.raises(ConfigError, match=r"rank 1 and rank 0 both on CUDA device 3000: expected one worker per GPU"):
        NcclCommunicator(dist.HashStore(), 0, 2, CPU, Host(), StandInLibrary(make))


def test_groups_are_aborted_all_at_once() -> None:
    networks = [Network(2, abort_seconds=2.0) for _ in range(4)]
    groups = [network.group(0) for network in networks]
    started = time.monotonic()
    abort_apart(groups)
    assert time.monotonic() - started < 1.5
    deadline = started + 20
    while not all(group.aborted for group in groups):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert all(len(group.threads) == 1 for group in groups)
    assert len({name for group in groups for name in group.threads}) == 4
    for thread in threading.enumerate():
        if thread.name.startswith("unicron-abort"):
            thread.join(20)


def _connect(groups: list[Any], check: Callable[[], None], *messages: int) -> None:
    lazy = [SimpleNamespace(backend=group, messages=place in messages) for place, group in enumerate(groups)]
    connect_apart(lazy, StandInLibrary(lambda *place: None), check)


def test_lazy_groups_of_a_host_are_aborted_after_the_barrier() -> None:
    store, network = dist.HashStore(), Network(2, abort_seconds=0.1)
    groups = [LazyGroups([network.group(rank)]) for rank in range(2)]
    for rank in range(2):
        groups[rank].add_barrier(store, rank, 2)
    for rank in range(2):
        groups[rank].meet()
        network.groups[rank].allreduce([torch.ones(3)])
        network.groups[rank].works[-1].delivered = False
    groups[0].abort()
    time.sleep(0.3)
    assert not network.groups[0].aborted
    groups[1].abort()
    assert wait_destroyed(20)
    assert network.groups[0].aborted and network.groups[1].aborted and network.freed_early == []


def test_lazy_groups_are_connected_in_a_helper_thread() -> None:
    networks = [Network(2) for _ in range(3)]
    groups = [[network.group(rank) for network in networks] for rank in range(2)]
    starters: set[str] = set()
    for group in groups[0]:
        group.on_enqueue = lambda: starters.add(threading.current_thread().name)
    other = threading.Thread(target=_connect, args=(groups[1], lambda: None))
    other.start()
    _connect(groups[0], lambda: None)
    other.join(20)
    assert all(len(network.sums) == 1 for network in networks)
    assert starters == {"unicron-connect-groups"}


def test_groups_with_messages_are_connected_for_them() -> None:
    networks = [Network(2) for _ in range(2)]
    groups = [[network.group(rank) for network in networks] for rank in range(2)]
    other = threading.Thread(target=_connect, args=(groups[1], lambda: None, 1))
    other.start()
    _connect(groups[0], lambda: None, 1)
    other.join(20)
    assert [len(network.calls) for network in networks] == [1, 2]


def test_an_epoch_does_not_wait_for_the_abort_of_groups_that_were_never_connected() -> None:
    """Such an abort may have to wait until the library stops waiting for a dead peer."""
    group = Network(2).group(0)
    library = StandInLibrary(lambda *place: None)
    groups = AcceleratedGroups(synchronize=lambda device: None, library=lambda device: library)
    channels = SimpleNamespace(grid=SimpleNamespace(place=0, shard=0, shards=1, replicas=1, rank=0), store=None)
    channels.store = dist.HashStore()

    def check() -> None:
        raise CommunicatorAborted("the epoch has ended")

    group.mutex.acquire()  # as the library does until all ranks have come
    lazy = AcceleratedGroup(holder=None, backend=group, size=2, inside=True)
    with pytest.raises(CommunicatorAborted, match="the epoch has ended"):
        groups.connect(channels, [lazy], CPU, check)  # type: ignore[arg-type]
    groups.leave()
    began = time.monotonic()
    groups.wait_retired(check)
    assert time.monotonic() - began < SOON
    del lazy
    group.mutex.release()
    del group
    assert wait_destroyed(20)


def test_lazy_groups_with_an_absent_peer_do_not_block_the_caller() -> None:
    network, began = Network(2), time.monotonic()
    group = network.group(0)
    group.ready.clear()  # the library holds its mutex until all ranks have come

    def check() -> None:
        if time.monotonic() > began + 0.2:
            raise CommunicatorAborted("the epoch has ended")

    with pytest.raises(CommunicatorAborted, match="the epoch has ended"):
        _connect([group], check)
    assert time.monotonic() - began < 10, "without the check it would not return"
    group.ready.set()


def test_a_lost_peer_ends_the_connection_of_lazy_groups() -> None:
    group = Network(2).group(0)
    group.error = REMOTE_ERROR
    with pytest.raises(CommunicatorAborted, match="a remote process exiting"):
        _connect([group], lambda: None)


class Holder:
    """Stands in for torch's process group, which refers to its back-end."""

    def __init__(self, group: StandInGroup) -> None:
        self.group = group


def retired(count: int, **network: float) -> tuple[Retirement, list[Holder], list[set[str]]]:
    """A retirement of some groups, other references to their holders, and the threads that abort and destroy them."""
    groups = [Network(2, **network).group(0) for _ in range(count)]  # type: ignore[arg-type]
    threads = [group.threads for group in groups]
    for group in groups:
        group.network.groups.clear()
    holders = [Holder(group) for group in groups]
    return Retirement(holders, groups, lambda: None), holders, threads


def test_groups_that_are_left_are_destroyed_by_the_thread_that_aborted_them() -> None:
    """One of Megatron's objects refers to a group until it has been given the next epoch's."""
    began = time.monotonic()
    retirement, holders, threads = retired(3, abort_seconds=1.0, destroy_seconds=1.0)
    assert time.monotonic() - began < SOON
    retirement.wait_aborted(lambda: None)
    assert 0.8 <= time.monotonic() - began < 1.0 + SOON
    assert not retirement.join(0.3)
    began = time.monotonic()
    holders.clear()
    assert time.monotonic() - began < SOON
    assert retirement.join(20)
    assert all("unicron-retire-groups" in names for names in threads)
    assert len({name for names in threads for name in names}) == 4


def test_a_caller_can_stop_waiting_for_the_aborts() -> None:
    retirement, holders, _ = retired(1, abort_seconds=1.0)

    def check() -> None:
        raise CommunicatorAborted("the epoch has ended")

    with pytest.raises(CommunicatorAborted, match="the epoch has ended"):
        retirement.wait_aborted(check)
    holders.clear()
    assert retirement.join(20)


def test_an_error_of_the_accelerator_after_the_aborts_reaches_the_caller() -> None:
    def settle() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    retirement = Retirement([], [], settle)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        retirement.wait_aborted(lambda: None)
    assert retirement.join(20)


def test_the_end_of_the_process_waits_for_aborts_but_not_for_references() -> None:
    began = time.monotonic()
    retirement, holders, threads = retired(1, abort_seconds=0.5)
    assert wait_destroyed(20)
    assert 0.5 <= time.monotonic() - began < 0.5 + SOON
    assert retirement.join(0)
    holders.clear()
    assert "unicron-retire-groups" not in threads[0]  # kept for good


def test_the_end_of_the_process_does_not_wait_for_ever() -> None:
    retirement, holders, _ = retired(1, abort_seconds=1.0)
    assert not wait_destroyed(0.2)
    holders.clear()
    assert retirement.join(20)


@pytest.mark.parametrize(
    ("device", "version", "torch_version", "said"),
    [
        ("cpu", None, "2.14.0", None),
        ("cuda", (2, 28, 9), "2.11.0+cu128", None),
        ("cuda", (2, 27, 5), "2.13.1", None),
        ("cuda", (2, 28, 3), "2.12.0", "NCCL 2.28.3"),
        ("cuda", (2, 28, 8), "2.12.0", "NCCL 2.28.8"),
        ("cuda", None, "2.13.0+cpu", "without NCCL"),
        ("cuda", (2, 28, 9), "2.10.1", "torch 2.10.1 has not been tried"),
        ("cuda", (2, 29, 0), "2.14.0a0+git1", "expected torch 2.11 to 2.13"),
        ("mps", None, "2.13.0", "accelerator 'mps'"),
    ],
)
def test_accelerators_that_cannot_recover_are_refused(
    device: str, version: tuple[int, ...] | None, torch_version: str, said: str | None
) -> None:
    reason = refusal(torch.device(device), version, torch_version)
    assert reason is None if said is None else said in str(reason)


def test_the_data_plane_refuses_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="mps"):
        backends.DataPlane("127.0.0.1", torch.device("mps"))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.dictionaries(st.sampled_from(["w0", "w1", "w2", "j0"]), st.integers(1, 90), max_size=3),
    seed=st.integers(0, 1000),
)
def test_random_deaths_corrupt_no_parameter(faults: dict[str, int], seed: int) -> None:
    """Under the whole step protocol; w3 lives."""
    check(*simulate_nccl(faults, seed=seed))


@pytest.mark.parametrize(
    ("given", "survives", "joins"),
    [
        ({}, False, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, True, False),
        (REQUIRED, True, True),
        ({**REQUIRED, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, False, True),
    ],
)
def test_a_watchdogs_note_of_an_error_ends_a_joiner_unless_the_agent_sets_the_variables(
    given: dict[str, Any], survives: bool, joins: bool
) -> None:
    """The survivor's group and the joiner's have different prefixes in one store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    user = {name: value[0] if isinstance(value, tuple) else value for name, value in given.items()}
    settled = dict(user)
    settle(settled)
    for environment, expected in ((user, (survives, joins)), (settled, (True, True))):
        survivor = Watchdog(dist.PrefixStore("epoch/4", store), environment)
        joiner = Watchdog(dist.PrefixStore("epoch/5", store), environment)
        store.delete_key(Watchdog.KEY)
        survivor.see_error()
        joiner.poll()
        assert (not survivor.process_ended, not joiner.process_ended) == expected
