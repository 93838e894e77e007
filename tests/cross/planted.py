"""Former faults of the product, planted again into a worker: the generator must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn
from torch.distributed.fsdp import FSDPModule

from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.fsdp import folder, model
from unicron_lightning.strategies import unicron
from unicron_lightning.strategies.fsdp import checkpoints
from unicron_lightning.strategies.membership import Membership
from unicron_lightning.strategies.parallelism import Parallelism
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker.buckets import GradientBuckets


def start_hooks_repeated() -> None:
    """A joiner's start hooks change the state that it has received."""
    whole, restore = join_state.arrive, join_state._restore

    def arrive(*arguments: Any) -> None:
        join_state._restore = lambda *_: None  # type: ignore[assignment]
        try:
            whole(*arguments)
        finally:
            join_state._restore = restore

    join_state.arrive = arrive  # type: ignore[assignment]
    Parallelism.compare = lambda *_, **__: None  # type: ignore[assignment,method-assign]


def gradient_added_twice() -> None:
    """FSDP2 keeps gradients of whole parameters of an interrupted backward."""

    def reset(module: nn.Module) -> None:
        for each in module.modules():
            if isinstance(each, FSDPModule) and each._get_fsdp_state()._is_root:
                each.reset_iter_state()

    model.reset_after_exception = reset


def optimizer_state_lost() -> None:
    """The optimizer's state of a checkpoint is not loaded by `unicron_fsdp`."""
    folder.load_optimizer_part = lambda *_: None  # type: ignore[assignment]
    checkpoints.load_optimizer = lambda *_, **__: None  # type: ignore[assignment]


def additions_by_rank() -> None:
    """Gradients are added as floats, in the order of ranks."""
    unicron.ExactGradients = GradientBuckets  # type: ignore[attr-defined,misc]


def batches_counted_once() -> None:
    """All epochs have as many batches as the first."""
    count = DataOrder.num_micro_batches
    DataOrder.num_micro_batches = lambda self, epoch: count(self, 0)  # type: ignore[method-assign]


def short_step_divided_by_whole() -> None:
    """The gradient of a short step is divided by the number of micro-batches of a full one."""

    def divisor(self: StepShape, places: Sequence[int]) -> float:
        return float(self.micro_batches)

    StepShape.divisor = divisor  # type: ignore[method-assign]


def later_fit_resumed() -> None:
    """The first fit of a new life takes the checkpoint of a later fit."""
    resume = Membership.resume

    def resumed(self: Membership, trainer: Any) -> None:
        session = self._strategy.session
        session.resume = tuple(type(each)(**{**_fields(each), "fit": session.fits}) for each in session.resume)
        resume(self, trainer)

    Membership.resume = resumed  # type: ignore[method-assign]


def _fields(checkpoint: Any) -> dict[str, Any]:
    return {name: getattr(checkpoint, name) for name in checkpoint.__struct_fields__}


FAULTS: Final[dict[str, Callable[[], None]]] = {
    each.__name__: each
    for each in (
        start_hooks_repeated,
        gradient_added_twice,
        optimizer_state_lost,
        additions_by_rank,
        batches_counted_once,
        short_step_divided_by_whole,
        later_fit_resumed,
    )
}
