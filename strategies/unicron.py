"""The Lightning strategy ``unicron``: data parallelism that trains straight through failures."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.data_parallel import DataParallel, WholeModelSteps
from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy
from unicron_lightning.strategies.state.comparison import Divergence, OnDivergence

_MIB = 1 << 20


class UnicronStrategy(FaultTolerantStrategy):
    """Data parallelism through failures, for any `LightningModule`, with automatic or manual optimization.

    Args:
        bucket_mib: size of a gradient bucket, in MiB.
        overlap: start reductions during the last micro-batch's backward.
        num_micro_batches: M of a global batch, instead of accumulate_grad_batches x devices x num_nodes.
        rebalance: a rank that is slower than the others gets fewer of a step's micro-batches.
        compare: workers compare seed, data, parameters and settings when the task begins and at each join, and one that
            differs is refused; see `state.comparison`. Set False if `hparams` differ on purpose.
        digest_every: number of steps between two comparisons of the workers' parameters, buffers and rates, by a digest
            in the commit; in the first step with a joiner all of their state is compared. 0: never.
        on_divergence: ``heal`` replaces workers whose parameters differ from most, ``stop`` ends the task; see
            `divergence`.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: given by Lightning.

    Raises:
        ConfigError: for settings that can't be supported exactly; see `checks`.
    """

    strategy_name = "unicron"

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        *,
        bucket_mib: float = 25.0,
        overlap: bool = True,
        num_micro_batches: int | None = None,
        rebalance: bool = False,
        compare: bool = True,
        digest_every: int = 100,
        on_divergence: OnDivergence = "heal",
    ) -> None:
        super().__init__(
            num_micro_batches=num_micro_batches,
            compare=compare,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if bucket_mib <= 0:
            raise ConfigError(f"bucket_mib={bucket_mib!r} must be above 0 (MiB)")
        divergence = Divergence(digest_every, on_divergence)
        steps = WholeModelSteps(self, int(bucket_mib * _MIB), divergence, overlap=overlap)
        self.parallelism = DataParallel(self, steps, rebalance=rebalance)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="Trains straight through failures (Unicron)")


# Lightning and scripts ask by isinstance() what works, such as torch.compile.
SingleDeviceStrategy.register(UnicronStrategy)
