"""One or two deaths at any points of a step of a sharded model: real engines, fabrics, FSDP2 and gloo, in threads.

A worker passes a *point* wherever the program of a step can be interrupted: at the engine's own points, in each forward
and backward of a layer, before and after each collective of its replica. It dies at its n-th point of the step, in
whatever epoch that is. The parameters of every worker at the end, also of spares, are those of one process.

``python tests/fsdp/deaths.py FIRST COUNT`` runs as many histories as wanted, with a number of lanes behind it those of
tensor parallelism.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from fsdp.preconditioned import PRECONDITIONED
from worker.simulation import SECONDS, Coordinator, Killed, TaskIsOver, run_threads

from unicron_lightning import wire
from unicron_lightning.fsdp import mesh
from unicron_lightning.fsdp.mesh import ReplicaMesh, ShardGroup, local_shards, region, sum_gradients
from unicron_lightning.fsdp.model import FsdpShard
from unicron_lightning.replica import fabric as fabric_module
from unicron_lightning.replica.channels import COALESCED_REDUCE_SCATTERS, COLLECTIVES, REDUCE_SCATTERS
from unicron_lightning.replica.fabric import ReplicaFabric
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.replica.step import ReplicaStep
from unicron_lightning.worker.agreement import StateDigest, parts_of
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement

SHARDS = 2
ROWS = 4
STEPS = 3
STRUCK = 1
"""The step in which workers die."""
POINTS = 58
"""Points of a step without deaths."""
SLICED_POINTS = {(1, True): 42, (1, False): 94, (2, True): 74, (2, False): 126}
"""The same with lanes of two workers, by the number of lanes and whether the words are tied."""
TOLERANCE = 1e-12
CPU = torch.device("cpu")


class Net(nn.Module):
    """An embedding, two blocks, a norm and a head of its own; FSDP2's root group has all parameters but the blocks'."""

    def __init__(self, *, tied: bool, words: int, inner: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, inner), nn.GELU(), nn.Linear(inner, 6)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def layers(self) -> Iterator[nn.Module]:
        """The modules in whose forward and backward a worker may die."""
        yield from (self.tokens, *self.blocks, self.norm, self.head)


@dataclass(frozen=True, kw_only=True)
class Deaths:
    """What is drawn.

    Attributes:
        replicas: of the complete world.
        tied: whether the head's weight is the embedding's.
        shards, slices: workers of a replica: S lanes of T workers.
        at: workers that die, by their first rank, each with its point of the step: a number, or a name of the engine's.
        flips: workers with a bit that flips before that step.
        late: workers that die at the end, when they send or take a shard's state.
        own: whether a block and the norm are not sharded.
        whole: name of the optimizer if its updates need whole matrices.
        after: a worker that dies at a point waits there for others that come to one of the engine's points of that
            step: each with its name.
    """

    replicas: int
    tied: bool
    shards: int = 2
    slices: int = 1
    at: Sequence[Sequence[Any]] = ()
    flips: Sequence[int] = ()
    late: Sequence[int] = ()
    own: bool = False
    whole: str = ""
    after: Sequence[tuple[int, str]] = ()


class Pointed(ShardGroup):
    """A replica's group whose collectives are points of its worker."""

    point: Callable[[], None] = staticmethod(lambda: None)


def _pointed(name: str) -> Callable[..., Any]:
    def start(self: Pointed, *args: Any, **kwargs: Any) -> Any:
        self.point()
        work = getattr(ShardGroup, name)(self, *args, **kwargs)
        self.point()
        return work

    return start


for _name in (*COLLECTIVES, *REDUCE_SCATTERS, *COALESCED_REDUCE_SCATTERS):
    if hasattr(ShardGroup, _name):
        setattr(Pointed, _name, _pointed(_name))


class Task(Coordinator):
    """A task of sharded workers."""

    sockets_break = True

    def __init__(self, drawn: Deaths) -> None:
        super().__init__()
        self.drawn = drawn
        self.shape = Shape(tensor=drawn.shards, replicas=drawn.replicas, sharded=True, slices=drawn.slices)
        self.stores: dict[int, dist.Store] = {}
        self.points: dict[int, int] = {}
        self.odd: dict[tuple[int, int], list[int]] = {}
        """What each worker has found in each step."""
        self.ran = 0
        """Micro-batches that workers have finished in the struck step."""
        self.passed: set[tuple[int, str]] = set()
        """Workers with the engine's points of the struck step to which they have come."""
        self.recomputed: dict[int, list[int]] = {}
        """Rows of the struck step that each worker knows to be computed again."""
        self.kept: dict[int, int] = {}
        """Buckets of the struck step that each worker has kept from an interrupted reduction."""

    def store(self, epoch: wire.Epoch) -> dist.Store:
        """The store of an epoch."""
        with self.condition:
            return self.stores.setdefault(epoch.number, dist.HashStore())

    def run(self) -> dict[str, Any]:
        """Train; return each worker's result."""
        workers = [Worker(self, rank) for rank in range(self.shape.workers)]
        self.start()
        return run_threads(self, [(each.name, each.run) for each in workers])


class Worker:
    """A worker of the task."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank, self.name = task, rank, f"agent{rank}#0"
        self.fabric = ReplicaFabric(task.shape)
        self.member: ReplicaMember[FsdpShard] = ReplicaMember(
            self.fabric, FsdpShard.adopt, lambda: self.member.model.leave()
        )
        engine = task.worker(self.name)
        assert engine.control is not None
        self.engine = Engine(engine.control, task._connect, self._entered, False, fabric=self.fabric)
        engine.control.engine = self.engine  # type: ignore[attr-defined]
        engine.control.lookup = lambda key: None  # type: ignore[method-assign]
        engine.control.welcome = mock.Mock(layout=None)  # type: ignore[misc]
        self.engine.fault = self._fault
        self.fabric.begin(engine.control, joins=False)
        self._passed = 0

    def point(self, name: str = "") -> None:
        """Die, if it is time; an engine's point has a name."""
        if threading.current_thread().name == f"sim-{self.name}" and self.engine.step == STRUCK:
            self._passed += 1
            if {self._passed, name} & {point for rank, point in self.task.drawn.at if rank == self.rank}:
                wanted, deadline = set(map(tuple, self.task.drawn.after)), time.monotonic() + SECONDS
                while not wanted <= self.task.passed:
                    assert time.monotonic() < deadline, f"{wanted - self.task.passed} do not come"
                    time.sleep(0.001)
                raise Killed

    def _fault(self, *point: Any) -> None:
        if self.engine.step == STRUCK:
            self.task.passed.add((self.rank, point[0]))
        self.point(point[0])

    def run(self) -> Any:
        """The program of a worker: its shard and parameters at the end."""
        try:
            self.engine.run(Agreement("start", lambda rank: b""))
            net = self._build()
            self.member.found(self.engine)
            for self.engine.step in range(STEPS):
                model, rows = self.member.model, self._rows(net)
                if self.engine.step == STRUCK and self.rank in self.task.drawn.flips:
                    next(iter(model.shard().values())).view(torch.int64)[0, 0] ^= 1
                digest = StateDigest(parts=parts_of(model.shard()))
                speaks = self.fabric.own_shard % self.task.shape.slices == 0
                sums = partial(Numbers, speaks=speaks)
                step = ReplicaStep(range(ROWS), model, self.fabric, rows, sums, None, digest)
                self.engine.run(step)
                assert step.sums is not None and step.sums.total == self.task.drawn.shards * ROWS, "each counts once"
                if self.engine.step == STRUCK:
                    self.task.recomputed[self.rank] = step.recomputed
                    self.task.kept[self.rank] = len(model.gradients._kept)
                self.task.odd[self.rank, self.engine.step] = [] if step.difference is None else [*step.difference.odd]
                self.member.update()
            self.engine.step = STEPS
            self.member.finish(self.engine)
            self.task.points[self.rank] = self._passed
            places = [region(each) if isinstance(each, DTensor) else ... for each in net.parameters()]
            return places, [part.detach().clone() for part in local_shards(net.parameters())]
        finally:  # a dead process has no connections
            self.fabric.cut()
            self.engine.close()
            self.fabric.close()

    def _build(self) -> Net:
        drawn = self.task.drawn
        net = network(drawn)
        group = Pointed(self.fabric.own_shard, self.task.shape.shards, drawn.slices)
        meshes = ReplicaMesh(group, CPU)
        shards = meshes.shards
        if drawn.slices > 1:
            parallelize(net, meshes["tensor_parallel"])
        own = {*net.blocks[1].parameters(), *net.norm.parameters()} if drawn.own else set()
        for block in net.blocks[: 1 if own else 2]:
            fully_shard(block, mesh=shards)
        fully_shard(net, mesh=shards, ignored_params=own)
        sum_gradients(net)
        for layer in net.layers():
            layer.register_forward_hook(self._passes)
        for each in (group, group.same_slice, group.lane):
            if each is not None:
                each.point = self.point
        self.member.model = FsdpShard(net, group)
        self.member.model.begin_fit(optimizer_of(net, drawn.whole), whole=bool(drawn.whole))
        for name in ("state", "load_state"):
            setattr(self.member.model, name, self._late(getattr(self.member.model, name)))
        self.fabric.built = True
        return net

    def _late(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if self.engine.step == STEPS and self.rank in self.task.drawn.late:
                raise Killed
            return exchange(*args, **options)

        return run

    def _rows(self, net: Net) -> Callable[..., None]:
        def run(rows: Sequence[int], *, last: bool) -> None:
            for row in rows:
                self.engine.check()
                drawn, lane = self.task.drawn, self.fabric.shape.lane(self.fabric.own_shard)
                loss_of(net, row * drawn.shards + lane, drawn.shards).backward()
                with self.task.condition:
                    self.task.ran += self.engine.step == STRUCK

        return run

    def _passes(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.point()
        if output.requires_grad:
            output.register_hook(lambda _: self.point())

    def _entered(self, world: Any) -> None:
        if world.epoch > 0:
            self.member.enter(self.engine)


class Numbers:
    """`Sums`: the number of this worker's micro-batches."""

    buckets = ()

    def __init__(self, rows: Sequence[int], *, speaks: bool) -> None:
        self._own, self.total = len(rows) if speaks else 0, 0.0

    def totals(self) -> list[float]:
        return [float(self._own)]

    def read(self, totals: Sequence[float]) -> bool:
        (self.total,) = totals
        return False

    def settle(self, engine: Engine) -> None:
        """Nothing is left to agree on."""


def network(drawn: Deaths) -> Net:
    """The network at the start."""
    with _seeding:
        torch.manual_seed(0)
        words, inner = (7, 5) if drawn.slices == 1 else (8, 4)
        return Net(tied=drawn.tied, words=words, inner=inner).double()


def parallelize(net: Net, lane: DeviceMesh) -> None:
    """Divide the blocks within a lane; unless parameters are tied, also the words and, around blocks, the sequence."""
    along = Replicate() if net.head.weight is net.tokens.weight else Shard(0)
    for block in net.blocks:
        plan = {"0": ColwiseParallel(input_layouts=along), "2": RowwiseParallel(output_layouts=along)}
        parallelize_module(block, lane, plan)
    if net.head.weight is not net.tokens.weight:
        parallelize_module(net.tokens, lane, RowwiseParallel(input_layouts=Replicate(), output_layouts=along))
        parallelize_module(net.norm, lane, SequenceParallel(sequence_dim=0))
        head = ColwiseParallel(input_layouts=along, output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(net.head, lane, head)


_seeding = threading.Lock()


def optimizer_of(net: Net, whole: str = "") -> torch.optim.Optimizer:
    """The optimizer: one that does not amplify rounding, one of the matrices only, or with other states."""
    if whole in PRECONDITIONED:
        return PRECONDITIONED[whole](net.parameters(), lr=0.1, eps=0.5)
    if whole:
        return torch.optim.Muon([each for each in net.parameters() if each.dim() == 2], lr=0.1)
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)


def loss_of(net: Net, micro_batch: int, shards: int) -> Tensor:
    """The loss of a micro-batch, as a part of the mean over rows of this number."""
    words, length = (7, 5) if len(net.tokens.weight) == 7 else (8, 6)
    tokens = torch.randint(0, words, (2, length), generator=torch.Generator().manual_seed(micro_batch))
    return nn.functional.cross_entropy(net(tokens[0]), tokens[1]) / (ROWS * shards)


def reference(drawn: Deaths) -> list[Tensor]:
    """The parameters at the end of the training in one process."""
    net = network(drawn)
    optimizer = optimizer_of(net, drawn.whole)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in range(ROWS * drawn.shards):
            loss_of(net, micro_batch, drawn.shards).backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


@contextmanager
def stores(task: Task) -> Iterator[None]:
    """Let the fabrics of this process meet in a task's stores; a loss of all state ends the task."""

    def over(reason: str) -> None:
        raise TaskIsOver(reason)

    opener = mock.Mock(open=task.store)
    with mock.patch.object(fabric_module, "clients", opener), mock.patch.object(fabric_module, "start_anew", over):
        yield


def check(drawn: Deaths) -> Task:
    """Train with deaths.

    Raises:
        AssertionError: a worker has other parameters than one process.
    """
    task = Task(drawn)
    with stores(task), nullcontext() if drawn.slices == 1 else loss_parallel():  # of the process, not of a thread
        results = task.run()
    dead = {name for name, result in results.items() if isinstance(result, Killed)}
    assert dead.issuperset(f"agent{rank}#0" for rank in drawn.late), dead
    expected = reference(drawn)
    for name, result in results.items():
        if isinstance(result, BaseException):
            continue
        for place, part, whole in zip(*result, expected, strict=True):
            own = whole[place]
            assert part.shape == own.shape
            worst = float((part - own).abs().max()) if own.numel() else 0.0
            assert worst < TOLERANCE, f"{drawn}: {name} differs by {worst:.1e}"
    return task


def draw(seed: int, points: int = POINTS, *, whole: str = "") -> Deaths:
    """Draw one or two deaths, of partners or strangers, at any of a step's points."""
    chance = random.Random(seed)
    replicas = chance.choice((2, 2, 3))
    victims = chance.sample(range(SHARDS * replicas), chance.choice((1, 2, 2, 2)))
    return Deaths(
        replicas=replicas,
        tied=chance.random() < 0.25,
        at=[[victim, 1 + chance.randrange(points)] for victim in victims],
        whole=whole,
    )


def histories(
    rank: int, world: int, folder: Path, chosen: list[dict[str, Any]], seeds: list[int], own: bool = False
) -> list[int]:
    """[a scenario of a world of one] Check some deaths, and draws; return the numbers of points without deaths.

    With ``own`` FSDP2 is reset as under a torch without `FSDPModule.reset_iter_state`.
    """
    with mock.patch.object(mesh, "_reset", mesh.reset_iter_state if own else mesh._reset):
        for each in [*(Deaths(**each) for each in chosen), *map(draw, seeds)]:
            check(each)
        return sorted(set(check(Deaths(replicas=2, tied=False)).points.values()))


def draw_sliced(seed: int, shards: int) -> Deaths:
    """Draw one or two deaths among two replicas of lanes of two workers, at any of a step's points."""
    chance = random.Random(seed)
    tied = chance.random() < 0.3
    points = SLICED_POINTS[shards, tied]
    victims = chance.sample(range(4 * shards), chance.choice((1, 2, 2)))
    at = [[victim, 1 + chance.randrange(points)] for victim in victims]
    return Deaths(replicas=2, tied=tied, shards=shards, slices=2, at=at)


def sliced(rank: int, world: int, folder: Path, seeds: list[int], shards: int) -> list[int]:
    """[a scenario of a world of one] Check draws, and runs without deaths; return the numbers of points of these."""
    for seed in seeds:
        check(draw_sliced(seed, shards))
    plain = [Deaths(replicas=2, tied=tied, shards=shards, slices=2) for tied in (True, False)]
    return [points for each in plain for points in sorted(set(check(each).points.values()))]


def struck(rank: int, world: int, folder: Path, replicas: int, at: Any, after: Any) -> list[list[int]]:
    """[a scenario of a world of one] The rows that each survivor knows to be computed again, and the buckets it has
    kept, in the order of first ranks.
    """
    task = check(Deaths(replicas=replicas, tied=False, at=at, after=after))
    return [[len(task.recomputed[worker]), task.kept[worker]] for worker in sorted(task.recomputed)]


def flipped(rank: int, world: int, folder: Path, replicas: int, flips: list[int]) -> list[list[int]]:
    """[a scenario of a world of one] The ranks that all workers find odd in the step before which bits flip."""
    task = Task(Deaths(replicas=replicas, tied=False, flips=flips))
    with stores(task):
        task.run()
    found = [task.odd[worker, STRUCK] for worker in range(SHARDS * replicas)]
    assert not any(task.odd[worker, STRUCK - 1] for worker in range(SHARDS * replicas))
    return found


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    shards = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    for seed in range(first, first + count):
        check(draw_sliced(seed, shards) if shards else draw(seed))
    print(f"{count} histories: parameters as in one process")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
