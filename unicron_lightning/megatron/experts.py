"""The state of a model's routers that a step changes beside gradients, through failures.

Aux-loss-free balancing counts the tokens of each expert over the global batch, and then raises the biases of experts
with fewer tokens than others. Megatron's own finalization sums the counts over all replicas and changes the biases in
place, which cannot be undone. Here the counts of completed calls are kept, their sums are made with those of the
gradients, each micro-batch once, and the biases change in the update, after the commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import Router
from torch import Tensor, nn


class Experts:
    """The routers of one worker's part of the model.

    Args:
        module: Megatron's.
        config: its `TransformerConfig`.
    """

    def __init__(self, module: nn.Module, config: Any) -> None:
        self._config = config
        self._routers: list[Any] = [each for each in module.modules() if isinstance(each, Router)]
        self._biased = [each for each in self._routers if getattr(each, "expert_bias", None) is not None]
        self._counts: list[Tensor] = []
        """Tokens of each expert in completed calls, by router."""
        self._sums: list[Tensor] = []
        """The counts over all replicas."""
        self.begin()

    def __bool__(self) -> bool:
        return bool(self._routers)

    def begin(self) -> None:
        """Begin a step, or begin it again without any call."""
        self._counts = [torch.zeros_like(each.local_tokens_per_expert) for each in self._biased]
        self.recover()

    def recover(self) -> None:
        """After a failure: return to the counts of completed calls."""
        with torch.no_grad():
            for router, count in zip(self._biased, self._counts, strict=True):
                router.local_tokens_per_expert.copy_(count)

    def start_micro_batch(self, *, counts: bool) -> None:
        """Begin a micro-batch, whose auxiliary losses Megatron's tracker has from now on, without earlier ones.

        Args:
            counts: whether its tokens are counted.
        """
        get_moe_layer_wise_logging_tracker().clear()  # also the groups of earlier epochs
        for router in self._biased:
            router.enable_expert_bias = counts

    def sum_losses(self) -> None:
        """Sum auxiliary losses in Megatron's tracker over the workers that have parts of the micro-batch's sequences.

        Raises:
            RuntimeError: a connection was lost.
        """
        for each in get_moe_layer_wise_logging_tracker().values():
            group, each["reduce_group"] = each.get("reduce_group"), None  # Megatron's own reduction leaves these out
            if group is not None and group.size() > 1:
                dist.all_reduce(each["values"], group=group)

    def take(self) -> None:
        """Keep the counts after a call."""
        self._counts = [each.local_tokens_per_expert.clone() for each in self._biased]

    def reduce(self) -> None:
        """Sum the counts over all replicas and lanes.

        Raises:
            RuntimeError: the reduction has failed.
        """
        if not self._biased:
            return
        sums = torch.stack(self._counts)
        dist.all_reduce(sums, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        self._sums = [*sums]

    @contextmanager
    def without_update(self) -> Iterator[None]:
        """Keep Megatron's finalization inside from changing the biases."""
        enabled = getattr(self._config, "moe_router_enable_expert_bias", False)
        self._config.moe_router_enable_expert_bias = False
        try:
            yield
        finally:
            self._config.moe_router_enable_expert_bias = enabled

    def update(self) -> None:
        """Change the biases as Megatron's ``get_updated_expert_bias`` does, without communication."""
        with torch.no_grad():
            for router, tokens in zip(self._biased, self._sums, strict=True):
                offset = tokens.sum() / len(tokens) - tokens
                router.expert_bias.add_(torch.sign(offset) * self._config.moe_router_bias_update_rate)
        self._sums = []
