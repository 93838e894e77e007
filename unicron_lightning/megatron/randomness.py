"""Megatron's random state as a function of the micro-batch.

Megatron keeps named states for regions that must differ or agree among tensor-parallel workers. Each of them, and the
default one, is set before a micro-batch's forward; backward draws nothing, and recomputation restores the forward's.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch
from megatron.core import tensor_parallel

from unicron_lightning.data.seeding import place_seed, seed_all

_SHARED: Final = "data-parallel-rng"
"""Megatron's name of the state that is the same on all tensor-parallel workers."""


def seed_micro_batch(seed: int, place: tuple[int, ...], tensor: int, stage: int, device: torch.device) -> None:
    """Set all random state.

    Args:
        seed: of the task.
        place: epoch, step and micro-batch.
        tensor: this worker's tensor-parallel rank.
        stage: its pipeline stage.
        device: of the model.
    """
    seed_all(place_seed(seed, *place, stage))
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    if not states:
        return
    generator = torch.Generator(device=device)
    for name in states:
        own = 0 if name == _SHARED else 1 + tensor
        generator.manual_seed(place_seed(seed, *place, stage, own, zlib.crc32(name.encode())))
        states[name] = generator.get_state()
    tracker.set_states(states)
