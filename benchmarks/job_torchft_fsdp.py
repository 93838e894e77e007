"""The workload under torchft with FSDP2: a replica group is a torchrun of two workers, which hold a shard each.

torchft's HSDP example (``train_fsdp.py`` of its repository) calls ``ft_init_device_mesh``, which its present releases
lack. Their own test of FSDP2 sums the shards of the groups in FSDP2's all-reduce hook, as this job does.
"""

from __future__ import annotations

import os

os.environ["BENCH_SLOT"] = str(int(os.environ["REPLICA_GROUP_ID"]) * 2 + int(os.environ["RANK"]))

import workload

log = workload.EventLog()
log("started")

from datetime import timedelta  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torchft import Manager, Optimizer, ProcessGroupGloo  # noqa: E402

SHARDS = 2
GROUP_TIMEOUT, MANAGER_TIMEOUT = timedelta(seconds=5), timedelta(seconds=30)
"""Values of torchft's own CPU example."""


def parts(values: Any) -> Any:
    """Tensors of a nested state in place of the distributed ones; they share memory."""
    if isinstance(values, dict):
        return {name: parts(value) for name, value in values.items()}
    return values.to_local() if hasattr(values, "to_local") else values


def fill(values: Any, received: Any) -> None:
    """Copy received tensors into those of a state of the same structure."""
    for name, value in parts(values).items():
        if isinstance(value, dict):
            fill(value, received[name])
        elif isinstance(value, Tensor):
            value.copy_(received[name])


class Shard:
    """This worker's shard of the model and of Adam's state, which exists from the beginning."""

    def __init__(self) -> None:
        self.network: Any = workload.model()
        mesh = init_device_mesh("cpu", (SHARDS,))
        for layer in (*self.network.children(), self.network):
            if isinstance(layer, (nn.Linear, nn.Sequential)):
                fully_shard(layer, mesh=mesh)
        self.adam = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        for parameter in self.network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.adam.step()

    def state(self) -> dict[str, Any]:
        states = {str(number): state for number, state in enumerate(self.adam.state.values())}
        return {"model": dict(self.network.named_parameters()), "optimizer": states}

    def load(self, received: dict[str, Any]) -> None:
        with torch.no_grad():
            fill(self.state(), received)

    def sum_by(self, manager: Manager) -> None:
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda output: manager.allreduce(output).wait() and None)


def main() -> None:
    group, rank = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    shard = Shard()

    def load(state: dict[str, Any]) -> None:
        shard.load(state)
        log("restored", step=manager.current_step())

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GROUP_TIMEOUT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: parts(shard.state()),
        replica_id=f"bench_{group}",
        timeout=MANAGER_TIMEOUT,
        use_async_quorum=False,  # as in the example
    )
    shard.sum_by(manager)
    optimizer = Optimizer(manager, shard.adam)
    iteration = manager.current_step()
    while manager.current_step() < workload.STEPS:
        optimizer.zero_grad()  # starts the quorum
        for place in range(workload.MICRO_BATCHES):
            micro = workload.number(iteration, place, group * SHARDS + rank)
            shard.network.set_requires_gradient_sync(place == workload.MICRO_BATCHES - 1)
            (workload.loss(shard.network, *workload.samples(micro)) / workload.MICRO_BATCHES).backward()
            log("micro", step=manager.current_step(), place=place, micro=micro)
        optimizer.step()  # commits or discards the step
        if manager._commit_failures:
            log("dropped", step=manager.current_step())
        else:
            log("step", step=manager.current_step() - 1, world=manager.num_participants() * SHARDS)
        iteration += 1  # as in the example: the loader advances whether or not the step counted


if __name__ == "__main__":
    main()
