"""The failure-free run of train.py's settings: a plain loop over megatron-core, with its own groups."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import doubled
import plain
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from torch.utils.data import Subset, default_collate

from unicron_lightning.data.sources import ChunkOrder
from unicron_lightning.megatron import toy
from unicron_lightning.strategies.megatron.batches import seed_micro_batch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MICRO_BATCH = 2
SAMPLES, CHUNK = 4096, 1000
SECOND = 12
"""Number of samples of the second loader."""
STREAMED = 27
"""Number of samples of an iterable data set."""
DROPPED = 19
"""The one that is in no batch of the validation's streams, as the second has 7 samples, and batches have 3."""


def run(rank: int, world: int, folder: Path, *, settings: dict[str, Any], steps: list[int]) -> list[float]:
    """Scenario: train to the last of ``steps``, keep the parameters after each; return the gradients' norms."""
    doubled.install(settings)
    torch.compiler.set_stance("force_eager")  # as in train.py
    options, parts = toy.Toy(**settings["toy"]), settings.get("cp", 1)
    plain.start(rank, world, folder, **{name: settings.get(name, 1) for name in ("tp", "pp", "vpp", "cp", "ep")})
    module, ddps, optimizer = _build(settings, options)
    data = _samples(settings, options.length)
    norms, balances = [], []
    tensor = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    part = parallel_state.get_context_parallel_rank()

    def forward_step(batches: Any, model: Any) -> Any:
        place, batch, weight = next(batches)
        virtual = next(number for number, ddp in enumerate(ddps) if ddp is model)
        seed_micro_batch(
            1234, place, tensor, stage + settings["pp"] * (virtual + len(ddps) * part), torch.device("cpu")
        )
        get_moe_layer_wise_logging_tracker().clear()
        output = toy.forward(model, batch)
        if options.experts and parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual):
            balances.append(_balance())
        return output, lambda output: (toy.loss(output) * weight / parts, {})

    for step in range(max(steps)):
        for ddp in ddps:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=_each(ddps, partial(_streamed if settings.get("stream") else _batches, data, step, settings)),
            model=ddps,
            num_microbatches=settings["accumulation"],
            seq_length=options.length,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        norms.append(float(optimizer.step()[1] or "nan"))  # None if it has skipped the step
        for group in optimizer.param_groups:
            group["lr"] *= 0.99
        if settings.get("validate") and (step + 1 in steps or (step + 1) % settings["validate"] == 0):
            _judge(ddps, module, options, settings, folder / f"validation-{rank}-{step + 1}")
        if step + 1 in steps:
            _keep_first(module, settings, folder, step + 1)
    if options.experts and parallel_state.is_pipeline_last_stage():
        balance = torch.tensor(balances, dtype=torch.float64).view(max(steps), -1).mean(1)
        dist.all_reduce(balance, group=parallel_state.get_data_parallel_group())
        balance /= parallel_state.get_data_parallel_world_size()
        (folder / f"balance-{rank}").write_text(json.dumps(balance.tolist()))
    dist.destroy_process_group()
    return norms


def _build(settings: dict[str, Any], options: toy.Toy) -> tuple[Any, list[Any], Any]:
    """The model, its parts in megatron-core's DDP, and their optimizer."""
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = toy.config(
        options,
        tensor_model_parallel_size=settings["tp"],
        pipeline_model_parallel_size=settings["pp"],
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        microbatch_group_size_per_vp_stage=settings["accumulation"] if settings.get("vpp", 1) > 1 else None,
        context_parallel_size=settings.get("cp", 1),
        expert_model_parallel_size=settings.get("ep", 1),
    )
    module = toy.model(options, config)
    ddp_config = DistributedDataParallelConfig(
        **{"grad_reduce_in_fp32": options.bf16 or options.fp16, **settings["ddp"]}
    )
    parts = [*module] if isinstance(module, torch.nn.ModuleList) else [module]
    ddps = [
        DistributedDataParallel(config, ddp_config, part, disable_bucketing=number > 0)
        for number, part in enumerate(parts)
    ]
    for ddp in ddps:
        ddp.broadcast_params()
    optimizer_config = OptimizerConfig(
        **{"optimizer": "adam", "lr": 1e-2, "clip_grad": 1.0, **settings["optimizer"]},
        bf16=options.bf16,
        fp16=options.fp16,
        params_dtype=config.params_dtype,
    )
    optimizer = get_megatron_optimizer(optimizer_config, ddps)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    no_syncs = [ddp.no_sync for ddp in ddps]
    config.no_sync_func = (no_syncs if len(ddps) > 1 else no_syncs[0]) if ddp_config.overlap_grad_reduce else None
    return module, ddps, optimizer


def _each(ddps: list[Any], batches: Any) -> Any:
    """The batches for each part of the model, in the form that Megatron's schedules take."""
    return [batches() for _ in ddps] if len(ddps) > 1 else batches()


def _balance() -> float:
    """The present micro-batch's auxiliary losses, with the parts of tensor-parallel workers."""
    total = 0.0
    for each in get_moe_layer_wise_logging_tracker().values():
        values = each["values"].clone()
        if each["reduce_group"] is not None:
            dist.all_reduce(values, group=each["reduce_group"])
        total += float(values.sum())
    return total


def _keep_first(module: torch.nn.Module, settings: dict[str, Any], folder: Path, step: int) -> None:
    """Keep the parameters of each shard, once."""
    columns = max(settings.get("ep", 1), settings.get("cp", 1))
    column = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if column >= columns:
        return
    stage = parallel_state.get_pipeline_model_parallel_rank()
    shard = parallel_state.get_tensor_model_parallel_rank() + settings["tp"] * (column + columns * stage)
    _keep(module, folder / f"plain-{step}-{shard}.pt")


def _keep(module: torch.nn.Module, path: Path) -> None:
    torch.save(
        {name: value.detach().double() for name, value in module.state_dict().items() if value is not None}, path
    )


def _judge(ddps: list[Any], module: Any, options: toy.Toy, settings: dict[str, Any], path: Path) -> None:
    """Write the mean losses of train.py's validation samples by loader; on the last stage."""
    judged = range(settings.get("judged", 22))
    streamed = [number for number in judged if number != DROPPED]
    loaders = [*([streamed] if settings.get("stream") else []), list(judged)]
    means = [_validation(ddps, module, options, numbers) for numbers in loaders]
    if parallel_state.is_pipeline_last_stage():
        path.write_text(json.dumps(means))


def _validation(ddps: list[Any], module: Any, options: toy.Toy, numbers: list[int]) -> float:
    """Return the mean loss of some samples, taken one by one; 0 on earlier stages."""
    data, losses = toy.Text(options.length, limit=max(numbers) + 1), []

    def forward_step(batches: Any, model: Any) -> Any:
        def judge(output: Any) -> Any:
            losses.append(float(toy.loss(output)))
            return torch.zeros(1), {}

        return toy.forward(model, next(batches)), judge

    module.eval()
    config = ddps[0].config
    group, config.microbatch_group_size_per_vp_stage = config.microbatch_group_size_per_vp_stage, len(numbers)
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=_each(ddps, lambda: (default_collate([data[number]]) for number in numbers)),
            model=ddps,
            num_microbatches=len(numbers),
            seq_length=options.length,
            micro_batch_size=1,
            forward_only=True,
        )
    config.microbatch_group_size_per_vp_stage = group
    module.train()
    mean = torch.tensor(sum(losses) / len(numbers) / parallel_state.get_context_parallel_world_size())
    dist.all_reduce(mean, group=parallel_state.get_context_parallel_group())
    return float(mean)


def lanes_of(settings: dict[str, Any]) -> int:
    """Workers that compute different micro-batches at a time."""
    parts = settings.get("cp", 1)
    return int(settings["dp"] * max(settings.get("ep", 1), parts) // parts)


def _samples(settings: dict[str, Any], length: int) -> Any:
    """The training samples; those of litData's chunks in the order of its declared devices."""
    text = toy.Text(length, limit=SAMPLES)
    if not settings.get("chunks"):
        return text
    chunks = [range(first, min(first + CHUNK, SAMPLES)) for first in range(0, SAMPLES, CHUNK)]
    return Subset(text, list(ChunkOrder(chunks, settings["dp"], None)))


def _batches(data: Any, step: int, settings: dict[str, Any]) -> Iterator[tuple[Any, dict[str, torch.Tensor], float]]:
    """The micro-batches of this replica: every ``replicas``-th, and their weight."""
    share, replicas = settings["accumulation"], lanes_of(settings)
    own = parallel_state.get_data_parallel_rank()
    for number in range(share):
        samples = _mixed(step * share + number, own, settings)
        epoch, within = divmod(step, len(data) // (MICRO_BATCH * share * replicas))
        batch = default_collate([data[sample % len(data)] for sample in samples])
        yield (1, epoch, within, number * replicas + own), batch, 1.0


def _streamed(data: Any, step: int, settings: dict[str, Any]) -> Iterator[tuple[Any, dict[str, torch.Tensor], float]]:
    """The micro-batches of this replica's stream, and their weights; after its end others with the weight 0.

    Megatron divides by all rounds and replicas, and a short step's gradient is the mean over the micro-batches that it
    has, times its rounds / all rounds.
    """
    share, replicas = settings["accumulation"], lanes_of(settings)
    sizes = [len(range(replica, STREAMED, replicas)) // MICRO_BATCH for replica in range(replicas)]
    epoch, within = divmod(step, -(-max(sizes) // share))
    own = parallel_state.get_data_parallel_rank()
    rounds = range(within * share, (within + 1) * share)
    present = [(number, replica) for number in rounds for replica in range(replicas) if number < sizes[replica]]
    weight = replicas * len({number for number, _ in present}) / len(present)
    for number in rounds:
        runs = (number, own) in present
        batch = default_collate([data[sample] for sample in _mixed(number if runs else 0, own, settings)])
        yield (1, epoch, within, present.index((number, own)) if runs else 0), batch, weight * runs


def _mixed(number: int, own: int, settings: dict[str, Any]) -> list[int]:
    """The samples of a replica's micro-batch of a data epoch, distributed as by `DistributedSampler`.

    With ``several`` the second half is from the first `SECOND` samples, again and again.
    """
    replicas = lanes_of(settings)
    samples = _round(number, own, replicas)
    if not settings.get("several"):
        return samples
    again = _round(number % (SECOND // (MICRO_BATCH * replicas)), own, replicas)
    return [*samples[: MICRO_BATCH // 2], *again[MICRO_BATCH // 2 :]]


def _round(number: int, own: int, replicas: int) -> list[int]:
    """The samples of a replica in a round of micro-batches."""
    first = number * replicas * MICRO_BATCH
    return list(range(first + own, first + replicas * MICRO_BATCH, replicas))
