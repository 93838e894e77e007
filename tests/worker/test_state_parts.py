"""States are divided into parts, staged in shared memory, kept by an agent, and joined again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from unicron_lightning import wire
from unicron_lightning.agent.workers.memory import AgentMemory
from unicron_lightning.shared_memory import allocate, verified
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import parts_of as digests
from unicron_lightning.worker.codec import flat
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.staging import Staging
from unicron_lightning.worker.state_parts import (
    DividedState,
    RackAndNode,
    holders,
    joined,
    partners_of,
    restored,
    staged_parts,
)


def state(seed: int = 0, random: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    weights = {"a": torch.randn(40, 50), "b": torch.randn(3), "c": torch.randn(1000).to(torch.bfloat16)}
    moments = [{"state": {0: {"exp_avg": torch.randn(50, 40).T, "step": torch.tensor(3.0)}}}]
    checkpoint = {"state_dict": weights, "optimizer_states": moments, "empty": torch.zeros(0, 4)}
    return {"checkpoint": checkpoint, "random": torch.full((5000,), random, dtype=torch.uint8), "seed": 7}


def parts_of(divided: DividedState, number: int) -> list[bytes]:
    parts = []
    for part in range(number):
        target = torch.empty(divided.size(part, number), dtype=torch.uint8)
        divided.write(part, number, target)
        parts.append(target.numpy().tobytes())
    return parts


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_parts_of_different_members_join_to_the_state(number: int) -> None:
    """Random state differs between members: that of part 0's is taken."""
    members = [parts_of(DividedState.of(state(random=rank)), number) for rank in range(number)]
    assert len({DividedState.of(state(random=rank)).layout for rank in range(number)}) == 1
    found = joined([members[rank][rank] for rank in range(number)])
    expected = state()
    torch.testing.assert_close(found["checkpoint"], expected["checkpoint"], rtol=0, atol=0)
    assert torch.equal(found["random"], expected["random"]) and found["seed"] == 7


def test_workers_that_have_logged_different_values_stage_the_same_version() -> None:
    joined_late = {**state(), "metrics": {}}
    early = {**state(), "metrics": {"val": torch.tensor(1.0)}}
    assert DividedState.of(early).layout == DividedState.of(joined_late).layout
    other = state()
    other["checkpoint"]["state_dict"]["a"] = torch.zeros(50, 40)
    assert DividedState.of(other).layout != DividedState.of(early).layout


def test_parts_are_of_equal_size_and_others_do_not_fit() -> None:
    divided = DividedState.of(state())
    sizes = [divided.size(part, 4) for part in range(1, 4)]
    assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ValueError, match="parts hold"):
        joined(parts_of(divided, 4)[:3])
    with pytest.raises(ValueError, match="no parts of a state"):
        joined([b"x" * 100])
    other = {**state(), "checkpoint": {"state_dict": {"d": torch.zeros(40, 50)}}}
    assert DividedState.of(other).layout != divided.layout


def test_a_joiner_keeps_the_memory_that_it_has_received() -> None:
    divided = DividedState.of(state(), least=100, paths=("",))
    large = [flat(tensor).clone() for tensor in divided.large]
    found, expected = restored(divided.root, large), state()
    torch.testing.assert_close(found["checkpoint"], expected["checkpoint"], rtol=0, atol=0)
    assert torch.equal(found["random"], expected["random"])
    held = {tensor.data_ptr() for tensor in large}
    assert held == {tensor.data_ptr() for _, tensor in codec.split(found)[1] if tensor.nbytes >= 100}
    with pytest.raises(ValueError, match="bytes expected"):
        restored(divided.root, large[:-1])


def alone(nodes: Sequence[str]) -> list[RackAndNode]:
    """Nodes without labels of racks."""
    return [(node, node) for node in nodes]


def test_values_that_torch_conjugates_or_negates_later_are_sent_and_compared() -> None:
    """A buffer such as ``torch.exp(1j * angles).conj()`` passed the check before training; no join could send it."""
    values = torch.view_as_complex(torch.randn(1000, 2)).conj(), torch.view_as_complex(torch.randn(9, 2)).conj().imag
    lazy = {"large": values[0], "small": values[1].clone(), "negated": torch._neg_view(torch.randn(1000))}
    codec.check(lazy)
    own = {"checkpoint": {"state_dict": lazy}}
    divided = DividedState.of(own)
    sent = restored(divided.root, map(flat, divided.large))
    for found in (joined(parts_of(divided, 3)), sent, codec.decode(codec.encode(own))):
        assert all(torch.equal(value, lazy[name]) for name, value in found["checkpoint"]["state_dict"].items())
    assert digests(lazy) == digests(sent["checkpoint"]["state_dict"])


def test_no_part_has_two_copies_on_a_node() -> None:
    nodes = ("a", "a", "b", "b", "c")
    for partners in range(4):
        for part in range(5):
            ranks = holders(alone(nodes), part, partners)
            assert ranks[0] == part
            assert len({nodes[rank] for rank in ranks}) == len(ranks) == min(partners + 1, 3)


def test_parts_of_shards_are_sent_only_if_no_worker_of_the_shard_is_on_another_node() -> None:
    replicas = staged_parts([[0, 2], [1, 3]], alone("aabb"), 1)
    assert [part.number for part in replicas] == [0, 1, 2, 3]
    assert [part.holders for part in replicas] == [(0, 2), (2, 0), (1, 3), (3, 1)]
    assert not any(part.receivers for part in replicas)
    single = staged_parts([[0], [1], [2]], alone("aab"), 1)
    assert [(part.holders, part.receivers) for part in single] == [((0,), (2,)), ((1,), (2,)), ((2,), (0,))]
    assert not any(part.receivers for part in staged_parts([[0], [1]], alone("aa"), 1)), "there is one node"
    for each in staged_parts([[0, 4], [1, 5], [2, 6], [3, 7]], alone("aabbaabb"), 2):
        assert len(each.holders) == 1, "both workers of a shard are on one node"
        assert len(each.receivers) == 1


RACKS: list[RackAndNode] = [("r", "a"), ("r", "b"), ("s", "c"), ("s", "d"), ("t", "e")]


def test_partners_are_in_other_racks() -> None:
    assert partners_of(RACKS, ("r", "a")) == ["c", "e", "d"]
    assert partners_of(RACKS, ("r", "b")) == ["d", "e", "c"], "another first partner than that of the same rack's node"
    assert partners_of(RACKS, ("t", "e")) == ["a", "c", "b", "d"]
    assert partners_of(RACKS[:2], ("r", "a")) == ["b"], "there is no other rack"
    for part in range(5):
        first, *others = holders(RACKS, part, 2)
        assert first == part
        assert len({RACKS[rank][0] for rank in (part, *others)}) == 3


def test_parts_of_shards_go_to_other_racks() -> None:
    places: list[RackAndNode] = [("r", "a"), ("r", "b"), ("s", "c"), ("s", "d")]
    assert [part.holders for part in staged_parts([[0, 2], [1, 3]], places, 1)] == [(0, 2), (2, 0), (1, 3), (3, 1)]
    across = staged_parts([[0], [2], [1]], places, 1)
    assert [part.receivers for part in across] == [(2,), (1,), (2,)]
    own = staged_parts([[0, 1], [2, 3]], places, 2, equal=False)
    assert [part.receivers for part in own] == [(2,), (3,), (0,), (1,)], "only one other worker is in another rack"
    inside = staged_parts([[0, 1]], places, 1, equal=False)
    assert [part.receivers for part in inside] == [(1,), (0,)], "both are in the only rack"


class _Link:
    """A worker's link to an agent in this process."""

    worker = "n0-1/0#1"
    welcome = wire.Welcome(worker=worker, founder=True, life=1, resume=())

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "socket")


def open_memory() -> int:
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("unicron-state" in link for link in links)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # a short path
        yield Path(folder)


async def digested(memory: AgentMemory) -> None:
    """Let the agent receive what was handed over, and wait for its digests."""
    assert memory.copies
    for _ in range(10_000):
        if all(copy.digest for copy in memory.copies):
            return
        await asyncio.sleep(0.001)


async def test_an_agent_keeps_the_complete_version_and_two_newer_ones(folder: Path) -> None:
    said: list[Any] = []
    memory = AgentMemory(folder, said.append)
    memory.start()
    staging = Staging(_Link(folder))  # type: ignore[arg-type]
    world = World(epoch=3, kind="init", rank=0, size=2, hold=False, nodes=("n0", "n1"))
    plan = staged_parts([range(2)], world.places, 1)
    for step in (4, 8, 12, 16):
        staging.hand_over(staging.stage(DividedState.of(state(step)), step, world, plan))
        await digested(memory)
        if step == 4:
            memory.complete(memory.copies[0].version)
    assert [copy.version.step for copy in memory.copies] == [4, 4, 12, 12, 16, 16]
    assert {copy.part for copy in memory.copies} == {0, 1}, "this node is the other one's partner"
    assert said[-1] == wire.StateHeld(copies=memory.copies)
    assert len(said) == 4, "one report of each version, with the digests of all its parts"
    given = memory.given()
    found = joined([verified(given.pid, each) for each in given.copies[-2:]])
    torch.testing.assert_close(found["checkpoint"], state(16)["checkpoint"], rtol=0, atol=0)
    memory.complete(memory.copies[-1].version)
    assert [copy.version.step for copy in memory.copies] == [16, 16]
    newest = memory.given().copies[0]
    os.pwrite(staging._handed[-1][newest.copy.part].descriptor, b"corrupt", 0)
    with pytest.raises(OSError, match="expected"):
        verified(given.pid, newest)
    memory.close()
    staging.close()
    assert open_memory() == 0


async def test_memory_is_filled_again_after_its_agent_has_dropped_it(folder: Path) -> None:
    memory = AgentMemory(folder, lambda message: None)
    memory.start()
    staging = Staging(_Link(folder))  # type: ignore[arg-type]
    world = World(epoch=3, kind="init", rank=0, size=1, hold=False, nodes=("n0",))
    plan = staged_parts([[0]], world.places, 0)
    files: list[set[int]] = []
    for step in range(4, 40, 4):
        staging.hand_over(staging.stage(DividedState.of(state(step)), step, world, plan))
        await digested(memory)
        files.append({os.fstat(each.descriptor).st_ino for each in memory.given().copies})
        memory.complete(memory.copies[-1].version)
        (given,) = memory.given().copies
        torch.testing.assert_close(joined([verified(os.getpid(), given)])["checkpoint"], state(step)["checkpoint"])
    assert len(set.union(*files)) == 2, "two versions take turns"
    staging.close()
    memory.close()
    assert open_memory() == 0


HANDS_OVER = """
import os, signal, sys
from unicron_lightning import wire
from unicron_lightning.shared_memory import allocate
from unicron_lightning.worker.staging import MemoryLink

link = MemoryLink("w", sys.argv[1])
for step in (4, 8):
    descriptor, content = allocate(1 << 16)
    content[:5] = b"state"
    version = wire.StateVersion(life=1, epoch=1, step=step, parts=1, copies=1, layout="0" * 64)
    link.hand_over([wire.StateCopy(version=version, part=0, size=5)], {0: descriptor})
os.kill(os.getpid(), signal.SIGKILL)
"""


def hand_over_and_die(folder: Path) -> None:
    worker = subprocess.run([sys.executable, "-c", HANDS_OVER, str(folder / "socket")], check=False)
    assert worker.returncode == -signal.SIGKILL


async def test_an_agent_gets_what_a_worker_has_handed_over_before_it_died(folder: Path) -> None:
    """The agent stands still meanwhile, and reports the copies before it knows their digests."""
    said: list[Any] = []
    memory = AgentMemory(folder, said.append)
    memory.start()
    hand_over_and_die(folder)
    memory.report()
    (first,) = said
    assert [(copy.version.step, copy.digest) for copy in first.copies] == [(4, None), (8, None)]
    await digested(memory)
    given = memory.given()
    assert [verified(given.pid, each) for each in given.copies] == [b"state", b"state"]
    assert said[-1].copies == memory.copies
    memory.close()


async def test_only_memory_of_this_name_and_size_is_kept(folder: Path) -> None:
    memory = AgentMemory(folder, lambda message: None)
    memory.start()
    version = wire.StateVersion(life=1, epoch=1, step=1, parts=3, copies=1, layout="0" * 64)
    copies = [wire.StateCopy(version=version, part=part, size=1 << 17) for part in range(3)]
    small, content = allocate(1 << 16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link, (folder / "file").open("w+") as file:
        link.connect(str(folder / "memory"))
        for staged, sent in ((copies[:2], [file.fileno(), small]), (copies, [small])):
            message = wire.encode(wire.StateStaged(worker="w", staged=tuple(staged)))
            socket.send_fds(link, [message], sent)
        assert memory.copies == ()
        assert link.recv(1) == b"", "the agent has closed the link"
    content.close()
    os.close(small)
    memory.close()
    assert open_memory() == 0


async def test_an_agent_that_stands_still_keeps_few_versions(folder: Path) -> None:
    memory = AgentMemory(folder, lambda message: None)
    memory.start()
    staging = Staging(_Link(folder))  # type: ignore[arg-type]
    world = World(epoch=3, kind="init", rank=0, size=1, hold=False, nodes=("n0",))
    plan = staged_parts([[0]], world.places, 0)
    for step in range(5):
        staging.hand_over(staging.stage(DividedState.of(state(step)), step, world, plan))
    with pytest.raises(OSError, match="keeps 5 versions"):
        staging.stage(DividedState.of(state()), 6, world, plan)
    await digested(memory)
    staging.hand_over(staging.stage(DividedState.of(state(6)), 6, world, plan))
    staging.close()
    memory.close()
    with pytest.raises(OSError, match="No such file"):
        staging.hand_over(staging.stage(DividedState.of(state(7)), 7, world, plan))
    staging.close()
    assert open_memory() == 0


def test_too_little_memory_is_an_error(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    staging = Staging(_Link(folder))  # type: ignore[arg-type]
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    world = World(epoch=3, kind="init", rank=0, size=1, hold=False, nodes=("n0",))
    with pytest.raises(MemoryError, match="more than half"):
        staging.stage(DividedState.of(state()), 4, world, staged_parts([[0]], world.places, 0))
    staging.close()
