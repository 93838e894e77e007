"""The step protocol of `test_engine` with NCCL's communicator on its stand-in.

As a program it runs many random histories: ``python nccl_simulation.py COUNT SEED``, with tests/ on PYTHONPATH.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from worker.nccl_stand_in import Host, Network, StandInLibrary
from worker.simulation import Coordinator, FakeCommunicator, Fault, run_threads
from worker.test_engine import Program, check

from unicron_lightning.worker.communication.communicator import Handle
from unicron_lightning.worker.communication.nccl import NcclCommunicator


class Routed(NcclCommunicator):
    """Floating-point tensors, which are gradients here, are on the accelerator; all others are in host memory."""

    def all_reduce(self, tensor: Tensor) -> Handle:
        return super().all_reduce(tensor) if tensor.is_floating_point() else self._host.all_reduce(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return super().broadcast(tensor, root) if tensor.is_floating_point() else self._host.broadcast(tensor, root)


class NcclCoordinator(Coordinator):
    """Builds communicators of NCCL."""

    sockets_break = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.networks: dict[int, Network] = {}
        self.stores: dict[int, dist.Store] = {}
        self.built: list[tuple[str, NcclCommunicator]] = []

    def _connect(self, epoch: Any, rank: int, world: int) -> Any:
        host = FakeCommunicator(self.hubs[epoch.number], rank)
        with self.condition:
            network = self.networks.setdefault(epoch.number, Network(world, self._seed + epoch.number))
            store = self.stores.setdefault(epoch.number, dist.HashStore())
        made = Routed(
            store,
            rank,
            world,
            torch.device("cpu"),
            Host(host),
            StandInLibrary.of(network),
        )
        self.built.append((epoch.members[rank].worker, made))
        return made

    def left(self, worker: str, died: bool) -> None:
        """As in the kernel, the sockets of a process are closed before its death is reported."""
        for name, communicator in list(self.built):
            if name == worker and (barrier := communicator._owned._barrier) is not None:
                barrier.announce()
        super().left(worker, died)


def simulate_nccl(
    faults: dict[str, int], world: int = 4, joiners: tuple[str, ...] = ("j0",), seed: int = 0
) -> tuple[Coordinator, dict[str, Program], dict[str, Fault]]:
    """Run a task in which some workers die at their n-th fault point; as `test_engine.simulate`."""
    coordinator = NcclCoordinator(seed)
    names = [f"w{rank}" for rank in range(world)]
    programs = {name: Program(coordinator.worker(name)) for name in names}
    programs.update({name: Program(coordinator.worker(name, joiner=True), joiner=True) for name in joiners})
    placed = {name: Fault(at) for name, at in faults.items()}
    for name, fault in placed.items():
        programs[name].engine.fault = fault
    coordinator.start()
    try:
        run_threads(coordinator, list(programs.items()))
    finally:
        for _, communicator in coordinator.built:
            communicator.close()
        for network in coordinator.networks.values():
            network.groups.clear()
        for _, communicator in coordinator.built:
            assert communicator._owned.join(20), "a group's owner hangs"
    return coordinator, programs, placed


def main(count: int, seed: int) -> None:
    """Run random histories; stop at the first wrong one."""
    draw = random.Random(seed)
    broken = 0
    for number in range(count):
        faults = {name: draw.randint(1, 90) for name in draw.sample(["w0", "w1", "w2", "j0"], draw.randint(0, 3))}
        own = draw.randrange(1 << 30)
        try:
            check(*simulate_nccl(faults, seed=own))
        except BaseException:
            print(f"history {number}: faults={faults} seed={own}")
            raise
        broken += bool(faults)
        if (number + 1) % 500 == 0:
            print(f"{number + 1} histories, {broken} with faults, 0 corrupted", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
