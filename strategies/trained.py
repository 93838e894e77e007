"""Parameters that need gradients, found without walking through all modules before every step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer


class TrainedParameters:
    """The parameters of a model that need gradients.

    Modules are walked through again when the optimizers have other parameters, or on request. A change in whether a
    known parameter needs a gradient is always detected.
    """

    def __init__(self) -> None:
        self._named: list[tuple[str, Parameter]] = []
        self._optimized: list[int] = []

    def find(self, module: nn.Module, optimizers: Sequence[Optimizer], *, anew: bool) -> list[tuple[str, Parameter]]:
        """Return names and parameters, in the model's order, without repeats."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        optimized = [id(parameter) for group in groups for parameter in group["params"]]
        if anew or optimized != self._optimized:
            self._named, self._optimized = list(module.named_parameters()), optimized
        return [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
