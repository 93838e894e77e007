"""Plain megatron-core training of the toy GPT, as in its own examples: the reference and the parts of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.utils.data import default_collate

from unicron_lightning.megatron import shim, toy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MICRO_BATCH = 2
"""Samples of a micro-batch."""


@dataclass
class Training:
    """One rank's training objects."""

    toy: toy.Toy
    config: Any
    ddp: DistributedDataParallel
    optimizer: Any
    data: toy.Text

    def step(self, number: int, micro_batches: int) -> float:
        """Run one optimizer step over ``micro_batches`` of the whole data-parallel group; return its gradient norm."""
        self.accumulate(number, micro_batches)
        finalize_model_grads([self.ddp])
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def accumulate(self, number: int, micro_batches: int) -> None:
        """Accumulate this rank's share of the step's gradients into ``main_grad``."""
        size = parallel_state.get_data_parallel_world_size()
        share = micro_batches // size
        first = number * micro_batches + parallel_state.get_data_parallel_rank() * share
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=self.batches(range(first, first + share)),
            model=[self.ddp],
            num_microbatches=share,
            seq_length=self.toy.length,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )

    def batches(self, numbers: range) -> Iterator[dict[str, torch.Tensor]]:
        """Yield micro-batches by number."""
        for number in numbers:
            samples = range(number * MICRO_BATCH, (number + 1) * MICRO_BATCH)
            yield default_collate([self.data[sample % len(self.data)] for sample in samples])


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    output = toy.forward(model, next(batches))
    parts = parallel_state.get_context_parallel_world_size()  # the losses of a sequence's parts are added up
    return output, lambda output: (toy.loss(output) / parts, {})


def start(
    rank: int,
    world: int,
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    ep: int = 1,
    name: str = "store",
) -> None:
    """Initialise the default process group and megatron-core's groups, over a file in ``folder``."""
    store = dist.FileStore(str(folder / name), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(
        tp, pp, vpp if vpp > 1 else None, context_parallel_size=cp, expert_model_parallel_size=ep
    )


def build(options: toy.Toy, *, zero1: bool, clip: float = 1.0, seed: int = 1234, **ddp_options: Any) -> Training:
    """Build model, DDP and optimizer in the initialised layout."""
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    config = toy.config(
        options,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=zero1, grad_reduce_in_fp32=options.bf16, **ddp_options
    )
    ddp = DistributedDataParallel(config, ddp_config, toy.model(options, config))
    ddp.broadcast_params()
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=options.bf16,
        params_dtype=config.params_dtype,
        clip_grad=clip,
        use_distributed_optimizer=zero1,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    config.grad_scale_func = optimizer.scale_loss
    return Training(options, config, ddp, optimizer, toy.Text(options.length))


def train(
    rank: int,
    world: int,
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero1: bool = False,
    steps: int = 2,
    options: dict[str, Any] | None = None,
    without: str = "",
    **ddp_options: Any,
) -> list[float]:
    """Scenario: train some steps in a layout, with the shim except for one patch; return the gradients' norms."""
    shim.install(without={without} - {""})
    start(rank, world, folder, tp=tp, pp=pp, cp=cp, ep=ep)
    training = build(toy.Toy(**options or {}), zero1=zero1, **ddp_options)
    norms = [training.step(number, 4) for number in range(steps)]
    dist.destroy_process_group()
    return norms
