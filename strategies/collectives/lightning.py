"""Lightning's own collectives under the strategy ``unicron``: all go through the engine, and so survive failures."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import has_len_all_ranks
from torch import Tensor
from typing_extensions import override

from unicron_lightning import environ
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.collectives import default_group
from unicron_lightning.strategies.collectives.operations import Collectives
from unicron_lightning.strategies.environment import UnicronEnvironment
from unicron_lightning.strategies.lightning_root import check_accelerator
from unicron_lightning.strategies.metrics.loggers import is_log_dir
from unicron_lightning.worker.session import Session


class CollectingStrategy(ParallelStrategy):
    """Collectives called by Lightning and scripts; before the first run no values are exchanged."""

    def __init__(self, **kwargs: Any) -> None:
        self._environment = UnicronEnvironment()
        super().__init__(cluster_environment=self._environment, **kwargs)
        self._collectives: Collectives | None = None
        self._is_first = True
        self._trainer: pl.Trainer | None = None
        self._loads = ""

    @property
    @override
    def accelerator(self) -> pl.accelerators.Accelerator | None:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: pl.accelerators.Accelerator) -> None:
        check_accelerator(accelerator, type(self))
        self._accelerator = accelerator

    @property
    def is_distributed(self) -> bool:
        """Whether there may be other workers: Lightning then calls `reduce` for values that hooks log."""
        return environ.under_agent()

    def _begin_collectives(self, session: Session, trainer: pl.Trainer, *, is_first: bool, is_group: bool) -> None:
        """Exchange values from now on; by `torch.distributed` too, if the workers are its default group."""
        if self._collectives is None:
            self._collectives = Collectives(session)
            self._is_first = is_first
        self._collectives.records = self._is_first or trainer.state.fn == TrainerFn.FITTING
        self._collectives.scope = f"{session.begin_run()}"
        if is_group:
            default_group.register(self._environment.place, self._collectives)
            default_group.keep_lightning_out(trainer)
            session.closing = default_group.unregister

    def _end_collectives(self, session: Session) -> None:
        """End a run; the default group of a world of this process alone ends with it."""
        if session.control is None:
            default_group.unregister()

    @property
    def collectives(self) -> Collectives:
        """Collectives of the present run."""
        assert self._collectives is not None, "collectives need a run"
        return self._collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if name is not None and name.endswith("_dataloader()"):  # no need to wait: see `reduce`
            self._loads = name.removesuffix("_dataloader()")
        elif self._collectives is not None:
            self._collectives.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._collectives is None:
            return obj
        if self._trainer is not None and self.collectives.inside is not None and is_log_dir(self._trainer, obj):
            return obj  # ``trainer.log_dir`` in a step: the loggers' versions are shared
        return self._collectives.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._collectives is None:
            return tensor
        if sys._getframe(1).f_code is has_len_all_ranks.__code__:
            # Lightning asks whether all ranks' loaders have a length. They are equal; and ranks set up loaders at
            # different places of the program (a joiner at its start), so this must not communicate.
            return tensor * self.world_size
        name = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1]
        return self._collectives.reduce(tensor, name.lower())

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide from the votes themselves: the world may have changed by the time all have arrived."""
        return decision if self._collectives is None else self._collectives.decide(decision, every=all)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise ConfigError("all_gather(sync_grads=True) is not supported by the unicron strategy")
        return tensor.unsqueeze(0) if self._collectives is None else self._collectives.stack("all_gather", tensor)
