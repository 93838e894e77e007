"""A mixture of experts in plain PyTorch, whose experts are divided among the workers of a lane, as by torchtitan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

CHOSEN = 2


class Experts(nn.Module):
    """Each token goes through the experts of its largest gates.

    Args:
        width: of a token.
        inner: of an expert.
        number: of experts; with `DividedExperts` a multiple of a lane's workers.
    """

    def __init__(self, width: int, inner: int, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        self.up = nn.Parameter(torch.randn(number, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, inner, width) / inner**0.5)

    def forward(self, x: Any) -> Tensor:
        """Return the sum over all experts, or over this worker's for a token that all workers of a lane have."""
        gates: Any = self.router(x).softmax(-1)
        up, down, first = self.up, self.down, 0
        if isinstance(up, DTensor):
            first = up.device_mesh.get_local_rank() * (len(gates[0, 0]) // up.device_mesh.size())
            up, down = up.to_local(), down.to_local()
            x, gates = (each.to_local(grad_placements=(Partial(),)) for each in (x, gates))
        gates = gates * (gates >= gates.topk(CHOSEN, -1).values[..., -1:])
        out = torch.zeros_like(x)
        for number in range(len(up)):
            hidden = nn.functional.gelu(x @ up[number]) @ down[number]
            out = out + gates[..., first + number, None] * hidden
        return out


class DividedExperts(ParallelStyle):
    """Gives each worker of a lane some of the experts; the router is the same on all.

    Args:
        layout: of tokens that come, and of sums that leave.
    """

    def __init__(self, layout: Placement | None = None) -> None:
        super().__init__()
        self.layout = layout or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, each in [*part.named_parameters(recurse=False)]:
                place = Shard(0) if each.dim() == 3 else Replicate()
                part.register_parameter(name, nn.Parameter(distribute_tensor(each, mesh, [place])))

        def take(_: nn.Module, given: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(given[0], mesh, [self.layout], run_check=False).redistribute(
                placements=[Replicate()]
            )

        def give(_: nn.Module, found: Any, mesh: DeviceMesh) -> Any:
            summed = DTensor.from_local(found, mesh, [Partial()], run_check=False)
            return summed.redistribute(placements=[self.layout]).to_local()

        return distribute_module(module, device_mesh, divide, take, give)
