"""Lightning's view of this process's ranks, which change during its life."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from unicron_lightning.data.streams import as_rank
from unicron_lightning.errors import ConfigError


def own_device(devices: Sequence[torch.device], local_rank: int, local_world: int) -> torch.device:
    """Choose this worker's device.

    Args:
        devices: of the node, as Lightning has chosen them; none for the CPU.
        local_rank: place among the agent's workers.
        local_world: number of the agent's workers.

    Raises:
        ConfigError: several workers would share an accelerator, which NCCL refuses.
    """
    if not devices:
        return torch.device("cpu")
    if devices[0].type != "cpu" and local_world > len(devices):
        raise ConfigError(
            f"torchrun started {local_world} workers on this node (--nproc-per-node), but "
            f"Trainer(devices={len(devices)}) has {len(devices)} of type {devices[0].type!r}: expected at most one "
            "worker per device"
        )
    return devices[local_rank % len(devices)]


class UnicronEnvironment(ClusterEnvironment):
    """Ranks of the present epoch. Processes come from torchrun, whose variables apply until the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._node_rank = int(os.environ.get("GROUP_RANK", "0"))
        self.set_global_rank(int(os.environ.get("RANK", "0")))

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    @override
    def detect() -> bool:
        return False  # never selected by Lightning itself: the strategy provides it

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None:
        self._world_size = size

    @override
    def global_rank(self) -> int:
        return self._global_rank

    @override
    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank
        # Loggers, progress bars and warnings read these; both copies exist in Lightning 2.6.
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        fabric_rank_zero_only.rank = rank  # type: ignore[attr-defined]

    def follow_members(self) -> None:
        """Be no first rank until this joiner enters a world: the loggers of torchrun's would begin a new run."""
        self.set_global_rank(max(self._global_rank, 1))
        self.set_world_size(max(self._world_size, self._global_rank + 1))

    def place(self) -> tuple[int, int]:
        """This worker's global rank, and the size of the world."""
        return self._global_rank, self._world_size

    @contextmanager
    def seen_as(self, rank: int, size: int) -> Iterator[None]:
        """Inside, this worker has another place for the script, and for worker processes of loaders that it starts."""
        own = self._global_rank, self._world_size
        self._global_rank, self._world_size = rank, size
        try:
            with as_rank(rank, size):
                yield
        finally:
            self._global_rank, self._world_size = own

    @override
    def local_rank(self) -> int:
        return self._local_rank

    @property
    def local_world(self) -> int:
        """Number of the agent's workers."""
        return self._local_world

    @override
    def node_rank(self) -> int:
        return self._node_rank

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any settings: devices x num_nodes declares the global batch, not the present world."""
